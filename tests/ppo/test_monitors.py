"""Scores and divergences that are watched and never learned from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ppo import tiny
from wpr import ForwardKL, ReverseKL
from wpr.ppo import TrainingFault
from wpr.rewards import FunctionReward


def length(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
    return [float(len(response.split())) for response in responses]


def watched(folder: Path, monitors: dict[str, Any], **changes: Any) -> Any:
    parts = {"monitors": monitors, "eval_dataset": tiny.prompts(6)}
    return tiny.trainer(folder, parts=parts, max_steps=3, **changes)


def test_monitors_are_logged_and_change_nothing(tmp_path: Path) -> None:
    plain = tiny.trainer(tmp_path / "plain", max_steps=3)
    plain.train()
    trainer = watched(tmp_path / "watched", {"gold": length, "w7": tiny.counts_w7})
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    for row in rows:
        assert row["w7"] == row["score"]  # the reward is the same function
        assert row["gold"] > 0
        assert row["seconds_monitors"] >= 0
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(weight, trainer.model.state_dict()[name]), name


def test_monitors_in_evaluations(tmp_path: Path) -> None:
    trainer = watched(tmp_path, {"gold": length})
    metrics = trainer.evaluate()
    assert metrics["eval_gold"] == pytest.approx(sum(row["gold"] for row in trainer.evaluated) / 6)
    for row in trainer.evaluated:
        assert row["gold"] == len(row["response"].split())


def test_a_monitor_that_is_not_for_training_is_asked_in_evaluations_only(tmp_path: Path) -> None:
    asked: list[int] = []

    def slow(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        asked.append(len(responses))
        return length(prompts, responses)

    monitor = FunctionReward(slow)
    monitor.in_training = False
    trainer = watched(tmp_path, {"gold": monitor, "words": length})
    trainer.train()
    assert asked == []
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert all("words" in row and "gold" not in row for row in rows)
    assert trainer.evaluate()["eval_gold"] == pytest.approx(sum(row["gold"] for row in trainer.evaluated) / 6)
    assert sum(asked) == 6


def test_monitors_in_written_completions(tmp_path: Path) -> None:
    trainer = watched(tmp_path, {"gold": length}, log_completions=2)
    trainer.train()
    lines = (tmp_path / "completions" / "step-000000.jsonl").read_text().splitlines()
    assert all('"gold": ' in line for line in lines)


def test_a_monitor_that_fails_is_named(tmp_path: Path) -> None:
    def broken(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        raise KeyError("no such word")

    trainer = watched(tmp_path / "raises", {"gold": broken})
    with pytest.raises(TrainingFault, match="no such word"):
        trainer.train()
    trainer = watched(tmp_path / "nan", {"gold": lambda prompts, responses, **columns: [float("nan")] * len(prompts)})
    with pytest.raises(TrainingFault, match="monitor gold score of response 0 is nan"):
        trainer.train()


@pytest.mark.parametrize(
    "name", ["score", "kl_sequence", "two words", "divergence_x", "response_ids", "policy_grad_norm"]
)
def test_names_that_the_log_has_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"a monitor cannot be called '{name}'"):
        watched(tmp_path, {name: length})


def test_eval_regularizers_measure_every_policy_alike(tmp_path: Path) -> None:
    """By the policy's own regularizer they give its divergence, and they are not part of training."""
    parts = {
        "eval_dataset": tiny.prompts(6),
        "eval_regularizers": {"own": ReverseKL(), "forward": ForwardKL(), "semantic": "semantic"},
    }
    trainer = tiny.trainer(tmp_path, parts=parts, max_steps=3)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_divergence_own"] == pytest.approx(metrics["eval_divergence"], rel=1e-5)
    assert metrics["eval_kl"] == pytest.approx(metrics["eval_divergence_own"], rel=1e-4)
    assert metrics["eval_divergence_forward"] > 0
    assert metrics["eval_divergence_semantic"] > 0
    for row in trainer.evaluated:
        assert row["divergences"]["own"] == pytest.approx(row["divergence"], rel=1e-4, abs=1e-6)
        assert len(row["response_ids"]) == row["length"]
        # The end-of-sequence token is part of the response, but not of its text.
        assert trainer.processing_class.decode(row["response_ids"], skip_special_tokens=True) == row["response"]
    assert not any("divergence_own" in row for row in trainer.state.log_history if "loss" in row)
