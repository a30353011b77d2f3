"""Held-out pairs: the report against numbers worked out by hand and a simulation; scores against the model's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from trl import RewardConfig

from tests.ppo import tiny
from wpr.pipeline.reward import pair_report, score_pairs
from wpr.pipeline.training import ResumableRewardTrainer


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def report(margins: list[float], offset: float = 0.0) -> dict[str, Any]:
    margin = torch.tensor(margins, dtype=torch.float64)
    return pair_report(margin + offset, torch.full_like(margin, offset))


def test_by_hand() -> None:
    # p = 0.8, 0.8, 0.8, 0.2 (wrong, with confidence 0.8), 0.6, and a tie.
    chosen = torch.tensor([logit(0.8), logit(0.8), 2 + logit(0.8), 0.0, 0.0, 5.0], dtype=torch.float64)
    rejected = torch.tensor([0.0, 0.0, 2.0, logit(0.8), -logit(0.6), 5.0], dtype=torch.float64)
    found = pair_report(chosen, rejected)
    accuracy = 4.5 / 6
    assert found["pairs"] == 6
    assert found["accuracy"] == pytest.approx(accuracy)
    assert found["accuracy_standard_error"] == pytest.approx(math.sqrt(accuracy * (1 - accuracy) / 6))
    margins = [logit(0.8)] * 3 + [-logit(0.8), logit(0.6), 0.0]
    mean = sum(margins) / 6
    assert found["margin"] == pytest.approx(mean)
    assert found["margin_deviation"] == pytest.approx(math.sqrt(sum((m - mean) ** 2 for m in margins) / 6))
    assert found["loss"] == pytest.approx(-(3 * math.log(0.8) + math.log(0.2) + math.log(0.6) + math.log(0.5)) / 6)
    assert found["mean_score_chosen"] == pytest.approx((3 * logit(0.8) + 2 + 5) / 6)
    assert found["mean_score_rejected"] == pytest.approx((2 + logit(0.8) - logit(0.6) + 5) / 6)


def test_calibration_by_hand() -> None:
    # Sure to 0.72 and right 3 times of 4; sure to 0.93 and right once of 2; sure to 0.52 and right.
    margins = [logit(0.72)] * 3 + [-logit(0.72), logit(0.93), -logit(0.93), logit(0.52)]
    found = report(margins)
    bins = found["calibration"]
    assert [part["pairs"] for part in bins] == [1, 4, 2]
    assert [part["confidence"] for part in bins] == pytest.approx([0.52, 0.72, 0.93])
    assert [part["accuracy"] for part in bins] == [1.0, 0.75, 0.5]
    assert found["calibration_error"] == pytest.approx((1 * 0.48 + 4 * 0.03 + 2 * 0.43) / 7)


def test_perfect_and_hopeless() -> None:
    perfect = report([50.0] * 4)
    assert (perfect["accuracy"], perfect["accuracy_standard_error"]) == (1.0, 0.0)
    assert perfect["calibration_error"] == pytest.approx(0.0, abs=1e-12)
    assert perfect["loss"] == pytest.approx(0.0, abs=1e-12)
    hopeless = report([-50.0] * 4)
    assert (hopeless["accuracy"], hopeless["loss"]) == (0.0, pytest.approx(50.0))
    assert hopeless["calibration_error"] == pytest.approx(1.0)


def test_a_model_that_says_nothing() -> None:
    found = report([0.0] * 10)
    assert (found["accuracy"], found["margin"], found["margin_deviation"]) == (0.5, 0.0, 0.0)
    assert found["loss"] == pytest.approx(math.log(2))
    assert found["calibration_error"] == 0.0
    assert len(found["calibration"]) == 1


def test_one_pair_is_enough() -> None:
    assert report([1.0])["margin_deviation"] == 0.0


def simulated(sharpness: float) -> dict[str, Any]:
    """Pairs whose first is preferred with chance sigmoid(d); the model says sharpness * d."""
    generator = torch.Generator().manual_seed(0)
    difference = 2 * torch.randn(40_000, generator=generator, dtype=torch.float64)
    first = torch.rand(40_000, generator=generator, dtype=torch.float64) < difference.sigmoid()
    score = sharpness * difference
    zero = torch.zeros_like(score)
    return pair_report(torch.where(first, score, zero), torch.where(first, zero, score))


def test_a_calibrated_model_is_found_calibrated() -> None:
    found = simulated(1.0)
    # Every bin holds more than 2,000 pairs, whose mean is off by 0.01 or so by chance.
    assert min(part["pairs"] for part in found["calibration"]) > 2000
    assert found["calibration_error"] < 0.01
    for part in found["calibration"]:
        assert part["accuracy"] == pytest.approx(part["confidence"], abs=4 * 0.5 / math.sqrt(part["pairs"]))


@pytest.mark.parametrize("sharpness", [0.3, 3.0])
def test_a_model_too_sure_or_too_shy_is_found_out(sharpness: float) -> None:
    """The expected error is the mean distance of what is said from what holds; accuracy is the same for all."""
    generator = torch.Generator().manual_seed(0)
    difference = 2 * torch.randn(40_000, generator=generator, dtype=torch.float64)
    holds, said = difference.abs().sigmoid(), (sharpness * difference).abs().sigmoid()
    found = simulated(sharpness)
    assert found["calibration_error"] == pytest.approx((holds - said).abs().mean().item(), abs=0.01)
    assert found["calibration_error"] > 0.05
    assert found["accuracy"] == simulated(1.0)["accuracy"]
    for part in found["calibration"][1:-1]:
        assert (part["confidence"] > part["accuracy"]) == (sharpness > 1)


def test_the_stated_error_of_the_accuracy_holds() -> None:
    """Over 200 samples of 500 pairs the accuracy strays by as much as it says."""
    generator = torch.Generator().manual_seed(1)
    found = [pair_report(torch.randn(500, generator=generator) + 0.5, torch.zeros(500)) for _ in range(200)]
    spread = torch.tensor([part["accuracy"] for part in found]).std().item()
    assert spread == pytest.approx(found[0]["accuracy_standard_error"], rel=0.2)


MARGINS = st.lists(st.floats(-30, 30), min_size=1, max_size=30)


@given(MARGINS, st.floats(-5, 5))
def test_properties(margins: list[float], offset: float) -> None:
    found = report(margins)
    assert 0 <= found["calibration_error"] <= 1
    assert sum(part["pairs"] for part in found["calibration"]) == len(margins)
    assert all(0.5 <= part["confidence"] <= 1 for part in found["calibration"])
    backwards = report([-margin for margin in margins])
    assert backwards["accuracy"] == pytest.approx(1 - found["accuracy"])
    assert backwards["margin"] == pytest.approx(-found["margin"])
    assert report(margins, offset)["loss"] == pytest.approx(found["loss"], abs=1e-9)


def test_scores_are_the_model_s_own_whatever_the_batch(tmp_path: Path) -> None:
    """Pairs of many lengths, scored together with padding and one by one without."""
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(3, tiny.TOKENS, (length,), generator=generator).tolist()

    rows = [{"chosen_ids": ids(3 + number), "rejected_ids": ids(12 - number)} for number in range(9)]
    model = tiny.critic(attention_dropout=0.5)
    expected = {
        name: torch.cat([model(torch.tensor([row[name]])).logits[:, 0] for row in rows]).detach()
        for name in ("chosen_ids", "rejected_ids")
    }
    trainer = ResumableRewardTrainer(
        model=model,
        args=RewardConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny.tokenizer(),
    )
    for batch_size in (1, 4, 9):
        model.train()  # as training leaves it: scores are without dropout all the same
        chosen, rejected = score_pairs(trainer, rows, tiny.PAD, batch_size)
        torch.testing.assert_close(chosen, expected["chosen_ids"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rejected, expected["rejected_ids"], rtol=1e-4, atol=1e-5)
        assert (chosen.dtype, chosen.shape) == (torch.float32, (9,))
