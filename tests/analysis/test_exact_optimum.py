"""The best policy of a position: against closed forms and a convex solver, with the certificate that it prints."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.regularizers.test_f_divergences import GENERATORS
from tests.regularizers.test_optimum import solve
from wpr import ReverseKL, TokenGeometry, Wasserstein, make_regularizer
from wpr.analysis.exact_optimum import SupportRegularizer, at_reward, best_policy, measure_on
from wpr.transport.support import Support, truncate

V = 12


def problem(positions: int = 3) -> tuple[Support, Tensor]:
    """Supports that are the whole vocabulary, and a reward against each position's most likely token."""
    logits = 1.5 * torch.randn(positions, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    support = truncate(logits, logits, logits.argmax(-1), V)
    return support, -(support.ids == logits.argmax(-1, keepdim=True)).double()


def entries(support: Support, values: Tensor) -> np.ndarray:
    """Those of the first position that are tokens."""
    return values[0, support.ids[0] >= 0].numpy()


def test_reverse_kl_takes_one_step() -> None:
    support, rewards = problem()
    found = best_policy(ReverseKL(), support, rewards, beta=0.4)
    expected = (support.log_reference + rewards / 0.4).log_softmax(-1)
    torch.testing.assert_close(found.log_policy.exp(), expected.exp())
    assert found.steps == 1
    assert float(found.gap.abs().max()) < 1e-12


@pytest.mark.parametrize("name", ["forward-kl", "squared-hellinger", "jensen-shannon", "alpha"])
def test_f_divergences_against_a_solver(name: str) -> None:
    support, rewards = problem()
    found = best_policy(make_regularizer(name), support, rewards, beta=0.5, tolerance=1e-8, steps=2000)
    assert float(found.gap.max()) <= 1e-8
    q, r = entries(support, support.log_reference.exp()), entries(support, rewards)
    optimum = solve(lambda p: float(q @ GENERATORS[name](p / q)), r, 0.5, q)
    np.testing.assert_allclose(entries(support, found.log_policy.exp()), optimum, atol=2e-4)


def transport() -> SupportRegularizer:
    weight = torch.randn(V, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    geometry = TokenGeometry.from_embeddings(weight, neighbours=None, progress=False)
    return ReverseKL() + 2 * Wasserstein(geometry, "unbalanced", k2=V, lam=4.0, rho=2.0, tolerance=1e-9, iterations=300)


def test_a_sum_is_no_worse_than_any_other_policy() -> None:
    """The certificate bounds how much better any policy could be; random ones, near and far, are not better at all."""
    support, rewards = problem(1)
    regularizer, beta = transport(), 0.3
    found = best_policy(regularizer, support, rewards, beta, tolerance=1e-6)
    assert float(found.gap.max()) <= 1e-6

    def value(log_p: Tensor) -> Tensor:
        rows = len(log_p)
        many = Support(
            support.ids.expand(rows, -1), log_p, support.log_reference.expand(rows, -1), support.sampled.expand(rows)
        )
        return (log_p.exp() * rewards).sum(-1) - beta * regularizer.penalties(many)[1]

    noise = torch.randn(200, support.ids.shape[1], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    others = (found.log_policy + torch.logspace(-3, 0.5, 200, dtype=torch.float64).unsqueeze(-1) * noise).log_softmax(
        -1
    )
    assert float(value(others).max()) <= float(value(found.log_policy)) + 1e-6


def test_at_equal_reward() -> None:
    support, rewards = problem()
    for regularizer in (ReverseKL(), make_regularizer("squared-hellinger")):
        found = at_reward(regularizer, support, rewards, target=-0.05)
        assert float(found.reward.mean()) == pytest.approx(-0.05, abs=1e-3)
    near_the_end = at_reward(ReverseKL(), support, rewards, target=-0.002)
    assert float(near_the_end.reward.mean()) == pytest.approx(-0.002, abs=5e-5)
    with pytest.raises(ValueError, match=r"no beta between .* has an expected reward of 0.5; the last one tried"):
        at_reward(ReverseKL(), support, rewards, target=0.5)


@pytest.mark.parametrize("settings", [{"tolerance": 1e-10, "iterations": 1000}, {"tolerance": 0.0, "iterations": 5}])
def test_what_was_measured_before_does_not_matter(settings: dict[str, float]) -> None:
    """Potentials start where the last ones ended; with a fixed number of iterations they do not."""
    support, _ = problem()
    weight = torch.randn(V, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    geometry = TokenGeometry.from_embeddings(weight, neighbours=None, progress=False)
    regularizer = Wasserstein(geometry, "unbalanced", k2=V, lam=20.0, rho=4.0, **settings)  # type: ignore[arg-type]
    policies = [support.log_policy, *torch.randn(3, *support.ids.shape, dtype=torch.float64).log_softmax(-1)]
    policies = [policy.masked_fill(support.log_policy == -torch.inf, -torch.inf).log_softmax(-1) for policy in policies]
    warm = measure_on(regularizer, support)
    for policy in policies:
        penalties, divergence = warm(policy)
        cold = regularizer.penalties(replace(support, log_policy=policy))
        tokens = policy > -torch.inf
        torch.testing.assert_close(penalties[tokens], cold[0][tokens], atol=1e-7, rtol=0)
        torch.testing.assert_close(divergence, cold[1], atol=1e-7, rtol=0)
