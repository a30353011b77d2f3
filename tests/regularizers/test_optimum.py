"""The optimum that a penalty leads to, against an independent convex solver.

A bandit of 40 tokens with rewards r: ascend E_p[r] - beta * E_p[penalty] with the penalties recomputed and held
constant in each step, as policy gradient does. A right penalty ends at argmax E_p[r] - beta * D(p, q), which scipy
finds from the definition of D alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.special import softmax

from tests.problems import clustered_embeddings
from tests.reference import newton
from tests.regularizers.test_f_divergences import GENERATORS
from wpr import TokenGeometry, Wasserstein, make_regularizer
from wpr.regularizers import Regularizer

TOKENS = 40


def bandit(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rewards and the reference distribution."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal(TOKENS), softmax(rng.standard_normal(TOKENS))


Penalties = Callable[[torch.Tensor], torch.Tensor]
"""Log-probabilities of the policy ``(V,)`` to penalties of all tokens ``(V,)``."""


def penalties_by_call(regularizer: Regularizer, reference: np.ndarray) -> Penalties:
    """One position for every token, through the interface that trainers use."""
    log_q = torch.as_tensor(np.log(reference)).expand(TOKENS, TOKENS)
    return lambda theta: regularizer(theta.expand(TOKENS, TOKENS), log_q, torch.arange(TOKENS)).penalty


def penalties_by_support(regularizer: Wasserstein, reference: np.ndarray) -> Penalties:
    """All tokens of one position at once; the support is the whole vocabulary. The same numbers, 40 times sooner."""
    log_q = torch.as_tensor(np.log(reference)).unsqueeze(0)
    return lambda theta: regularizer.penalties(
        regularizer.support(theta.unsqueeze(0), log_q, torch.zeros(1, dtype=torch.long))
    )[0][0, :TOKENS]


def ascend(
    penalties: Penalties,
    rewards: np.ndarray,
    reference: np.ndarray,
    beta: float,
    rate: Callable[[int], float],
    steps: int,
) -> np.ndarray:
    """Exact gradient ascent in the logits, preconditioned by the inverse probabilities (the natural gradient):
    theta += rate * (r - beta * penalty). The policies of the last quarter are averaged.
    """
    r, theta = torch.as_tensor(rewards), torch.as_tensor(np.log(reference))
    tail = torch.zeros(TOKENS, dtype=torch.float64)
    for step in range(steps):
        move = rate(step) * (r - beta * penalties(theta))
        # Bounds that no converging run touches: a wrong estimator may run away to infinity.
        theta = (theta + (move - (theta.exp() * move).sum()).clamp(-2, 2)).log_softmax(-1).clamp_min(-60)
        if step >= 3 * steps // 4:
            tail += theta.exp()
    return (tail / tail.sum()).numpy()


def distance(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.abs(p - q).sum() / 2)


def solve(divergence: Callable[[np.ndarray], float], rewards: np.ndarray, beta: float, start: np.ndarray) -> np.ndarray:
    """argmax E_p[r] - beta * D(p) over the simplex, from values of D alone: SLSQP with numerical derivatives."""
    found = optimize.minimize(
        lambda p: float(beta * divergence(p / p.sum()) - p @ rewards / p.sum()),
        start,
        method="SLSQP",
        bounds=[(1e-12, 1)] * len(start),
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
        options={"ftol": 1e-13, "maxiter": 1000},
    )
    return found.x / found.x.sum()


def solve_total_variation(rewards: np.ndarray, reference: np.ndarray, beta: float) -> np.ndarray:
    """A linear program: maximise r.p - beta/2 * sum t, with t >= |p - q|."""
    n = len(rewards)
    eye = np.eye(n)
    found = optimize.linprog(
        np.concatenate([-rewards, np.full(n, beta / 2)]),
        A_ub=np.block([[eye, -eye], [-eye, -eye]]),
        b_ub=np.concatenate([reference, -reference]),
        A_eq=np.concatenate([np.ones(n), np.zeros(n)])[None],
        b_eq=[1.0],
        bounds=(0, None),
    )
    return found.x[:n]


# beta and step size per divergence: large enough steps to converge, small enough to be stable at the curvature of f.
F_DIVERGENCES: dict[str, tuple[float, float, int]] = {
    "reverse-kl": (0.5, 0.5, 200),
    "forward-kl": (0.5, 0.3, 2000),
    "jensen-shannon": (2.0, 0.5, 2000),
    "alpha": (0.5, 0.3, 2000),
    "total-variation": (1.5, 0.1, 8000),
    "chi-squared": (0.5, 0.05, 4000),
    "squared-hellinger": (1.0, 0.3, 2000),
}


def f_divergence_optimum(name: str, rewards: np.ndarray, reference: np.ndarray, beta: float) -> np.ndarray:
    if name == "total-variation":
        return solve_total_variation(rewards, reference, beta)
    generator = GENERATORS[name]
    return solve(lambda p: float(reference @ generator(p / reference)), rewards, beta, reference)


def rate_of(name: str, rate: float, steps: int) -> Callable[[int], float]:
    """Constant steps, but for total variation, whose gradient jumps: there they shrink in the second half."""
    if name != "total-variation":
        return lambda _: rate
    return lambda t: rate * min(1.0, 2 * (1 - t / steps)) ** 3


@pytest.mark.parametrize("name", F_DIVERGENCES)
def test_gradient_estimator_reaches_the_optimum(name: str) -> None:
    beta, rate, steps = F_DIVERGENCES[name]
    rewards, reference = bandit()
    optimum = f_divergence_optimum(name, rewards, reference, beta)
    assert distance(optimum, reference) > 0.1  # the reward does pull
    penalties = penalties_by_call(make_regularizer(name), reference)
    reached = ascend(penalties, rewards, reference, beta, rate_of(name, rate, steps), steps)
    assert distance(reached, optimum) < 1e-3


@pytest.mark.parametrize("name", ["forward-kl", "jensen-shannon", "alpha", "total-variation", "chi-squared"])
def test_paper_estimator_does_not(name: str) -> None:
    beta, rate, steps = F_DIVERGENCES[name]
    rewards, reference = bandit()
    optimum = f_divergence_optimum(name, rewards, reference, beta)
    penalties = penalties_by_call(make_regularizer(name, estimator="paper"), reference)
    reached = ascend(penalties, rewards, reference, beta, rate_of(name, rate, steps), steps)
    assert distance(reached, optimum) > 0.02


@pytest.fixture
def geometry() -> TokenGeometry:
    weight = clustered_embeddings(words=10, per_word=4, size=8, spread=0.4).double()
    return TokenGeometry.from_embeddings(weight, neighbours=6)


WASSERSTEIN: dict[str, dict[str, Any]] = {
    "debiased": {"lam": 5.0, "rho": 2.0, "debias": True},
    "unbalanced": {"lam": 5.0, "rho": 2.0, "debias": False},
}


@pytest.mark.parametrize("form", WASSERSTEIN)
def test_unbalanced_forms_reach_the_optimum(form: str, geometry: TokenGeometry) -> None:
    rewards, reference = bandit()
    settings = WASSERSTEIN[form]
    lam, rho, beta = settings["lam"], settings["rho"], 0.5
    cost = geometry.cost(torch.arange(TOKENS).unsqueeze(0))[0].numpy()

    cross = own = newton.unbalanced(reference, reference, cost, lam, rho)[:2]

    def divergence(p: np.ndarray) -> float:
        nonlocal cross, own
        *cross, value = newton.unbalanced(p, reference, cost, lam, rho, cross)
        if settings["debias"]:  # the reference's transport to itself is a constant
            *own, own_value = newton.unbalanced(p, p, cost, lam, rho, own)
            value -= own_value / 2
        return value

    regularizer = Wasserstein(geometry, "unbalanced", k2=TOKENS, tolerance=1e-7, iterations=500, **settings)
    reached = ascend(penalties_by_support(regularizer, reference), rewards, reference, beta, lambda _: 0.2, 1000)
    optimum = solve(divergence, rewards, beta, reference)
    assert distance(optimum, reference) > 0.1
    assert distance(reached, optimum) < 1e-3


def test_balanced_form_reaches_the_optimum(geometry: TokenGeometry) -> None:
    """For the paper's distance the optimum is known: each reference token's mass spreads by softmax of lam (r/beta -
    C).
    """
    rewards, reference = bandit()
    geometry = TokenGeometry.from_embeddings(geometry.embeddings, neighbours=None)
    lam, beta = 2.0, 0.5
    cost = geometry.cost(torch.arange(TOKENS).unsqueeze(0))[0].numpy()
    optimum = softmax(lam * (rewards[:, None] / beta - cost), axis=0) @ reference
    settings: dict[str, Any] = {"lam": lam, "floor": 0.0, "scaled": True, "iterations": 5000, "tolerance": 1e-8}
    regularizer = Wasserstein(geometry, "paper", k2=TOKENS, **settings)
    reached = ascend(penalties_by_support(regularizer, reference), rewards, reference, beta, lambda _: 0.5, 200)
    assert distance(optimum, reference) > 0.1
    assert distance(reached, optimum) < 1e-3
