"""What a regularizer leads to, without training: the policy that is best at a position, found exactly.

    maximise over p      F(p)  =  sum_i p_i r_i  -  beta D(p, q)

on a support of ``n`` entries, for ``P`` positions at once. Since a penalty is the derivative of its divergence, the
gradient of F is ``g_i = r_i - beta penalty_i``, up to a constant. Where D is convex,

    gap  =  max_i g_i - sum_i p_i g_i   >=   max F - F(p)

so the gap is a certificate: F is no farther from its maximum. (With k1 neighbours the transport divergence need not be
convex; the gap is then the residual of the optimality conditions.) The policy is moved by multiplicative steps,
``p_i <- p_i exp(eta (g_i - mean g))``, with a step size for each position that follows the curvature and shrinks where
F would fall. For reverse KL the first step, eta = 1/beta, is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from wpr.regularizers.sums import Sum
from wpr.regularizers.wasserstein import Solved, Wasserstein
from wpr.transport.sinkhorn import prepare_masses
from wpr.transport.support import Support

LEAST = -80.0
"""Log-probabilities go no lower: nothing that is reported depends on less."""


ROUNDING = 1e-12
"""Differences of F that may be rounding: rewards and divergences are of order 1."""

STUCK = 1e-4
"""Of the first step size: a position whose steps have become so small goes no farther, and its gap says so."""


FEWEST = 8
"""Positions from which on those that are through are left out."""


class SupportRegularizer(Protocol):
    """A regularizer that gives the penalties of all entries of a support."""

    def penalties(self, support: Support) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Penalties ``(P, n)``, divergence ``(P,)``, diagnostics."""
        ...


@dataclass(frozen=True)
class Optimum:
    """The best policy ``(P, n)`` in logarithms, the certificate ``(P,)`` and the expected reward ``(P,)``."""

    log_policy: Tensor
    gap: Tensor
    reward: Tensor
    beta: float
    steps: int


@torch.no_grad()
def best_policy(
    regularizer: SupportRegularizer,
    support: Support,
    rewards: Tensor,
    beta: float,
    tolerance: float = 1e-5,
    steps: int = 500,
) -> Optimum:
    """Ascend from ``support.log_policy`` until every position's gap is at most ``tolerance``, in units of reward.

    support: in float64; ``log_reference`` is q. rewards: ``(P, n)``.
    """
    log_p, taken = support.log_policy, 0
    rate = torch.full_like(rewards[:, :1], 1 / beta)
    measure = measure_on(regularizer, support)

    def value_and_gradient(log_p: Tensor) -> tuple[Tensor, Tensor]:
        penalties, divergence = measure(log_p)
        gradient = (rewards - beta * penalties).masked_fill(log_p == -math.inf, -math.inf)
        return _mean(log_p, rewards).squeeze(-1) - beta * divergence, gradient

    value, gradient = value_and_gradient(log_p)
    while taken < steps:
        running = (_gap(log_p, gradient) > tolerance) & (rate.squeeze(-1) > STUCK / beta)
        if not running.any():
            break
        if len(running) >= FEWEST and running.sum() <= len(running) // 2:  # the others need not be measured again
            rest = replace(support, log_policy=log_p)[running.nonzero().squeeze(-1)]
            found = best_policy(regularizer, rest, rewards[running], beta, tolerance, steps - taken)
            gaps = _gap(log_p, gradient).index_put((running,), found.gap)
            log_p = log_p.index_put((running,), found.log_policy)
            return Optimum(log_p, gaps, _mean(log_p, rewards).squeeze(-1), beta, taken + found.steps)
        taken += 1
        mean = _mean(log_p, gradient)
        move = (rate * (gradient - mean)).clamp(-30, 30).masked_fill(log_p == -math.inf, 0)
        trial = _normalised(log_p + move)
        new_value, new_gradient = value_and_gradient(trial)
        # Near the maximum F is flat to its last digits, and the gap decides.
        flat = (new_value - value).abs() <= ROUNDING
        smaller = _gap(trial, new_gradient) < _gap(log_p, gradient)
        better = torch.where(flat, smaller, new_value > value).unsqueeze(-1)
        rate = torch.where(better, _next_rate(rate, log_p, trial, gradient, new_gradient), rate / 4)
        log_p = torch.where(better, trial, log_p)
        gradient = torch.where(better, new_gradient, gradient)
        value = torch.where(better.squeeze(-1), new_value, value)
    return Optimum(log_p, _gap(log_p, gradient), _mean(log_p, rewards).squeeze(-1), beta, taken)


