"""The transport plan behind the Wasserstein penalty: against Newton oracles and POT, marginals, limits, symmetry."""

from __future__ import annotations

from typing import Any

import numpy as np
import ot
import pytest
import torch
from torch import Tensor

from tests.problems import clustered_embeddings
from tests.reference import newton
from wpr import TokenGeometry, Wasserstein
from wpr.regularizers.wasserstein import TransportPlan

EXACT: dict[str, Any] = {"tolerance": 1e-13, "iterations": 20_000}


def toy(neighbours: int | None = 6, rows: int = 3, scale: Any = "median-nn") -> tuple[TokenGeometry, Tensor, Tensor]:
    weight = clustered_embeddings(words=8, per_word=3, size=8, spread=0.4).double()
    logits = 1.5 * torch.randn(2, rows, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TokenGeometry.from_embeddings(weight, neighbours=neighbours, scale=scale), logits[0], logits[1]


def plan_of(regularizer: Wasserstein, policy: Tensor, reference: Tensor) -> TransportPlan:
    return regularizer.transport_plan(regularizer.support(policy, reference, policy.argmax(-1)))


@pytest.mark.parametrize("debias", [True, False])
def test_unbalanced_plan_is_that_of_the_oracle(debias: bool) -> None:
    """Its marginals too: the masses times exp(-potential / rho)."""
    geometry, policy, reference = toy()
    lam, rho = 5.0, 2.0
    found = plan_of(
        Wasserstein(geometry, "unbalanced", k2=24, lam=lam, rho=rho, debias=debias, **EXACT), policy, reference
    )
    cost = geometry.cost(torch.arange(24).unsqueeze(0))[0].numpy()
    for row in range(len(policy)):
        a, b = policy[row].softmax(-1).numpy(), reference[row].softmax(-1).numpy()
        f, g, _ = newton.unbalanced(a, b, cost, lam, rho)
        plan = found.plan[row, :24, :24].numpy()
        np.testing.assert_allclose(plan, a[:, None] * b * np.exp(lam * (f[:, None] + g - cost)), atol=1e-11)
        np.testing.assert_allclose(plan.sum(1), a * np.exp(-f / rho), atol=1e-11)
        np.testing.assert_allclose(plan.sum(0), b * np.exp(-g / rho), atol=1e-11)
        own = newton.unbalanced(a, a, cost, lam, rho)[0]
        rest = a * np.exp(-own / rho) if debias else a
        np.testing.assert_allclose(found.policy_at_rest[row, :24].numpy(), rest, atol=1e-11)


def test_debiased_penalties_are_what_the_plan_leaves_unmatched() -> None:
    geometry, policy, reference = toy()
    regularizer = Wasserstein(geometry, "unbalanced", k2=6, lam=5.0, rho=2.0, gauge="raw", **EXACT)
    support = regularizer.support(policy, reference, policy.argmax(-1))
    found = regularizer.transport_plan(support)
    used = support.log_policy > -50
    expected = (2.0 + 1 / 5.0) * (found.policy_at_rest - found.plan.sum(-1)) / support.log_policy.exp()
    torch.testing.assert_close(regularizer.penalties(support)[0][used], expected[used], atol=1e-9, rtol=0)


def test_balanced_plan_is_that_of_pot() -> None:
    geometry, policy, reference = toy(neighbours=None)
    regularizer = Wasserstein(geometry, "paper", scaled=True, k2=24, lam=5.0, floor=0.0, **EXACT)
    found = plan_of(regularizer, policy, reference)
    cost = geometry.cost(torch.arange(24).unsqueeze(0))[0].numpy()
    for row in range(len(policy)):
        a, b = policy[row].softmax(-1).numpy(), reference[row].softmax(-1).numpy()
        expected = ot.sinkhorn(a, b, cost, 1 / 5.0, method="sinkhorn_log", numItermax=100_000, stopThr=1e-14)
        np.testing.assert_allclose(found.plan[row, :24, :24].numpy(), expected, atol=1e-10)
        np.testing.assert_allclose(found.policy_at_rest[row, :24].numpy(), a, atol=1e-12)


@pytest.mark.parametrize("iterations", [1, 10, 40])
def test_paper_plan_is_u_k_v_of_its_last_iteration(iterations: int) -> None:
    """With the floors of the released code, also at tokens of next to no mass, where the floor is larger than u."""
    geometry, policy, reference = toy()
    policy[0, 3:9] = -60.0
    reference[1, 4:10] = -70.0
    regularizer = Wasserstein(geometry, "paper", scaled=True, k2=24, lam=8.0, iterations=iterations)
    found = plan_of(regularizer, policy, reference)
    kernel = np.exp(-8.0 * geometry.cost(torch.arange(24).unsqueeze(0))[0].numpy())
    for row in range(len(policy)):
        a, b = policy[row].softmax(-1).numpy(), reference[row].softmax(-1).numpy()
        v = np.ones(24)
        for _ in range(iterations):
            u = a / (kernel @ v + 1e-16)
            v = b / (kernel.T @ u + 1e-16)
        np.testing.assert_allclose(found.plan[row, :24, :24].numpy(), u[:, None] * kernel * v, atol=1e-12)


@pytest.mark.parametrize("preset", ["unbalanced", "paper"])
def test_plan_of_the_swapped_models_is_the_transpose(preset: Any) -> None:
    geometry, policy, reference = toy(neighbours=None)
    regularizer = Wasserstein(geometry, preset, scaled=True, k2=24, lam=5.0, floor=0.0, **EXACT)
    there, back = plan_of(regularizer, policy, reference), plan_of(regularizer, reference, policy)
    torch.testing.assert_close(there.plan[:, :24, :24], back.plan[:, :24, :24].mT, atol=1e-10, rtol=0)


def test_nothing_moves_where_costs_are_huge() -> None:
    geometry, policy, reference = toy(scale=1e-6)
    found = plan_of(Wasserstein(geometry, "unbalanced", k2=24, **EXACT), policy, reference)
    moved = found.plan - torch.diag_embed(found.plan.diagonal(dim1=-2, dim2=-1))
    assert moved.max().item() == 0
    assert found.plan.sum((-2, -1)).min().item() > 0.3


def test_padding_and_leftover() -> None:
    """Padding holds no mass; the leftover goes to the leftover only."""
    geometry, policy, reference = toy()
    regularizer = Wasserstein(geometry, "unbalanced", k2=4)
    support = regularizer.support(policy, policy + 0.1 * reference, policy.argmax(-1))
    found = regularizer.transport_plan(support)
    padding = support.log_policy == -torch.inf
    assert padding.any()
    assert found.plan[padding].abs().max().item() == 0
    assert not found.plan.isnan().any()
    assert found.plan[:, -1, :-1].abs().max().item() == 0
    assert found.plan[:, -1, -1].min().item() > 0
