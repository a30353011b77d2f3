"""Losses of logits: the expected penalty under the policy, whose gradient is one pass over the vocabulary.

Notation for shapes: ``P`` positions, ``V`` vocabulary, ``n`` support entries; ``p`` the policy, ``d = log(p/q)``.

A loss is ``L = sum_j p_j c_j`` with the penalties c held constant. In the policy's logits its gradient is

    dL/dz_j  =  p_j (c_j - L)

For an f-divergence c_j is f'(u_j), up to a constant of the position that drops out; for transport it is the penalty of
the support's entry j, or that of the rest for all tokens outside. So nothing of the size of the logits is kept beside
the logits themselves, and the gradient is written once, in their type.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from wpr.transport.kernels import cdiv, next_power_of_2
from wpr.transport.kernels.divergence import KINDS, TOKENS_OF_A_PROGRAM, _terms, _weighted
from wpr.transport.kernels.support import ReducedLogits
from wpr.transport.kernels.vocabulary import block_statistics, log_totals, side_by_side

CONSTANT = -1
"""The kind without an f: all tokens have one penalty."""


class HeldLoss(ABC):
    """The loss of positions, ``value`` ``(P,)``, and all that its gradient needs beside the logits.

    log_policy, log_reference: ``(P,)`` the log-sum-exps of both rows, not finite where a row is no distribution.
    """

    value: Tensor
    log_policy: Tensor
    log_reference: Tensor

    @abstractmethod
    def gradient(self, policy: Tensor, reference: Tensor, upstream: Tensor) -> Tensor:
        """In the policy's logits ``(P, V)``, in their type, where that of the values is ``upstream`` ``(P,)``."""

    def of(self, policy: Tensor, reference: Tensor) -> Tensor:
        """The values, with this gradient in the policy's logits."""
        loss: Tensor = _Loss.apply(policy, reference, self)
        return loss


@dataclass(frozen=True)
class DivergenceLoss(HeldLoss):
    """Of an f-divergence: the mean of f'(u) under the policy, and ``value``, which differs by a constant."""

    value: Tensor
    mean: Tensor
    log_policy: Tensor
    log_reference: Tensor
    kind: int
    alpha: float

    @classmethod
    def measure(cls, policy: Tensor, reference: Tensor, kind: str, alpha: float, value_gauge: bool) -> DivergenceLoss:
        """For one of `divergence.KINDS`; with the value gauge the value is the divergence, else the mean."""
        both = side_by_side(policy), side_by_side(reference)
        if policy.dtype == reference.dtype:
            totals = tuple(log_totals(block_statistics(*both)))
        else:
            totals = tuple(torch.cat([log_totals(block_statistics(logits)) for logits in both]))
        rows, vocabulary = policy.shape
        size = min(TOKENS_OF_A_PROGRAM, next_power_of_2(vocabulary))
        programs = cdiv(vocabulary, size)
        parts = torch.empty(2, rows, programs, dtype=torch.float32, device=policy.device)
        if rows:
            _means_kernel[(rows * programs,)](
                *(*both, *totals, parts[0], parts[1], vocabulary, both[0].stride(0), both[1].stride(0), programs),
                *(alpha, KINDS.index(kind), size),
                num_warps=4,
            )
        mean, offset = parts.sum(-1)
        value = mean + offset.masked_fill(offset.isinf(), 0) if value_gauge else mean
        return cls(value, mean, totals[0], totals[1], KINDS.index(kind), alpha)

    def gradient(self, policy: Tensor, reference: Tensor, upstream: Tensor) -> Tensor:
        totals = self.log_policy, self.log_reference
        return _gradient(policy, reference, *totals, -self.mean, upstream, self.kind, self.alpha)


@dataclass(frozen=True)
class SupportLoss(HeldLoss):
    """Of penalties ``(P, n)`` on a support: their mean under the policy, whose log masses there are ``masses``. ids:
    ``(P, n)``, of which the last entry is the rest of the vocabulary. Penalties of entries without a mass are 0.
    """

    value: Tensor
    ids: Tensor
    masses: Tensor
    penalties: Tensor
    log_policy: Tensor
    log_reference: Tensor

    @classmethod
    def measure(cls, reduced: ReducedLogits, penalties: Tensor) -> SupportLoss:
        """Of what is kept of the logits, and the penalties of the support's entries."""
        ids, masses = reduced.support.ids, reduced.support.log_policy
        mass = masses.exp()
        penalties = penalties.masked_fill(mass == 0, 0)  # unbounded, perhaps, but not paid
        value = (mass * penalties).sum(-1)
        return cls(value, ids, masses, penalties, reduced.log_policy, reduced.log_reference)

    def gradient(self, policy: Tensor, reference: Tensor, upstream: Tensor) -> Tensor:
        excess = self.penalties - self.value.unsqueeze(-1)
        found = _gradient(policy, policy, self.log_policy, self.log_policy, excess[:, -1], upstream, CONSTANT)
        inside = upstream.unsqueeze(-1) * self.masses.exp() * excess
        padding = self.ids[:, :-1] < 0  # repeats the first token
        index = torch.where(padding, self.ids[:, :1], self.ids[:, :-1])
        values = torch.where(padding, inside[:, :1], inside[:, :-1])
        return found.scatter_(-1, index, values.to(found.dtype))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, policy: Tensor, reference: Tensor, held: HeldLoss) -> Tensor:
        ctx.save_for_backward(policy, reference)
        ctx.held = held
        return held.value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.held.gradient(*ctx.saved_tensors, upstream), None, None


