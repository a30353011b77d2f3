"""The weight of the penalty over a run."""

from __future__ import annotations

import math

import pytest

from wpr.ppo.beta import AdaptiveBeta, ScheduledBeta


def test_schedules_end_where_they_say() -> None:
    for shape in ("linear", "cosine"):
        path = [ScheduledBeta(0.4, 0.1, shape).beta(step / 10) for step in range(11)]
        assert path[0] == pytest.approx(0.4)
        assert path[5] == pytest.approx(0.25)
        assert path[-1] == pytest.approx(0.1)
        assert path == sorted(path, reverse=True)
    assert ScheduledBeta(0.4, 0.4, "constant").beta(0.7) == 0.4


def test_adaptive_beta_finds_the_target() -> None:
    """A policy whose divergence is 1 / (1 + 10 beta), and follows slowly: the target 0.2 is met at beta = 0.4."""
    beta, divergence = AdaptiveBeta(0.01, target=0.2, rate=0.05, gain=2.0), 0.0
    for _ in range(600):
        divergence += 0.1 * (1 / (1 + 10 * beta.beta(0.0)) - divergence)
        beta.update(divergence)
    assert divergence == pytest.approx(0.2, rel=1e-3)
    assert beta.beta(0.0) == pytest.approx(0.4, rel=1e-2)


def test_adaptive_beta_is_bounded_a_step() -> None:
    beta = AdaptiveBeta(1.0, target=0.1, rate=0.1, gain=2.0)
    beta.update(1e9)
    assert beta.beta(0.0) == pytest.approx(math.exp(2.1))
    beta.update(0.0)
    assert beta.beta(0.0) == pytest.approx(math.exp(-2.0))


def test_state_survives() -> None:
    beta, other = AdaptiveBeta(1.0, 0.1, 0.1, 1.0), AdaptiveBeta(1.0, 0.1, 0.1, 1.0)
    beta.update(0.3)
    other.load_state_dict(beta.state_dict())
    assert other.beta(0.0) == beta.beta(0.0) != 1.0
