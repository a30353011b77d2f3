"""What every regularizer is: logits of two models in, one penalty per token out.

Notation for shapes: ``P`` positions, ``V`` vocabulary. The caller flattens and masks; a regularizer never sees padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from wpr.transport.support import refuse_rows_without_total

if TYPE_CHECKING:
    from wpr.regularizers.sums import Sum
    from wpr.transport.kernels.losses import HeldLoss

Gauge = Literal["raw", "value"]
"""What is done with the constant that may be added to all penalties of a position: nothing, or chosen so that their
mean is the divergence.
"""


@dataclass(frozen=True)
class RegularizerOutput:
    """Penalties of the sampled tokens.

    penalty: ``(P,)`` to be multiplied by beta and subtracted from the reward.
    divergence: ``(P,)`` of the policy's next-token distribution from the reference's.
    diagnostics: name to ``(P,)``: how the numbers came about.
    """

    penalty: Tensor
    divergence: Tensor
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def join(parts: Sequence[RegularizerOutput]) -> RegularizerOutput:
        """The outputs of several groups of positions, one after the other."""
        if len(parts) == 1:
            return parts[0]
        return RegularizerOutput(
            torch.cat([part.penalty for part in parts]),
            torch.cat([part.divergence for part in parts]),
            {name: torch.cat([part.diagnostics[name] for part in parts]) for name in parts[0].diagnostics},
        )


@runtime_checkable
class Regularizer(Protocol):
    """A regularizer between policy and reference."""

    def __call__(self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor) -> RegularizerOutput:
        """Penalties of ``tokens`` ``(P,)`` under logits ``(P, V)`` of both models, without gradient."""
        ...

    def loss(self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The expected penalty under the policy ``(P,)``, whose gradient in the policy's logits is that of the
        divergence.

        The penalties are held constant and the policy's probabilities carry the gradient: where a penalty is the
        derivative of a divergence in the policy's probabilities, that is the divergence's own gradient (the envelope
        theorem).
        """
        ...


@runtime_checkable
class TwoPhaseRegularizer(Regularizer, Protocol):
    """A regularizer that needs the full logits only for a moment: they are reduced to something small, slice by slice,
    and the work is then done for all positions together, in as large batches as a GPU likes.
    """

    def reduce(self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor) -> Any:
        """What is kept of a slice's logits."""
        ...

    def finish(self, slices: Sequence[Any]) -> RegularizerOutput:
        """The penalties of all positions, from what `reduce` kept of each slice."""
        ...


@runtime_checkable
class LossHolder(Regularizer, Protocol):
    """A regularizer whose loss can be taken apart: what is computed once, and the gradient, a pass over the logits."""

    def holds_loss(self, policy_logits: Tensor, reference_logits: Tensor) -> bool:
        """Whether that is so for these logits."""
        ...

    def held_loss(self, policy_logits: Tensor, reference_logits: Tensor) -> HeldLoss:
        """The loss of logits ``(P, V)`` and what its gradient needs. Rows that are no distribution are not refused."""
        ...


def checked_loss(regularizer: LossHolder, policy_logits: Tensor, reference_logits: Tensor) -> Tensor:
    """`Regularizer.loss` by a held one ``(P,)``."""
    held = regularizer.held_loss(policy_logits.detach(), reference_logits)
    refuse_rows_without_total(held.log_policy, "policy")
    refuse_rows_without_total(held.log_reference, "reference")
    return held.of(policy_logits, reference_logits)


class Combinable:
    """Gives a regularizer ``+``, and ``*`` by a positive number: see `wpr.regularizers.sums`."""

    def __add__(self, other: Any) -> Sum:
        return NotImplemented if not isinstance(other, Regularizer) else _sum([(1.0, self), (1.0, other)])

    def __mul__(self, weight: Any) -> Sum:
        return _sum([(weight, self)])

    __rmul__ = __mul__


def _sum(parts: Sequence[tuple[Any, Any]]) -> Sum:
    from wpr.regularizers.sums import Sum

    return Sum(parts)


