"""The divergence of a policy whose logits are known from a reference of which only the most likely tokens are.

Notation for shapes: ``P`` positions, ``V`` vocabulary, ``k`` tokens of the reference that are known.

A model that is served says log-probabilities of its k most likely tokens, and by what is missing to one how likely all
others are together. Policy p and reference q are compared on what is known of both, k tokens and one rest:

    p~ = (p_1, ..., p_k, 1 - sum of these)        q~ = (q_1, ..., q_k, 1 - sum of these)        D(p~, q~)

For f-divergences that is never negative, never more than D(p, q), since joining tokens cannot tell two distributions
apart any better, and equal to it where k = V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from wpr.regularizers.regularizer import Regularizer, check_tensors
from wpr.regularizers.sums import Sum
from wpr.regularizers.wasserstein import Wasserstein
from wpr.transport.support import NO_TOKEN, Support, refuse_rows_without_total, row_slices, working_dtype

SMALLEST_REST = 1e-6
"""Of the reference's mass. Log-probabilities in float32 do not say how much less is left, and 0 would make all other
tokens impossible.
"""
ROUNDING = 1e-3
"""By how much the reference's probabilities may sum above 1."""


@dataclass(frozen=True)
class TopK:
    """Both distributions on k tokens and one rest.

    ids: ``(P, k)`` token ids in increasing order.
    policy, reference: ``(P, k + 1)`` logits; those of the policy carry the gradient. The last column is the rest.
    vocabulary: how many tokens the policy has.
    """

    ids: Tensor
    policy: Tensor
    reference: Tensor
    vocabulary: int

    @classmethod
    def of(cls, policy_logits: Tensor, reference_ids: Tensor, reference_log_probs: Tensor) -> TopK:
        """From logits ``(P, V)``, and ids and log-probabilities ``(P, k)`` in any order. Until the backward pass one
        tensor of the logits' shape and type is held; the logits themselves are not, and may be overwritten.
        """
        _check_shapes(policy_logits, reference_ids, reference_log_probs)
        vocabulary, k = policy_logits.shape[-1], reference_ids.shape[-1]
        ids, order = reference_ids.long().sort(-1)
        log_q = reference_log_probs.detach().double().gather(-1, order)
        mass = log_q.exp().sum(-1, keepdim=True)
        _refuse_bad_rows(ids, log_q, mass, vocabulary)
        rest = (1 - mass).clamp_min(SMALLEST_REST).log() if k < vocabulary else torch.full_like(mass, -torch.inf)
        policy: Tensor = _Joined.apply(policy_logits, ids)  # type: ignore[no-untyped-call]
        refuse_rows_without_total(policy.detach().logsumexp(-1), "policy")
        return cls(ids, policy, torch.cat([log_q, rest], -1).to(policy.dtype), vocabulary)

    def loss(self, regularizer: Regularizer) -> Tensor:
        """See `Regularizer.loss`; on the k tokens and the rest ``(P,)``. The rest has no neighbours in a geometry."""
        if isinstance(regularizer, Sum):
            return torch.stack([weight * self.loss(part) for weight, part in regularizer.parts]).sum(0)
        if not isinstance(regularizer, Wasserstein):
            return regularizer.loss(self.policy, self.reference)
        if regularizer.geometry.vocabulary != self.vocabulary:
            raise ValueError(
                f"logits over {self.vocabulary} tokens but a geometry of {regularizer.geometry.vocabulary}; build the "
                "geometry from embeddings of a model with the policy's vocabulary"
            )
        log_p, log_q = self.policy.log_softmax(-1), self.reference.log_softmax(-1)
        ids = pad(self.ids, (0, 1), value=NO_TOKEN)
        penalties, _, _ = regularizer.penalties(Support(ids, log_p.detach(), log_q, torch.zeros_like(ids[:, 0])))
        p = log_p.exp()
        # Where the policy's probability is zero in this precision, the penalty may be unbounded, but it is not paid.
        return (p * penalties.masked_fill(p == 0, 0)).sum(-1)


