"""The first beta against exact sums, the tilt, and divergences per nat of KL."""

from __future__ import annotations

import math

import pytest
import torch

from wpr import ReverseKL, SquaredHellinger
from wpr.analysis.starting_beta import KL, divergence_ratios, starting_beta, tilt, variances


def test_variances_leave_out_what_has_no_reward() -> None:
    rewards = torch.tensor([[1.0, 3.0, math.nan], [2.0, math.nan, math.nan], [0.0, 0.0, 3.0]], dtype=torch.float64)
    assert variances(rewards)[[0, 2]].tolist() == pytest.approx([2.0, 3.0])
    assert variances(rewards)[1].isnan()


@pytest.mark.parametrize("target", [0.001, 0.01])
def test_beta_reaches_its_target_where_it_is_small(target: float) -> None:
    """The exact KL of the best policy over a thousand responses, alike for every prompt."""
    rewards = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).repeat(4, 1)
    beta = starting_beta(rewards, 10.0, target).value
    log_policy = (rewards[0] / beta).log_softmax(-1)
    exact = float((log_policy.exp() * (log_policy + math.log(1000))).sum())
    assert exact / 10 == pytest.approx(target, rel=0.1)
    assert tilt(rewards, beta).kl == pytest.approx(exact, rel=1e-9)


def test_beta_is_in_units_of_the_reward() -> None:
    rewards = torch.randn(20, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, ten = starting_beta(rewards, 20.0), starting_beta(10 * rewards, 20.0)
    assert ten.value == pytest.approx(10 * one.value)
    assert one.low < one.value < one.high
    assert starting_beta(rewards, 80.0).value == pytest.approx(one.value / 2)


def test_tilt_between_all_and_the_best() -> None:
    rewards = torch.tensor([[0.0, 1.0, 2.0, math.nan]], dtype=torch.float64)
    loose, tight = tilt(rewards, 1e6), tilt(rewards, 1e-3)
    assert (loose.effective, loose.reward) == pytest.approx((3, 1), abs=1e-4)
    assert (tight.effective, tight.reward) == pytest.approx((1, 2), abs=1e-4)
    assert (loose.kl, tight.kl) == pytest.approx((0, math.log(3)), abs=1e-4)


def test_ratio_of_the_hellinger_distance_is_that_of_its_curvature() -> None:
    """1/2 where the change is small; it is e^2 here, on tokens that are not likely."""
    reference = (torch.randn(30, 200, generator=torch.Generator().manual_seed(0)) / 10).log_softmax(-1)
    groups = torch.arange(30) // 3
    found = divergence_ratios({KL: ReverseKL(), "squared-hellinger": SquaredHellinger()}, reference, groups)
    assert found[KL].value == pytest.approx(1)
    p = reference.exp()
    top = p.argmax(-1)
    rows = torch.arange(30)
    changed = p.clone()
    changed[rows, top] *= math.exp(-2)
    changed /= changed.sum(-1, keepdim=True)
    kl = (changed * (changed / p).log()).sum(-1)
    hellinger = (changed.sqrt() - p.sqrt()).square().sum(-1)
    assert found["squared-hellinger"].value == pytest.approx(float(hellinger.mean() / kl.mean()), rel=1e-3)
    assert found["squared-hellinger"].low <= found["squared-hellinger"].value <= found["squared-hellinger"].high