def check_inputs(policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor) -> Tensor:
    """The tokens as int64; refuse inputs that do not belong together, naming what does not fit."""
    tokens = check_shapes(policy_logits, reference_logits, tokens)
    refuse_tokens_outside(tokens, policy_logits.shape[-1])
    return tokens


def check_tensors(**given: object) -> None:
    """Refuse lists and arrays, by the name that the argument has."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; pass a tensor, as torch.as_tensor({name})")


def check_shapes(policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor) -> Tensor:
    """The same without a look at the tokens themselves, for which the host would have to wait for the device."""
    check_tensors(policy_logits=policy_logits, reference_logits=reference_logits, tokens=tokens)
    if policy_logits.ndim != 2 or policy_logits.shape != reference_logits.shape:
        raise ValueError(
            f"policy logits {tuple(policy_logits.shape)} and reference logits {tuple(reference_logits.shape)} must "
            f"both be (positions, vocabulary) and of one shape; "
            "flatten batch and time first, and drop padding"
        )
    positions = len(policy_logits)
    if not (policy_logits.is_floating_point() and reference_logits.is_floating_point()):
        raise ValueError(
            f"logits of type {policy_logits.dtype} and {reference_logits.dtype}; both must be floating point"
        )
    if tokens.shape != (positions,) or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(
            f"tokens of shape {tuple(tokens.shape)} and type {tokens.dtype} for {positions} positions; pass one "
            f"integer token id per position"
        )
    if not policy_logits.device == reference_logits.device == tokens.device:
        raise ValueError(
            f"policy logits, reference logits and tokens are on {policy_logits.device}, {reference_logits.device} "
            f"and {tokens.device}; move them to one device"
        )
    return tokens.long()


def refuse_tokens_outside(tokens: Tensor, vocabulary: int) -> None:
    """Raise if a token id ``(P,)`` is none of the vocabulary's."""
    outside = ((tokens < 0) | (tokens >= vocabulary)).nonzero().squeeze(-1)
    if len(outside):
        raise ValueError(
            f"token id {int(tokens[outside[0]])} at position {int(outside[0])} is outside the vocabulary "
            f"(0..{vocabulary - 1}); "
            "padding and ignored labels must be dropped before a regularizer sees them"
        )


def refuse_impossible_tokens(log_probability: Tensor, tokens: Tensor, first: int = 0) -> None:
    """Raise if a sampled token has probability zero ``(P,)`` under the policy, which no sample of that policy can
    have.
    """
    bad = (log_probability == -torch.inf).nonzero().squeeze(-1)
    if len(bad):
        raise ValueError(
            f"token {int(tokens[bad[0]])} at position {first + int(bad[0])} has probability 0 under the policy "
            f"({len(bad)} such position(s)); "
            "a sampled token needs a finite logit: apply the same vocabulary mask when sampling and when scoring"
        )


def validation(
    tokens: Tensor, vocabulary: int, log_policy: Tensor, log_reference: Tensor, log_probability: Tensor
) -> Callable[[], None]:
    """A function that refuses all that values ``(P,)`` can be refused for: tokens outside of the vocabulary, rows
    without a finite log-sum-exp, and tokens that the policy cannot emit.

    The device is asked now, for one answer, and the function waits for that answer alone: not for the work that the
    device was given since.
    """
    known = tokens == tokens.clamp(0, vocabulary - 1)
    total = log_policy + log_reference + log_probability
    fine = (known & (total - total == 0)).all()  # infinities and NaN are no zero then
    answered = None
    if fine.is_cuda:
        answer = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(fine, non_blocking=True)
        answered = torch.cuda.Event()
        answered.record(torch.cuda.current_stream(fine.device))
        fine = answer

    def refuse() -> None:
        if answered is not None:
            answered.synchronize()
        if not fine:
            refuse_tokens_outside(tokens, vocabulary)
            refuse_rows_without_total(log_policy, "policy")
            refuse_rows_without_total(log_reference, "reference")
            refuse_impossible_tokens(log_probability, tokens)

    return refuse
