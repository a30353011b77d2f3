"""From hidden states to losses with a gradient in the policy's states and head, in the memory of a slice of logits.

Notation for shapes: ``P`` positions, ``H`` hidden size, ``V`` vocabulary.

The forward pass makes each slice of logits, keeps its losses and drops it; the backward pass makes the slice again.
Where the kernels know a loss's gradient (`HeldLoss`), there is no graph in between: penalties are solved for once, and
the gradient of a slice, in the logits' own type, is a pass over it. Otherwise torch's checkpoints do the same through
the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from wpr.language_models import Module, as_reference, logits_of, plain_model
from wpr.ppo.scoring import checked_slices, counted_from, logits_in_slices, slices_of
from wpr.regularizers import Regularizer, Sum
from wpr.regularizers.regularizer import LossHolder
from wpr.transport.support import refuse_rows_without_total

if TYPE_CHECKING:
    from wpr.transport.kernels.losses import HeldLoss


def loss_from_hidden(
    regularizer: Regularizer,
    policy: Module,
    policy_states: Tensor,
    reference: Module | None,
    reference_states: Tensor,
    *,
    temperature: float = 1.0,
    memory_mb: float = 512.0,
    by_part: bool = False,
) -> Tensor:
    """The loss of each position ``(P,)``, with a gradient in the policy's hidden states and in its head:

        loss_i = regularizer.loss(head(h_i) / temperature, reference head(g_i) / temperature)

    for the policy's states h and the reference's g. It equals `Regularizer.loss` of whole logits, in the memory of one
    slice: a slice of logits is made, reduced to its losses, and dropped. The backward pass makes the slice again, as a
    fused linear cross-entropy does, so that both heads are applied twice. By the kernels, penalties are solved for once
    and the gradient is one more pass over the slice; otherwise the backward pass solves for them again.

    policy, reference: causal language models of transformers, for their heads; also wrapped by PEFT. A reference of
        None is the policy with its adapter off.
    policy_states, reference_states: ``(P, H)`` last hidden states, see `language_models.hidden_states`. The reference
        gets no gradient.
    memory_mb: of the logits of both models that exist at a time; what `Regularizer.loss` computes from them comes on
        top.
    by_part: the losses of a sum's parts ``(P, parts)``, without their weights; of one regularizer ``(P, 1)``.

    Raises ValueError for states that are not of the same positions, for a temperature or memory that is not positive,
    and for logits that are not a distribution, with the positions. Heads whose weights are sharded (ZeRO-3, FSDP) are
    not gathered here: call it within the sharded module's forward pass, with as many positions on every process.

    Example::

        divergence = loss_from_hidden(ReverseKL(), policy, states[0], reference, states[1])
        (policy_loss + beta * divergence.mean()).backward()
    """
    slices = checked_slices(policy, policy_states, reference_states, memory_mb, temperature)
    total = regularizer if isinstance(regularizer, Sum) else Sum([(1.0, regularizer)])
    device = policy_states.device.type
    apart = HeadLoss(policy, reference, temperature, slices, [part for _, part in total.parts], device)
    if apart.is_known(policy_states, reference_states):
        found = apart(policy_states, reference_states)
        weights = found.new_tensor([weight for weight, _ in total.parts])
        return found if by_part else (found * weights).sum(-1)
    loss = total.part_losses if by_part else regularizer.loss

    def slice_loss(states: Tensor, other_states: Tensor, start: int) -> Tensor:
        with torch.no_grad(), as_reference(policy, reference) as model:
            reference_logits = logits_of(model, other_states, temperature)
        with counted_from(start):
            return loss(logits_of(policy, states, temperature), reference_logits)

    return torch.cat(
        [
            checkpoint(slice_loss, policy_states[rows], reference_states[rows], rows.start, use_reentrant=False)
            for rows in slices_of(len(policy_states), slices)
        ]
    )


class HeadLoss:
    """Losses ``(P, parts)`` of regularizers that hold what their gradients need (`LossHolder`): slices of logits are
    made once for the losses and once for the gradient, without a graph in between. Torch frees what is held right after
    this gradient, before the models' layers need the memory for theirs.
    """

    def __init__(
        self,
        policy: Module,
        reference: Module | None,
        temperature: float,
        slices: int,
        regularizers: Sequence[Any],
        device: str,
    ) -> None:
        """device: the kind of device that states are on."""
        self.policy, self.reference = policy, reference
        self.temperature, self.slices, self.regularizers = temperature, slices, regularizers
        self.head = plain_model(policy).get_output_embeddings()
        self.trained = {name: weight for name, weight in self.head.named_parameters() if weight.requires_grad}
        self.device = device
        self.precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def is_known(self, states: Tensor, reference_states: Tensor) -> bool:
        """Whether all regularizers are of that kind, on logits of these states, and logits that are made again are the
        same.
        """
        if any(isinstance(one, nn.Dropout) and one.training and one.p > 0 for one in self.head.modules()):
            return False
        with torch.no_grad():
            both = next(self._slices(states[:0], reference_states[:0], 1))[1:]
        return all(isinstance(one, LossHolder) and one.holds_loss(*both) for one in self.regularizers)

    def __call__(self, states: Tensor, reference_states: Tensor) -> Tensor:
        held: list[list[HeldLoss]] = []
        found: Tensor = _Losses.apply(self, held, reference_states.detach(), states, *self.trained.values())  # type: ignore[no-untyped-call]
        if found.isnan().any():  # one wait for the device, after all slices
            for rows, (first, *_) in zip(slices_of(len(states), self.slices), held, strict=True):
                with counted_from(rows.start):
                    refuse_rows_without_total(first.log_policy, "policy")
                    refuse_rows_without_total(first.log_reference, "reference")
        return found

    def held_losses(self, states: Tensor, reference_states: Tensor) -> Iterator[list[HeldLoss]]:
        """Slice by slice, one of each regularizer."""
        for _, policy_logits, reference_logits in self._slices(states, reference_states, self.slices):
            yield [one.held_loss(policy_logits, reference_logits) for one in self.regularizers]
            del policy_logits, reference_logits

    def gradients(
        self, states: Tensor, reference_states: Tensor, held: Sequence[Sequence[HeldLoss]], upstream: Tensor
    ) -> Iterator[Tensor]:
        """In the states ``(P, H)``, then in the head's weights, added up over slices in float32 at least."""
        copies = [
            weight.detach().to(self.precision or weight.dtype).requires_grad_() for weight in self.trained.values()
        ]
        named = dict(zip(self.trained, copies, strict=True))
        of_states = torch.empty_like(states)
        sums = [torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in self.trained.values()]
        for rows, parts in zip(slices_of(len(states), self.slices), held, strict=True):
            own = states[rows].detach().requires_grad_()
            with self._autocast():
                with torch.no_grad(), as_reference(self.policy, self.reference) as model:
                    reference_logits = logits_of(model, reference_states[rows], self.temperature)
                with torch.enable_grad():
                    policy_logits = logits_of(self.policy, own, self.temperature, named)
            of_logits = None
            for part, one in enumerate(parts):
                of_logits = one.gradient(policy_logits.detach(), reference_logits, upstream[rows, part], of_logits)
            del reference_logits
            of_states[rows], *of_weights = torch.autograd.grad(
                policy_logits, [own, *copies], of_logits, allow_unused=True
            )
            del policy_logits, of_logits
            for total in sums:
                if (more := of_weights.pop(0)) is not None:  # of another adapter, for instance
                    total += more
                del more  # before the next slice has its own
        yield of_states
        for total, weight in zip(sums, self.trained.values(), strict=True):
            yield total.to(weight.dtype)

    def _slices(self, states: Tensor, reference_states: Tensor, slices: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        return logits_in_slices(self.policy, states, self.reference, reference_states, slices, self.temperature)

    def _autocast(self) -> AbstractContextManager[None]:
        """The precision of the forward pass, which a backward pass does not have by itself."""
        context: AbstractContextManager[None] = torch.autocast(
            self.device, dtype=self.precision, enabled=self.precision is not None
        )
        return context


class _Losses(torch.autograd.Function):
    """``(P, parts)``. States and what is held are saved by torch, which lets go of them after the backward pass, while
    the loss may live on.
    """

    @staticmethod
    def forward(
        ctx: Any, work: HeadLoss, held: list[list[HeldLoss]], reference_states: Tensor, states: Tensor, *weights: Tensor
    ) -> Tensor:
        """``held`` is filled."""
        held += work.held_losses(states, reference_states)
        apart = [[one.taken_apart() for one in parts] for parts in held]
        ctx.work, ctx.joins = work, [[join for join, _ in parts] for parts in apart]
        tensors = (tensor for parts in apart for _, of_one in parts for tensor in of_one)
        ctx.save_for_backward(states, reference_states, *tensors)
        return torch.cat([torch.stack([one.value for one in parts], -1) for parts in held])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        states, reference_states, *saved = ctx.saved_tensors
        tensors = iter(saved)
        held = [[join(tensors) for join in parts] for parts in ctx.joins]
        return None, None, None, *ctx.work.gradients(states, reference_states, held, upstream)
