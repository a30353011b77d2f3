"""A first beta for a regularizer, from the spread of rewards over a reference's responses.

Notation for shapes: ``N`` prompts, ``n`` responses per prompt, ``P`` positions, ``V`` vocabulary.

**Beta.** The best policy under reverse KL is q(y) exp(r(y) / beta) / Z. To second order in 1 / beta, its KL from q is
the variance of the reward within a prompt over 2 beta^2. For `target` nats per token of responses of L tokens:

    beta = sigma / sqrt(2 target L)         sigma^2 = mean over prompts of the variance of r over its n responses

The same tilt on the responses themselves, weights w_j = exp(r_j / beta) / sum, says how far the samples bear that out:
effective samples 1 / sum w_j^2, KL sum w_j log(n w_j), which cannot exceed log n, and the reward sum w_j r_j.

**Other regularizers.** Where D is c times KL for the same small change, its beta is 1 / c of KL's. c is measured at
positions of the responses: the odds of the likeliest token are divided by e^2, and c = mean D / mean KL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wpr.analysis.rewording import share_of
from wpr.analysis.statistics import Estimate, bootstrap, interval

KL = "reverse-kl"
FEWEST_PROMPTS = 3
"""Fewer have no interval."""

TARGET = 0.1
"""Nats per token."""


def variances(rewards: Tensor) -> Tensor:
    """Of rewards ``(N, n)`` within each prompt: ``(N,)``, NaN for fewer than two rewards."""
    known = ~rewards.isnan()
    count = known.sum(-1)
    off = (rewards - rewards.nanmean(-1, keepdim=True)).nan_to_num(0)
    return torch.where(count > 1, off.square().sum(-1) / (count - 1).clamp_min(1), torch.nan)


@dataclass(frozen=True)
class Tilt:
    """What weights exp(r / beta) make of the drawn responses, means over prompts."""

    effective: float
    kl: float
    reward: float


def starting_beta(rewards: Tensor, length: float, target: float = TARGET) -> Estimate:
    """The beta of reverse KL for ``target`` nats per token, by the module's rule, with an interval over prompts."""
    within = variances(rewards)
    within = within[~within.isnan()]
    scale = 1 / math.sqrt(2 * target * length)

    def beta(chosen: Tensor) -> Tensor:
        return within[chosen].mean(-1).sqrt() * scale

    ends = interval(bootstrap(beta, len(within))) if len(within) >= FEWEST_PROMPTS else (math.nan, math.nan)
    return Estimate(float(within.mean().sqrt() * scale), *ends)


def tilt(rewards: Tensor, beta: float) -> Tilt:
    """The tilt of rewards ``(N, n)``; responses without one have no weight."""
    known = ~rewards.isnan()
    rows = known.any(-1)
    given, known = rewards[rows], known[rows]
    logs = (given / beta).masked_fill(~known, -math.inf).log_softmax(-1)
    weight = logs.exp()
    kl = (weight * logs.masked_fill(~known, 0)).sum(-1) + known.sum(-1).double().log()
    reward = (weight * given.nan_to_num(0)).sum(-1)
    return Tilt(*(float(one.mean()) for one in (1 / weight.square().sum(-1), kl, reward)))


@torch.no_grad()
def divergence_ratios(regularizers: Mapping[str, Any], reference: Tensor, groups: Tensor) -> dict[str, Estimate]:
    """Divergence per nat of KL of each regularizer where the likeliest token's odds are divided by e^2, at ``(P, V)``
    log-probabilities, with intervals over groups ``(P,)``.
    """
    top = reference.argmax(-1, keepdim=True)
    policy = reference.scatter_add(-1, top, torch.full_like(top, -2, dtype=reference.dtype)).log_softmax(-1)
    measured = {name: one(policy, reference, top.squeeze(-1)).divergence for name, one in regularizers.items()}
    base = measured[KL].double().cpu()
    return {name: share_of_means(values.double().cpu(), base, groups) for name, values in measured.items()}


def share_of_means(values: Tensor, base: Tensor, groups: Tensor) -> Estimate:
    """(mean of ``(P,)`` values) / (mean of ``(P,)`` base), with an interval over groups ``(P,)``."""
    _, of_group = groups.unique(return_inverse=True)
    count = int(of_group.max()) + 1
    sums = torch.zeros(count, 2, dtype=torch.float64).index_add_(0, of_group, torch.stack([values, base], -1))
    return share_of(sums[:, 0], sums[:, 1])
