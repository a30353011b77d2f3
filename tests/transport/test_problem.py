"""A solution's plan and value: marginals, and the dual value against the primal objective of the plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.problems import batch, distribution, log, points_cost, with_gaps
from wpr.transport import sinkhorn
from wpr.transport.problem import Solution

LAM, RHO = 6.0, 1.5


def masses_and_cost(seed: int, gaps: float = 0.0) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    a, b = distribution(rng, 9), distribution(rng, 9)
    return batch(log(a), log(b), with_gaps(rng, points_cost(rng, 9), gaps))


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """``KL(p | q)`` of masses whose sums may differ."""
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q) - p + q).sum()


def moved_cost(plan: Tensor, cost: Tensor) -> Tensor:
    return (plan * cost.masked_fill(cost.isinf(), 0)).sum()


@pytest.mark.parametrize("gaps", [0.0, 0.4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_unbalanced_value_is_the_objective_of_the_plan(seed: int, gaps: float) -> None:
    """``<P, C> + KL(P | a x b) / lam + rho KL(P 1 | a) + rho KL(P^T 1 | b)``, which the solution makes least."""
    log_a, log_b, cost = masses_and_cost(seed, gaps)
    found = sinkhorn.unbalanced(log_a, log_b, cost, lam=LAM, rho=RHO, iterations=2000, tolerance=1e-14)
    a, b, plan = log_a[0].exp(), log_b[0].exp(), found.plan()[0]

    def objective(plan: Tensor) -> Tensor:
        entropy = divergence(plan, a[:, None] * b) / LAM
        return moved_cost(plan, cost[0]) + entropy + RHO * (divergence(plan.sum(1), a) + divergence(plan.sum(0), b))

    assert float(found.value()) == pytest.approx(float(objective(plan)), abs=1e-12)
    assert float(found.moved_a) == pytest.approx(float(plan.sum()), abs=1e-12)
    assert float(found.moved_b) == pytest.approx(float(plan.sum()), abs=1e-12)
    for change in (0.99, 1.01):
        assert float(objective(change * plan)) > float(found.value())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_balanced_value_is_the_objective_of_the_plan(seed: int) -> None:
    """``<P, C> + sum P (log P - 1) / lam`` over plans with the marginals a and b."""
    log_a, log_b, cost = masses_and_cost(seed)
    found = sinkhorn.balanced(log_a, log_b, cost, lam=LAM, iterations=5000, tolerance=1e-14)
    plan = found.plan()[0]
    torch.testing.assert_close(plan.sum(1), log_a[0].exp(), atol=1e-13, rtol=0)
    torch.testing.assert_close(plan.sum(0), log_b[0].exp(), atol=1e-13, rtol=0)
    entropy = (torch.special.xlogy(plan, plan) - plan).sum() / LAM
    assert float(found.value()) == pytest.approx(float(moved_cost(plan, cost[0]) + entropy), abs=1e-12)


def test_padding_moves_nothing() -> None:
    log_a, log_b, cost = masses_and_cost(3)
    wide = [torch.nn.functional.pad(x, (0, 2), value=-torch.inf) for x in (log_a, log_b)]
    far = torch.full((1, 11, 11), torch.inf, dtype=cost.dtype)
    far[:, :9, :9] = cost
    far[:, range(11), range(11)] = 0

    def solved(*problem: Tensor) -> Solution:
        return sinkhorn.unbalanced(*problem, lam=LAM, rho=RHO, iterations=100)

    narrow, padded = solved(log_a, log_b, cost), solved(*wide, far)
    assert padded.problem.padding.tolist() == [[False] * 9 + [True] * 2]
    torch.testing.assert_close(padded.plan()[:, :9, :9], narrow.plan(), atol=1e-14, rtol=0)
    assert (padded.plan()[:, 9:] == 0).all()
    torch.testing.assert_close(padded.value(), narrow.value(), atol=1e-14, rtol=0)


def test_problems_in_chunks_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    together = [torch.cat(parts) for parts in zip(*(masses_and_cost(seed) for seed in range(5)), strict=True)]
    whole = sinkhorn.unbalanced(*together, lam=LAM, rho=RHO, iterations=50)
    monkeypatch.setattr(sinkhorn, "CHUNK_BYTES", 2 * 9 * 9 * 8)  # two problems at a time
    parts = sinkhorn.unbalanced(*together, lam=LAM, rho=RHO, iterations=50)
    assert torch.equal(whole.plan(), parts.plan())
    assert torch.equal(whole.value(), parts.value())