def _gradient(
    policy: Tensor,
    reference: Tensor,
    log_policy: Tensor,
    log_reference: Tensor,
    shift: Tensor,
    upstream: Tensor,
    kind: int,
    alpha: float = 0.5,
) -> Tensor:
    """``upstream p_j (f'(u_j) + shift)`` ``(P, V)`` in the policy's type, 0 where a logit is -inf; others ``(P,)``."""
    policy, reference = side_by_side(policy), side_by_side(reference)
    rows, vocabulary = policy.shape
    out = torch.empty(rows, vocabulary, dtype=policy.dtype, device=policy.device)
    size = min(TOKENS_OF_A_PROGRAM, next_power_of_2(vocabulary))
    programs = cdiv(vocabulary, size)
    if rows:
        with torch.cuda.device_of(policy):
            _gradient_kernel[(rows * programs,)](
                policy,
                reference,
                log_policy.contiguous(),
                log_reference.contiguous(),
                shift.contiguous(),
                upstream.float().contiguous(),
                out,
                vocabulary,
                policy.stride(0),
                reference.stride(0),
                programs,
                alpha,
                kind,
                size,
                num_warps=4,
            )
    return out


@triton.jit(do_not_specialize=["log_reference", "out_offset"])
def _means_kernel(
    policy,
    reference,
    log_policy,
    log_reference,
    out_mean,
    out_offset,
    vocabulary,
    policy_stride,
    reference_stride,
    programs,
    alpha,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
):
    """A program's part of the mean of f'(u) over what the policy can emit, and of the divergence's offset."""
    program = tl.program_id(0)
    row = (program // programs).to(tl.int64)
    token = (program % programs) * SIZE + tl.arange(0, SIZE)
    inside = token < vocabulary
    x = tl.load(policy + row * policy_stride + token, mask=inside, other=-float("inf")).to(tl.float32)
    y = tl.load(reference + row * reference_stride + token, mask=inside, other=-float("inf")).to(tl.float32)
    log_total_p = tl.load(log_policy + row)
    log_total_q = tl.load(log_reference + row)
    possible = (x != -float("inf")) | (y != -float("inf"))
    log_p = x - log_total_p
    d = tl.where(possible, (x - y) - (log_total_p - log_total_q), 0.0)
    mean = tl.where(x == -float("inf"), 0.0, _weighted_derivative(log_p, y - log_total_q, d, alpha, KIND))
    _, offset = _terms(log_p, y - log_total_q, d, alpha, KIND)
    # A row that is no distribution shows: the sum of a NaN.
    tl.store(out_mean + program, tl.sum(mean, axis=0) + (log_total_p - log_total_p) + (log_total_q - log_total_q))
    tl.store(out_offset + program, tl.sum(tl.where(possible, offset, 0.0), axis=0))


@triton.jit(do_not_specialize=["log_policy", "log_reference", "shift", "upstream"])
def _gradient_kernel(
    policy,
    reference,
    log_policy,
    log_reference,
    shift,
    upstream,
    out,
    vocabulary,
    policy_stride,
    reference_stride,
    programs,
    alpha,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // programs).to(tl.int64)
    token = (program % programs) * SIZE + tl.arange(0, SIZE)
    inside = token < vocabulary
    x = tl.load(policy + row * policy_stride + token, mask=inside, other=-float("inf")).to(tl.float32)
    log_total_p = tl.load(log_policy + row)
    log_p = x - log_total_p
    weighted = tl.exp(log_p) * tl.load(shift + row)
    if KIND >= 0:
        y = tl.load(reference + row * reference_stride + token, mask=inside, other=-float("inf")).to(tl.float32)
        log_total_q = tl.load(log_reference + row)
        d = (x - y) - (log_total_p - log_total_q)
        weighted += _weighted_derivative(log_p, y - log_total_q, d, alpha, KIND)
    gradient = tl.where(x == -float("inf"), 0.0, tl.load(upstream + row) * weighted)
    tl.store(out + row * vocabulary + token, gradient, mask=inside)


@triton.jit
def _weighted_derivative(log_p, log_q, d, alpha, KIND: tl.constexpr):
    """p f'(u) of `divergence.KINDS` for p > 0, ``d`` being log u: f'(u) alone may be infinite where p is next to none.
    Where u is near 1, the difference of two probabilities is their ratio's.
    """
    p = tl.exp(log_p)
    near = tl.abs(d) < 1.0
    if KIND == 0:  # reverse KL: d
        found = _weighted(p, d)
    elif KIND == 1:  # forward KL: 1 - 1 / u
        found = tl.where(near, -p * _expm1(-d), p - tl.exp(log_q))
    elif KIND == 2:  # Jensen-Shannon: log 2 - log(1 + 1 / u)
        found = _weighted(p, 0.6931471805599453 - tl.log(1.0 + tl.exp(-tl.abs(d))) - tl.maximum(-d, 0.0))
    elif KIND == 3:  # alpha: (1 - u^-alpha) / alpha
        mixed = tl.exp((1.0 - alpha) * log_p + alpha * log_q)
        found = tl.where(near, -p * _expm1(-alpha * d), p - mixed) / alpha
    elif KIND == 4:  # total variation: the sign of d, halved
        found = tl.where(d > 0, 0.5 * p, tl.where(d < 0, -0.5 * p, 0.0))
    elif KIND == 5:  # chi-squared: 2 (u - 1)
        found = 2.0 * tl.where(near, p * _expm1(d), tl.exp(log_p + d) - p)
    else:  # squared Hellinger: 1 - 1 / sqrt(u)
        found = tl.where(near, -p * _expm1(-0.5 * d), p - tl.exp((log_p + log_q) * 0.5))
    return found


@triton.jit
def _expm1(x):
    """exp(x) - 1, which by itself would lose the digits of small x."""
    return tl.where(tl.abs(x) < 0.01, x * (1.0 + x * (0.5 + x * 0.16666667)), tl.exp(x) - 1.0)
