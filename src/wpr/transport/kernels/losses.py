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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from wpr.transport.kernels import cdiv, next_power_of_2
from wpr.transport.kernels.divergence import (
    KINDS,
    TOKENS_OF_A_PROGRAM,
    divergence_sums,
    place_of,
    weighted_derivative,
)
from wpr.transport.kernels.support import ReducedLogits
from wpr.transport.kernels.vocabulary import side_by_side

CONSTANT = -1
"""The kind without an f: all tokens have one penalty."""


class HeldLoss(ABC):
    """The loss of positions, ``value`` ``(P,)``, and all that its gradient needs beside the logits.

    log_policy, log_reference: ``(P,)`` the log-sum-exps of both rows, not finite where a row is no distribution.
    """

    value: Tensor
    log_policy: Tensor
    log_reference: Tensor

    def taken_apart(self) -> tuple[Callable[[Iterator[Tensor]], HeldLoss], list[Tensor]]:
        """Its tensors, for torch to save, and what makes it again of an iterator over them."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        others = {name: value for name, value in vars(self).items() if name not in tensors}
        kind, names = type(self), list(tensors)
        return lambda saved: kind(**others, **dict(zip(names, saved, strict=False))), list(tensors.values())

    @abstractmethod
    def gradient(self, policy: Tensor, reference: Tensor, upstream: Tensor, onto: Tensor | None = None) -> Tensor:
        """In the policy's logits ``(P, V)``, in their type, where that of the values is ``upstream`` ``(P,)``; added
        to ``onto``, if there is one, in its place. That is another such gradient.
        """

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
        sums = divergence_sums(policy, reference, kind, alpha, derivative=True)
        # A row that is no distribution shows: infinity minus infinity is NaN.
        mean = sums.terms + (sums.log_policy - sums.log_policy) + (sums.log_reference - sums.log_reference)
        value = mean + sums.offset.masked_fill(sums.offset.isinf(), 0) if value_gauge else mean
        return cls(value, mean, sums.log_policy, sums.log_reference, KINDS.index(kind), alpha)

    def gradient(self, policy: Tensor, reference: Tensor, upstream: Tensor, onto: Tensor | None = None) -> Tensor:
        totals = self.log_policy, self.log_reference
        return _gradient(policy, reference, *totals, -self.mean, upstream, onto, self.kind, self.alpha)


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

    def gradient(self, policy: Tensor, reference: Tensor, upstream: Tensor, onto: Tensor | None = None) -> Tensor:
        excess = self.penalties - self.value.unsqueeze(-1)
        inside = upstream.unsqueeze(-1) * self.masses.exp() * excess
        padding = self.ids[:, :-1] < 0  # repeats the first token
        index = torch.where(padding, self.ids[:, :1], self.ids[:, :-1])
        values = torch.where(padding, inside[:, :1], inside[:, :-1])
        if onto is not None:  # before all tokens get the gradient of those outside of the support
            values += onto.gather(-1, index)
        found = _gradient(policy, policy, self.log_policy, self.log_policy, excess[:, -1], upstream, onto, CONSTANT)
        return found.scatter_(-1, index, values.to(found.dtype))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, policy: Tensor, reference: Tensor, held: HeldLoss) -> Tensor:
        ctx.join, tensors = held.taken_apart()
        ctx.save_for_backward(policy, reference, *tensors)
        return held.value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        policy, reference, *tensors = ctx.saved_tensors
        return ctx.join(iter(tensors)).gradient(policy, reference, upstream), None, None


def _gradient(
    policy: Tensor,
    reference: Tensor,
    log_policy: Tensor,
    log_reference: Tensor,
    shift: Tensor,
    upstream: Tensor,
    onto: Tensor | None,
    kind: int,
    alpha: float = 0.5,
) -> Tensor:
    """``upstream p_j (f'(u_j) + shift)`` ``(P, V)`` in the policy's type, 0 where a logit is -inf, added to ``onto``;
    others ``(P,)``.
    """
    policy, reference = side_by_side(policy), side_by_side(reference)
    rows, vocabulary = policy.shape
    assert onto is None or (onto.is_contiguous() and onto.shape == policy.shape)
    out = torch.empty(rows, vocabulary, dtype=policy.dtype, device=policy.device) if onto is None else onto
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
                onto is not None,
                size,
                num_warps=4,
            )
    return out


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
    ADD: tl.constexpr,
    SIZE: tl.constexpr,
):
    row, token = place_of(programs, SIZE)
    inside = token < vocabulary
    x = tl.load(policy + row * policy_stride + token, mask=inside, other=-float("inf")).to(tl.float32)
    log_total_p = tl.load(log_policy + row)
    log_p = x - log_total_p
    weighted = tl.exp(log_p) * tl.load(shift + row)
    if KIND >= 0:
        y = tl.load(reference + row * reference_stride + token, mask=inside, other=-float("inf")).to(tl.float32)
        log_total_q = tl.load(log_reference + row)
        d = (x - y) - (log_total_p - log_total_q)
        weighted += weighted_derivative(log_p, y - log_total_q, d, alpha, KIND)
    gradient = tl.where(x == -float("inf"), 0.0, tl.load(upstream + row) * weighted)
    places = out + row * vocabulary + token
    if ADD:
        gradient += tl.load(places, mask=inside).to(tl.float32)
    tl.store(places, gradient, mask=inside)
