"""Penalties, divergence and diagnostics of each position from its potentials, in one launch.

Notation for shapes: ``P`` positions, ``n`` support entries. The formulas are those of `regularizers.wasserstein`, which
has them in torch: `Wasserstein._unbalanced` and `Wasserstein._balanced`. There they are some fifty small operations,
which a GPU finishes faster than a host can ask for them.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from wpr.transport.kernels import next_power_of_2
from wpr.transport.problem import Solution
from wpr.transport.sinkhorn import LOG_TINY


@dataclass(frozen=True)
class Penalties:
    """Of each position.

    penalty: ``(P, n)`` of all support entries. divergence: ``(P,)``.
    isolated_fraction: ``(P,)`` share of tokens without a neighbour, among those that one of the two can emit.
    leftover_policy, leftover_reference: ``(P,)`` the dummy's masses. support_size: ``(P,)`` entries in use.
    """

    penalty: Tensor
    divergence: Tensor
    isolated_fraction: Tensor
    leftover_policy: Tensor
    leftover_reference: Tensor
    support_size: Tensor


def penalties(
    ids: Tensor,
    log_a: Tensor,
    log_b: Tensor,
    neighbours: Tensor,
    cross: Solution,
    own: tuple[Tensor, Tensor] | None,
    *,
    lam: float,
    rho: float,
    value_gauge: bool,
) -> Penalties:
    """Penalties from the potentials ``cross`` and, if they are subtracted, ``own`` of each distribution's transport to
    itself. rho: infinity for balanced marginals. neighbours: ``(P, m)`` with m >= n, how many each entry has, itself
    included.
    """
    rows, n = ids.shape
    ids, log_a, log_b = ids.contiguous(), log_a.contiguous(), log_b.contiguous()
    out = torch.empty(rows, n, dtype=torch.float32, device=ids.device)
    numbers = torch.empty(4, rows, dtype=torch.float32, device=ids.device)
    size = torch.empty(rows, dtype=torch.int64, device=ids.device)
    own_a, own_b = (cross.f, cross.g) if own is None else own
    if rows:
        _penalty_kernel[(rows,)](
            *(ids, log_a, log_b, neighbours, cross.f, cross.g, own_a, own_b, out, numbers, size),
            *(rows, n, neighbours.stride(0), lam, 1.0 if math.isinf(rho) else rho, LOG_TINY[torch.float32]),
            *(math.isinf(rho), own is not None, value_gauge, next_power_of_2(n)),
            num_warps=4,
        )
    divergence, isolated, leftover_a, leftover_b = numbers.unbind()
    return Penalties(out, divergence, isolated, leftover_a, leftover_b, size)


@triton.jit(do_not_specialize=["log_a", "log_b", "potential_g", "potential_own_a", "potential_own_b", "rows"])
def _penalty_kernel(
    ids,
    log_a,
    log_b,
    neighbours,
    potential_f,
    potential_g,
    potential_own_a,
    potential_own_b,
    out,
    numbers,
    out_size,
    rows,
    n,
    neighbours_stride,
    lam,
    rho,
    log_tiny,
    BALANCED: tl.constexpr,
    DEBIASED: tl.constexpr,
    VALUE: tl.constexpr,
    SIZE: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, SIZE)
    inside = entry < n
    at = position * n + entry
    a = tl.load(log_a + at, mask=inside, other=-float("inf"))
    b = tl.load(log_b + at, mask=inside, other=-float("inf"))
    real = (a != -float("inf")) | (b != -float("inf"))
    a = tl.where(real, tl.maximum(a, log_tiny), -float("inf"))
    b = tl.where(real, tl.maximum(b, log_tiny), -float("inf"))
    f = tl.load(potential_f + at, mask=inside, other=0.0)
    g = tl.load(potential_g + at, mask=inside, other=0.0)
    own_a = tl.load(potential_own_a + at, mask=inside, other=0.0)
    own_b = tl.load(potential_own_b + at, mask=inside, other=0.0)
    mass_a = tl.exp(a)
    mass_b = tl.exp(b)
    if BALANCED:
        penalty, mean, divergence = _balanced(mass_a, mass_b, a, b, f, g, own_a, own_b, real, lam, DEBIASED)
    else:
        penalty, mean, divergence = _unbalanced(a, b, f, g, own_a, own_b, lam, rho, DEBIASED)
    if VALUE:
        penalty += divergence - mean
    tl.store(out + at, penalty, mask=inside)

    token = tl.load(ids + at, mask=inside, other=-1) >= 0
    alone = tl.load(neighbours + position * neighbours_stride + entry, mask=inside, other=0) <= 1
    tokens = tl.sum((token & real).to(tl.float32), axis=0)
    lonely = tl.sum((token & real & alone).to(tl.float32), axis=0)
    numbers += position
    tl.store(numbers, divergence)
    tl.store(numbers + rows, lonely / tokens)
    tl.store(numbers + 2 * rows, tl.sum(tl.where(entry == n - 1, mass_a, 0.0), axis=0))
    tl.store(numbers + 3 * rows, tl.sum(tl.where(entry == n - 1, mass_b, 0.0), axis=0))
    tl.store(out_size + position, 1 + tl.sum(token.to(tl.int64), axis=0))


@triton.jit
def _balanced(mass_a, mass_b, a, b, f, g, own_a, own_b, real, lam, DEBIASED: tl.constexpr):
    """Penalty, its mean under the policy, and divergence, for marginals that hold exactly."""
    penalty = f
    mean = tl.sum(mass_a * f, axis=0)
    divergence = mean + tl.sum(mass_b * g, axis=0) - 1.0 / lam
    if DEBIASED:
        # Potentials relative to a (x) a; in the convention of phi they are s + (1/lam) log a.
        own_a += tl.where(real, a / lam, 0.0)
        own_b += tl.where(real, b / lam, 0.0)
        penalty -= own_a
        own_mean = tl.sum(mass_a * own_a, axis=0)
        mean -= own_mean
        divergence += 1.0 / lam - own_mean - tl.sum(mass_b * own_b, axis=0)
    return penalty, mean, divergence


@triton.jit
def _unbalanced(a, b, f, g, own_a, own_b, lam, rho, DEBIASED: tl.constexpr):
    """Penalty, its mean under the policy, and divergence, for marginals that are held by rho."""
    price = rho + 1.0 / lam
    lost_a = 1.0 - tl.sum(tl.exp(a - f / rho), axis=0)
    lost_b = 1.0 - tl.sum(tl.exp(b - g / rho), axis=0)
    divergence = price * lost_a + rho * lost_b
    penalty = price * (1.0 - _growth(f, rho))
    mean = price * lost_a
    if DEBIASED:
        own_lost_a = 1.0 - tl.sum(tl.exp(a - own_a / rho), axis=0)
        own_lost_b = 1.0 - tl.sum(tl.exp(b - own_b / rho), axis=0)
        divergence -= (rho + price) * (own_lost_a + own_lost_b) * 0.5
        penalty = price * (_growth(own_a, rho) - _growth(f, rho))
        mean = price * (lost_a - own_lost_a)
    return penalty, mean, divergence


@triton.jit
def _growth(potential, rho):
    """``exp(-potential / rho)``, bounded at exp(80), which only tokens of no mass exceed."""
    return tl.exp(tl.minimum(-potential / rho, 80.0))