def at_reward(
    regularizer: SupportRegularizer, support: Support, rewards: Tensor, target: float, tolerance: float = 1e-5
) -> Optimum:
    """The optimum at the beta whose mean expected reward is ``target``, to 1e-3 of what rewards span, or to 2% of the
    way to the nearer end: false position in log beta, roughly at first. A target that no beta reaches is refused.

    Each ascent starts from ``support.log_policy``, or from the solution at the next larger beta: where D is not convex,
    these are the maxima that training, which starts there too, comes to first.
    """
    ends = float(rewards.min()), float(rewards.max())
    span = min(ends[1] - ends[0], 20 * abs(target - ends[0]), 20 * abs(ends[1] - target))
    x, step, near, precision = math.log(0.5), math.log(3), False, 30 * tolerance
    low = high = None  # log beta and what is missed there: too much reward, too little
    starts = [(math.inf, support.log_policy)]  # by log beta, falling
    while True:
        starts = [one for one in starts if one[0] >= x]
        found = best_policy(regularizer, replace(support, log_policy=starts[-1][1]), rewards, math.exp(x), precision)
        starts.append((x, found.log_policy))
        missed = float(found.reward.mean()) - target
        if abs(missed) <= (1e-3 if near else 1e-2) * span:
            if near:
                return found
            near, step, precision, low, high = True, 0.02, min(precision, tolerance), None, None
            continue
        low, high = ((x, missed), high) if missed > 0 else (low, (x, missed))
        if low is None or high is None:
            x, step = x + math.copysign(step, missed), 1.5 * step
        elif high[0] - low[0] > 1e-4:
            share = low[1] / (low[1] - high[1])
            x = low[0] + min(max(share, 0.1), 0.9) * (high[0] - low[0])
        elif precision > tolerance / 50:  # the ends contradict each other: they were not exact enough
            precision, step, low, high = precision / 5, 0.02, None, None
            continue
        else:
            x = math.inf
        if not -7 <= x <= 7:
            raise ValueError(
                f"no beta between 0.001 and 1000 has an expected reward of {target}; the last one tried, "
                f"{found.beta:.3g}, has {float(found.reward.mean()):.3g}: choose a target between the reference's and "
                "the best, and not where the reward jumps"
            )


Measure = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From log-probabilities ``(P, n)`` to penalties ``(P, n)`` and divergence ``(P,)``."""


def measure_on(regularizer: SupportRegularizer, support: Support) -> Measure:
    """The regularizer's penalties on a support, for one policy after the other."""
    if isinstance(regularizer, Sum):
        parts = [(weight, measure_on(part, support)) for weight, part in regularizer.parts]  # type: ignore[arg-type]

        def added(log_p: Tensor) -> tuple[Tensor, Tensor]:
            found = [(weight, *measure(log_p)) for weight, measure in parts]
            penalties = torch.stack([weight * penalty for weight, penalty, _ in found]).sum(0)
            return penalties, torch.stack([weight * divergence for weight, _, divergence in found]).sum(0)

        return added
    if isinstance(regularizer, Wasserstein):
        return _Transport(regularizer, support)
    return lambda log_p: regularizer.penalties(replace(support, log_policy=log_p))[:2]


class _Transport:
    """Of policies that change little from one to the next: costs are computed once, potentials start where the last
    ones ended.
    """

    def __init__(self, wasserstein: Wasserstein, support: Support) -> None:
        self.wasserstein = wasserstein
        self.problem, self.kernel = wasserstein.problem(support)
        self.last: Solved | None = None

    def __call__(self, log_p: Tensor) -> tuple[Tensor, Tensor]:
        log_a, _, _ = prepare_masses(log_p, self.problem.log_b)
        found = self.wasserstein.solve(replace(self.problem, log_a=log_a), self.kernel, self.last)
        # With a fixed number of iterations the start is part of what is computed.
        self.last = found if self.wasserstein.settings.tolerance > 0 else None
        return self.wasserstein.derive(*found)


def _next_rate(rate: Tensor, log_p: Tensor, trial: Tensor, gradient: Tensor, new_gradient: Tensor) -> Tensor:
    """The step size that fits the last step: how far log-probabilities moved over how much the gradient did (Barzilai
    and Borwein), between half and eight times the last one.
    """
    there = log_p > -math.inf
    weight = trial.exp()
    moved = (trial - log_p).masked_fill(~there, 0)
    turned = (gradient - new_gradient).masked_fill(~there, 0)
    moved, turned = (x - (weight * x).sum(-1, keepdim=True) for x in (moved, turned))
    along = (weight * moved * turned).sum(-1, keepdim=True)
    fitting = (weight * moved * moved).sum(-1, keepdim=True) / along.clamp_min(1e-300)
    return torch.where(along > 0, fitting.clamp(rate / 2, rate * 8), rate * 8)


def _gap(log_p: Tensor, gradient: Tensor) -> Tensor:
    return gradient.amax(-1) - _mean(log_p, gradient).squeeze(-1)


def _mean(log_p: Tensor, values: Tensor) -> Tensor:
    p = log_p.exp()
    return (p * values.masked_fill(p == 0, 0)).sum(-1, keepdim=True)


def _normalised(log_p: Tensor) -> Tensor:
    there = log_p > -math.inf
    log_p = torch.where(there, log_p.log_softmax(-1).clamp_min(LEAST), -math.inf)
    return log_p.log_softmax(-1)
