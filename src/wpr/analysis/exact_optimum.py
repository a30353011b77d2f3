"""What a regularizer leads to, without training: the policy that is best at a position, found exactly.

    maximise over p      F(p)  =  sum_i p_i r_i  -  beta D(p, q)

on a support of ``n`` entries, for ``P`` positions at once. Since a penalty is the derivative of its divergence, the
gradient of F is ``g_i = r_i - beta penalty_i``, up to a constant. Where D is convex,

    gap  =  max_i g_i - sum_i p_i g_i   >=   max F - F(p)

so the gap is a certificate: F is no farther from its maximum. (With k1 neighbours the transport divergence need not be
convex; the gap is then the residual of the optimality conditions.) The policy is moved by multiplicative steps,
``p_i <- p_i exp(eta (g_i - mean g))``, with a step size for each position that shrinks where F would fall. For reverse
KL the first step, eta = 1/beta, is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from wpr.transport.support import Support

LEAST = -80.0
"""Log-probabilities go no lower: nothing that is reported depends on less."""


ROUNDING = 1e-12
"""Differences of F that may be rounding: rewards and divergences are of order 1."""


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
    log_p = support.log_policy
    rate = torch.full_like(rewards[:, :1], 1 / beta)
    value, gradient = _value_and_gradient(regularizer, support, log_p, rewards, beta)
    taken = 0
    while taken < steps and float(_gap(log_p, gradient).max()) > tolerance:
        taken += 1
        mean = _mean(log_p, gradient)
        move = (rate * (gradient - mean)).clamp(-30, 30).masked_fill(log_p == -math.inf, 0)
        trial = _normalised(log_p + move)
        new_value, new_gradient = _value_and_gradient(regularizer, support, trial, rewards, beta)
        # Near the maximum F is flat to its last digits, and the gap decides.
        flat = (new_value - value).abs() <= ROUNDING
        smaller = _gap(trial, new_gradient) < _gap(log_p, gradient)
        better = torch.where(flat, smaller, new_value > value).unsqueeze(-1)
        log_p = torch.where(better, trial, log_p)
        gradient = torch.where(better, new_gradient, gradient)
        value = torch.where(better.squeeze(-1), new_value, value)
        rate = torch.where(better, rate * 1.2, rate / 2)
    return Optimum(log_p, _gap(log_p, gradient), _mean(log_p, rewards).squeeze(-1), beta, taken)


def at_reward(
    regularizer: SupportRegularizer, support: Support, rewards: Tensor, target: float, tolerance: float = 1e-5
) -> Optimum:
    """The optimum at the beta whose mean expected reward is ``target``, to 1e-3 of what rewards span: bisection in
    log beta, each solution the start of the next. A target that no beta reaches is refused.
    """
    low, high = 1e-3, 1e3
    close = 1e-3 * float(rewards.max() - rewards.min())
    found = None
    for _ in range(40):
        beta = math.sqrt(low * high)
        found = best_policy(regularizer, support, rewards, beta, tolerance)
        support = replace(support, log_policy=found.log_policy)
        reached = float(found.reward.mean())
        if abs(reached - target) <= close:
            return found
        low, high = (low, beta) if reached < target else (beta, high)  # a smaller beta gives more reward
    assert found is not None
    raise ValueError(
        f"no beta between 0.001 and 1000 has an expected reward of {target}; the nearest has "
        f"{float(found.reward.mean()):.3g}: choose a target between the reference's and the best"
    )


def _value_and_gradient(
    regularizer: SupportRegularizer, support: Support, log_p: Tensor, rewards: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    penalties, divergence, _ = regularizer.penalties(replace(support, log_policy=log_p))
    gradient = (rewards - beta * penalties).masked_fill(log_p == -math.inf, -math.inf)
    return _mean(log_p, rewards).squeeze(-1) - beta * divergence, gradient


def _gap(log_p: Tensor, gradient: Tensor) -> Tensor:
    return gradient.amax(-1) - _mean(log_p, gradient).squeeze(-1)


def _mean(log_p: Tensor, values: Tensor) -> Tensor:
    p = log_p.exp()
    return (p * values.masked_fill(p == 0, 0)).sum(-1, keepdim=True)


def _normalised(log_p: Tensor) -> Tensor:
    there = log_p > -math.inf
    log_p = torch.where(there, log_p.log_softmax(-1).clamp_min(LEAST), -math.inf)
    return log_p.log_softmax(-1)
