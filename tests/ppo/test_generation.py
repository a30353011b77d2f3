"""Sampling: the right distribution, the same responses however they are batched, the limits."""

from __future__ import annotations

import pytest
import torch

from tests.ppo import tiny
from wpr.ppo.generation import (
    GenerationError,
    Sampling,
    SeededChoice,
    TransformersGeneration,
    generate_in_parts,
    response_seeds,
)
from wpr.ppo.rollout import Prompts


def sampling(**changes) -> Sampling:
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_new_tokens": 0, "max_new_tokens": 8, "eos": (1,)}
    return Sampling(**{**settings, **changes})


def prompts(rows: list[list[int]], width: int | None = None) -> Prompts:
    width = width or max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return Prompts(ids, mask)


ROWS = [[2, 5], [2, 6, 7, 8], [9], [4, 4, 4], [2, 11, 12], [13, 14]]


def sharp_policy():
    model = tiny.policy()
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    return model


def test_draws_follow_the_distribution() -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = -torch.inf
    count = 40_000
    seeds = response_seeds(0, 0, 0, count)
    choice = SeededChoice(seeds, 1, torch.zeros(count, 0, dtype=torch.long))
    drawn = choice(torch.zeros(count, 0, dtype=torch.long), logits.expand(count, -1)).argmax(-1)
    frequency = torch.bincount(drawn, minlength=12) / count
    expected = logits[0].softmax(-1)
    assert frequency[3] == 0
    error = (frequency - expected).abs() / (expected * (1 - expected) / count).sqrt().clamp_min(1e-9)
    assert error[expected > 0].max() < 4


def test_responses_do_not_depend_on_batch_mates_or_padding() -> None:
    model, seeds = sharp_policy(), response_seeds(3, 5, 0, len(ROWS))
    together = TransformersGeneration().generate(model, prompts(ROWS, 9), sampling(), seeds)
    for row, (ids, seed) in enumerate(zip(ROWS, seeds, strict=True)):
        alone = TransformersGeneration().generate(model, prompts([ids]), sampling(), [seed])
        assert together.tokens[row][together.mask[row]].tolist() == alone.tokens[0][alone.mask[0]].tolist()


@pytest.mark.parametrize("size", [1, 4, 6, None])
def test_generation_in_parts_is_the_same(size: int | None) -> None:
    model, seeds = sharp_policy(), response_seeds(0, 0, 0, len(ROWS))
    whole = TransformersGeneration().generate(model, prompts(ROWS), sampling(), seeds)
    parts = generate_in_parts(TransformersGeneration(), model, prompts(ROWS), sampling(), seeds, size)
    assert torch.equal(parts.mask, whole.mask)
    assert torch.equal(parts.tokens[parts.mask], whole.tokens[whole.mask])
    assert torch.equal(parts.finished, whole.finished)
    assert len({int(length) for length in whole.mask.sum(-1)}) > 1, "all of one length: nothing was padded"


def test_a_fault_in_a_part_names_the_row_of_the_whole() -> None:
    model = tiny.policy()
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    with pytest.raises(GenerationError) as caught:
        generate_in_parts(BadRow(4), model, prompts(ROWS), sampling(), response_seeds(0, 0, 0, len(ROWS)), 2)
    assert caught.value.row == 4


class BadRow(TransformersGeneration):
    """Sampling that fails where one row of the whole is in the batch."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.wanted = prompts(ROWS).input_ids[row]

    def generate(self, policy, prompts, sampling, seeds):
        if not (prompts.input_ids == self.wanted).all(-1).any():
            policy = tiny.policy()
        return super().generate(policy, prompts, sampling, seeds)


def test_seeds_are_all_different_and_of_the_global_row() -> None:
    assert response_seeds(0, 7, 0, 8)[4:] == response_seeds(0, 7, 4, 4)
    everything = {seed for s in range(3) for r in range(4) for seed in response_seeds(s, r, 0, 50)}
    assert len(everything) == 3 * 4 * 50


def test_lengths_and_stopping() -> None:
    model, seeds = tiny.policy(), list(range(64))
    batch = prompts([[2]] * 64)
    free = TransformersGeneration().generate(model, batch, sampling(max_new_tokens=40), seeds)
    assert free.finished.any()
    ends = free.mask.sum(-1)[free.finished] - 1
    assert (free.tokens[free.finished].gather(-1, ends.unsqueeze(-1)) == 1).all()
    late = TransformersGeneration().generate(model, batch, sampling(max_new_tokens=40, min_new_tokens=30), seeds)
    assert late.mask.sum(-1).min() >= 30
    never = TransformersGeneration().generate(model, batch, sampling(eos=()), seeds)
    assert never.mask.all()
    assert never.tokens.shape == (64, 8)


def test_top_k_and_temperature() -> None:
    model, seeds = tiny.policy(), list(range(200))
    batch = prompts([[2]] * 200)
    logits = model(torch.tensor([[2]])).logits[0, -1]
    drawn = TransformersGeneration().generate(model, batch, sampling(top_k=3, max_new_tokens=1), seeds).tokens
    assert set(drawn.flatten().tolist()) == set(logits.topk(3).indices.tolist())
    cold = TransformersGeneration().generate(model, batch, sampling(temperature=1e-4, max_new_tokens=1), seeds).tokens
    assert set(cold.flatten().tolist()) == {int(logits.argmax())}
    nucleus = TransformersGeneration().generate(model, batch, sampling(top_p=0.05, max_new_tokens=1), seeds).tokens
    assert len(set(nucleus.flatten().tolist())) <= 3


def test_the_models_own_generation_settings_stay_out() -> None:
    model, seeds = sharp_policy(), list(range(6))
    plain = TransformersGeneration().generate(model, prompts(ROWS), sampling(), seeds)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.top_k = 1
    again = TransformersGeneration().generate(model, prompts(ROWS), sampling(), seeds)
    assert torch.equal(plain.tokens, again.tokens)
    assert model.generation_config.repetition_penalty == 5.0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_logits_that_are_no_distribution_are_named(value: float) -> None:
    model = tiny.policy()
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = value  # the third prompt holds this token
    with pytest.raises(GenerationError, match="token 0 of response 2") as caught:
        TransformersGeneration().generate(model, prompts(ROWS), sampling(), list(range(6)))
    assert (caught.value.row, caught.value.position) == (2, 0)