def top_k_loss(
    regularizer: Regularizer, policy_logits: Tensor, reference_ids: Tensor, reference_log_probs: Tensor
) -> Tensor:
    """`Regularizer.loss` ``(P,)`` of logits ``(P, V)`` where only ids and log-probabilities ``(P, k)`` of the
    reference's most likely tokens are known.
    """
    return TopK.of(policy_logits, reference_ids, reference_log_probs).loss(regularizer)


class _Joined(torch.autograd.Function):
    """Logits of k tokens and the log-sum-exp of all others, ``(P, k + 1)`` in working precision."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        dtype = working_dtype(logits)
        rest = torch.empty(len(logits), 1, dtype=dtype, device=logits.device)
        # Each token's share of the rest, 0 for the k: what the gradient needs. The logits would do as well, but some
        # cross-entropies write their gradient over them.
        shares = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        for part in row_slices(logits):
            others = logits[part].to(dtype, copy=True).scatter_(-1, ids[part], -torch.inf)
            rest[part] = others.logsumexp(-1, keepdim=True)
            if shares is not None:
                empty = rest[part] == -torch.inf
                shares[part] = others.sub_(rest[part].masked_fill(empty, 0)).exp_()
        ctx.save_for_backward(ids, shares)
        return torch.cat([logits.gather(-1, ids).to(dtype), rest], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ids, shares = ctx.saved_tensors
        gradient = gradient.to(shares.dtype)
        return (shares * gradient[:, -1:]).scatter_(-1, ids, gradient[:, :-1]), None


def _check_shapes(logits: Tensor, ids: Tensor, log_probs: Tensor) -> None:
    check_tensors(policy_logits=logits, reference_ids=ids, reference_log_probs=log_probs)
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(
            f"policy logits {tuple(logits.shape)} of type {logits.dtype}; pass floating point (positions, vocabulary): "
            "flatten batch and time first, and drop padding"
        )
    integer = not (ids.is_floating_point() or ids.dtype == torch.bool)
    if ids.shape != log_probs.shape or ids.ndim != 2 or len(ids) != len(logits) or not integer:
        raise ValueError(
            f"reference ids {tuple(ids.shape)} of type {ids.dtype} and log-probabilities {tuple(log_probs.shape)} for "
            f"{len(logits)} positions; pass integer ids and as many log-probabilities, both (positions, k)"
        )
    if not 1 <= ids.shape[-1] <= logits.shape[-1]:
        raise ValueError(
            f"k={ids.shape[-1]} tokens of the reference; the vocabulary has {logits.shape[-1]}: set k from 1 to that"
        )
    if log_probs.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"log-probabilities of type {log_probs.dtype} leave open how much mass is left; ask the server for float32"
        )
    if not logits.device == ids.device == log_probs.device:
        raise ValueError(
            f"policy logits, reference ids and log-probabilities are on {logits.device}, {ids.device} and "
            f"{log_probs.device}; move them to one device"
        )


def _refuse_bad_rows(ids: Tensor, log_q: Tensor, mass: Tensor, vocabulary: int) -> None:
    """Refuse sorted ids and log-probabilities ``(P, k)``, and their masses ``(P, 1)``, that are of no distribution."""
    twice = torch.zeros_like(ids, dtype=torch.bool)
    twice[:, 1:] = ids[:, 1:] == ids[:, :-1]
    faults = [
        (ids, (ids < 0) | (ids >= vocabulary), "token id {} at position {} is outside the vocabulary "
         f"(0..{vocabulary - 1}); reference and policy must have one vocabulary, and padding must be dropped"),
        (ids, twice, "token id {} comes twice at position {}; pass each of the k tokens once, and drop padding"),
        (log_q, log_q.isnan(), "log-probability {} at position {} is no number; look for an overflow in the reference"),
        (mass, mass > 1 + ROUNDING, "probabilities of the reference sum to {:.6g} at position {}, beyond 1 and "
         f"rounding ({ROUNDING:g}); pass log-probabilities, the softmax over the whole vocabulary, not logits"),
    ]  # fmt: skip
    if not torch.stack([bad.any() for _, bad, _ in faults]).any():  # one question to the device
        return
    for values, bad, message in faults:
        for row, column in bad.nonzero()[:1].tolist():
            raise ValueError(message.format(values[row, column].item(), row))
