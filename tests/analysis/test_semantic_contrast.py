"""Semantic contrast: what a trial is, and what the regularizers see on wpr-pico."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from wpr import ReverseKL, SquaredHellinger, TokenGeometry, Wasserstein, pico
from wpr.analysis.semantic_contrast import (
    K2,
    SURE,
    Trial,
    chat_prompts,
    continuations,
    contrast,
    gaps,
    make_trial,
    plain_prompts,
)

OPENINGS = [
    "Once upon a time, there was a small boat that wanted to",
    "One day, a boy named Tom found a box in the garden.",
    "The cat was hungry, so she went to the kitchen and",
    "Sam lost his favorite hat. He looked under the bed and",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(pico.path())


@pytest.fixture(scope="module")
def geometry(model: Any) -> TokenGeometry:
    return TokenGeometry.from_model(model, progress=False)


@pytest.fixture(scope="module")
def reference(model: Any, tokenizer: Any) -> torch.Tensor:
    return continuations(model, plain_prompts(tokenizer, OPENINGS), max_new_tokens=24)


@pytest.fixture(scope="module")
def trial(reference: torch.Tensor, geometry: TokenGeometry) -> Trial:
    return make_trial(reference, geometry, positions=48)


def test_continuations_are_the_models_own(model: Any, tokenizer: Any, reference: torch.Tensor) -> None:
    """The first row is the model's prediction after the first prompt, and every prompt gave its tokens."""
    (prompt,) = plain_prompts(tokenizer, OPENINGS[:1])
    with torch.no_grad():
        logits = model(prompt.unsqueeze(0)).logits[0, -1]
    torch.testing.assert_close(reference[0], logits.log_softmax(-1), atol=1e-4, rtol=1e-4)
    assert reference.shape == (4 * 24, 4096)
    torch.testing.assert_close(reference.exp().sum(-1), torch.ones(len(reference)))


def test_chat_prompts_follow_the_template(tokenizer: Any) -> None:
    from copy import deepcopy

    talking = deepcopy(tokenizer)
    talking.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %} answer:"
    (ids,) = chat_prompts(talking, ["Why?"])
    assert tokenizer.decode(ids) == "user: Why? answer:"


def test_a_trial_moves_half_of_the_top_token(trial: Trial, geometry: TokenGeometry) -> None:
    row = torch.arange(len(trial.origin))
    reference, near, far = trial.reference.exp(), trial.near.exp(), trial.far.exp()
    assert (reference[row, trial.origin] > SURE).all()
    assert geometry.alive[trial.origin].all()
    for policy, target in ((near, trial.near_token), (far, trial.far_token)):
        torch.testing.assert_close(policy[row, trial.origin], reference[row, trial.origin] / 2)
        gained = policy[row, target] - reference[row, target]
        torch.testing.assert_close(gained, reference[row, trial.origin] / 2, atol=1e-6, rtol=1e-5)
        changed = (policy - reference).abs() > 1e-7
        assert (changed.sum(-1) == 2).all()
    torch.testing.assert_close(reference[row, trial.near_token], reference[row, trial.far_token])
    torch.testing.assert_close(reference.sum(-1), torch.ones(len(row)))


def test_targets_are_the_neighbour_and_another_token(
    trial: Trial, geometry: TokenGeometry, reference: torch.Tensor
) -> None:
    assert not (trial.far_token == trial.near_token).any()
    assert not (trial.far_token == trial.origin).any()
    for origin, near in zip(trial.origin.tolist(), trial.near_token.tolist(), strict=True):
        assert int(geometry.nearest_tokens(origin, 1)[0][0]) == near
    candidates = set(reference.topk(K2).indices.flatten().tolist())
    assert set(trial.far_token.tolist()) <= candidates


def test_a_seed_gives_the_same_trial(reference: torch.Tensor, geometry: TokenGeometry, trial: Trial) -> None:
    again, other = (make_trial(reference, geometry, positions=48, seed=seed) for seed in (0, 1))
    assert all(torch.equal(getattr(trial, field.name), getattr(again, field.name)) for field in fields(Trial))
    assert not torch.equal(trial.far_token, other.far_token)


def test_blind_leashes_have_contrast_one(trial: Trial, geometry: TokenGeometry) -> None:
    """An f-divergence sees two equal moves; the paper's setting is one in effect on real embeddings."""
    assert len(trial.origin) == 48
    for regularizer in (ReverseKL(), SquaredHellinger(), Wasserstein(geometry, "paper")):
        value, low, high = contrast(*gaps(regularizer, trial))
        assert value == pytest.approx(1, abs=1e-5)
        assert high - low < 1e-5


def test_the_semantic_leash_sees_meaning(trial: Trial, geometry: TokenGeometry) -> None:
    value, low, high = contrast(*gaps(Wasserstein(geometry, "unbalanced"), trial))
    assert low < value < high < 0.5
    assert value < 0.4


def test_contrast_of_known_gaps() -> None:
    """A ratio of means, not a mean of ratios; the interval shrinks as the root of the positions."""
    assert contrast(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 14.0]))[0] == pytest.approx(0.25)
    assert contrast(torch.full((9,), 2.0), torch.full((9,), 4.0)) == pytest.approx((0.5, 0.5, 0.5))
    torch.manual_seed(0)
    widths = []
    for count in (100, 10_000):
        near, far = 1 + 0.3 * torch.randn(count), 2 + 0.3 * torch.randn(count)
        value, low, high = contrast(near, far, resamples=400)
        assert low < value < high
        widths.append(high - low)
    assert 7 < widths[0] / widths[1] < 14


def test_interval_covers_the_truth() -> None:
    torch.manual_seed(0)
    covered = 0
    for _ in range(200):
        near, far = 1 + 0.5 * torch.randn(60), 2 + 0.5 * torch.randn(60)
        _, low, high = contrast(near, far, resamples=400)
        covered += low <= 0.5 <= high
    assert 180 <= covered <= 199


def test_bad_input_is_named(reference: torch.Tensor, geometry: TokenGeometry) -> None:
    with pytest.raises(ValueError, match="over 4000 tokens, but a geometry of 4096"):
        make_trial(reference[:, :4000], geometry, positions=4)
    with pytest.raises(ValueError, match="positions=0; a trial needs at least 1"):
        make_trial(reference, geometry, positions=0)
    flat = torch.full((3, 4096), 1 / 4096).log()
    with pytest.raises(ValueError, match=r"no token a probability above 0.3 at any of 3 positions"):
        make_trial(flat, geometry, positions=4)
