"""Reward assembly, generalized advantages and whitening, against loops that follow the formulas."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wpr.ppo.advantages import assemble_rewards, costs_to_go, explained_variance, generalized_advantages, whiten


def problem(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random rewards and values (B, L), garbage on padding, and the mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)
    rewards, values = torch.randn(2, len(lengths), width, generator=generator, dtype=torch.float64)
    return rewards.masked_fill(~mask, torch.nan), values.masked_fill(~mask, torch.nan), mask


def over_processes(
    work: Callable[[slice, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor], parts: list[slice]
) -> list[torch.Tensor]:
    """The work on each part in a thread of its own, whose ``reduce`` sums over all of them, as an all-reduce does."""
    barrier = threading.Barrier(len(parts))
    posted: dict[int, torch.Tensor] = {}

    def run(part: slice) -> torch.Tensor:
        def reduce(own: torch.Tensor) -> torch.Tensor:
            posted[part.start] = own
            barrier.wait(timeout=20)
            total = torch.stack(list(posted.values())).sum(0)
            barrier.wait(timeout=20)  # nobody posts again before all have summed
            return total

        return work(part, reduce)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, parts))


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_advantages_are_the_discounted_sum_of_deltas(
    lengths: list[int], gamma: float, gae_lambda: float, seed: int
) -> None:
    rewards, values, mask = problem(lengths, seed)
    advantages, returns = generalized_advantages(rewards, values, mask, gamma, gae_lambda)
    for row, length in enumerate(lengths):
        value = [*values[row, :length].tolist(), 0.0]
        delta = [float(rewards[row, t]) + gamma * value[t + 1] - value[t] for t in range(length)]
        for t in range(length):
            expected = sum((gamma * gae_lambda) ** k * delta[t + k] for k in range(length - t))
            assert float(advantages[row, t]) == pytest.approx(expected, abs=1e-9)
            assert float(returns[row, t]) == pytest.approx(expected + value[t], abs=1e-9)
        assert (advantages[row, length:] == 0).all()
        assert (returns[row, length:] == 0).all()


def test_lambda_one_gives_the_return_itself() -> None:
    rewards, values, mask = problem([4, 2])
    _, returns = generalized_advantages(rewards, values, mask, 1.0, 1.0)
    assert torch.allclose(returns[0, 0], rewards[0, :4].sum())
    assert torch.allclose(returns[1, 1], rewards[1, 1])


def test_the_score_stands_on_the_last_real_token() -> None:
    penalties = torch.tensor([[1.0, 2.0, 3.0], [4.0, torch.nan, torch.nan], [torch.nan, torch.nan, torch.nan]])
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    rewards = assemble_rewards(torch.tensor([10.0, 20.0, 30.0]), penalties, mask, beta=0.5)
    assert rewards.tolist() == [[-0.5, -1.0, 8.5], [18.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_penalties_are_clipped_after_beta_and_scores_are_not() -> None:
    penalties, mask = torch.tensor([[-9.0, 2.0, 9.0]]), torch.ones(1, 3, dtype=torch.bool)
    rewards = assemble_rewards(torch.tensor([10.0]), penalties, mask, beta=0.5, penalty_clip=2.5)
    assert rewards.tolist() == [[2.5, -1.0, 7.5]]


def test_whitening_ignores_padding() -> None:
    values, _, mask = problem([5, 3, 1])
    white = whiten(values, mask)
    assert white[mask].mean().abs() < 1e-12
    assert white[mask].var(correction=0) == pytest.approx(1, abs=1e-6)
    assert (white[~mask] == 0).all()


def test_whitening_over_processes_is_whitening_of_the_whole() -> None:
    values, _, mask = problem([5, 3, 1, 4])
    halves = over_processes(lambda rows, reduce: whiten(values[rows], mask[rows], reduce), [slice(0, 2), slice(2, 4)])
    assert torch.allclose(torch.cat(halves), whiten(values, mask))


def test_explained_variance_over_processes_is_that_of_the_whole() -> None:
    returns, noise, mask = problem([5, 3, 1, 4])
    returns, noise = returns.nan_to_num(), noise.nan_to_num()
    halves = over_processes(
        lambda rows, reduce: explained_variance(noise[rows], returns[rows], mask[rows], reduce),
        [slice(0, 1), slice(1, 4)],
    )
    whole = explained_variance(noise, returns, mask)
    assert [float(half) for half in halves] == pytest.approx([float(whole)] * 2)


def test_explained_variance() -> None:
    returns, noise, mask = problem([6, 6])
    returns, noise = returns.nan_to_num(), noise.nan_to_num()
    assert float(explained_variance(returns, returns, mask)) == pytest.approx(1)
    assert float(explained_variance(torch.full_like(returns, 3.0), returns, mask)) == pytest.approx(0)
    expected = 1 - (returns - noise)[mask].var() / returns[mask].var()
    assert float(explained_variance(noise, returns, mask)) == pytest.approx(float(expected))
    assert float(explained_variance(returns, torch.ones_like(returns), mask)) == 0  # nothing to explain


def test_divergences_of_later_tokens_have_the_same_mean_and_less_variance() -> None:
    """Every completion of three tokens out of three: E[sum_t grad log p(y_t) C_t] is the gradient of E[D_1 + D_2 +
    D_3], with penalties of later tokens and with their divergences. The logits are of the token before.
    """
    generator = torch.Generator().manual_seed(0)
    table, other = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)  # row 3: the beginning
    table.requires_grad_()
    completions = torch.tensor(list(itertools.product(range(3), repeat=3)))
    before = torch.cat([torch.full((len(completions), 1), 3), completions[:, :-1]], 1)
    logs = table.log_softmax(-1)[before]
    ratios = logs - other.log_softmax(-1)[before]
    divergence = (logs.exp() * ratios).sum(-1)
    drawn, penalty = (of.gather(-1, completions.unsqueeze(-1)).squeeze(-1) for of in (logs, ratios.detach()))
    likely = drawn.sum(-1).exp()
    exact = torch.autograd.grad((likely * divergence.sum(-1)).sum(), table, retain_graph=True)[0]
    spread = {}
    for name, later in (("penalty", penalty), ("divergence", divergence.detach())):
        gradients = torch.stack(
            [
                torch.autograd.grad((row * cost).sum(), table, retain_graph=True)[0]
                for row, cost in zip(drawn, costs_to_go(penalty, later), strict=True)
            ]
        )
        mean = (likely.detach().view(-1, 1, 1) * gradients).sum(0)
        spread[name] = float((likely.detach() * (gradients - mean).square().sum((1, 2))).sum())
        assert torch.allclose(mean, exact, atol=1e-12)
    assert spread["divergence"] < 0.8 * spread["penalty"]
