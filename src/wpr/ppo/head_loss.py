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
    apart = HeadLoss(policy, reference, reference_states, temperature, slices, [part for _, part in total.parts])
    if apart.is_known(policy_states):
        found = apart(policy_states)
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
    made once for the losses and once for the gradient, without a graph in between.
    """

    def __init__(
        self,
        policy: Module,
        reference: Module | None,
        reference_states: Tensor,
        temperature: float,
        slices: int,
        regularizers: Sequence[Any],
    ) -> None:
        self.policy, self.reference, self.reference_states = policy, reference, reference_states
        self.temperature, self.slices, self.regularizers = temperature, slices, regularizers
        self.held: list[list[HeldLoss]] = []
        self.head = plain_model(policy).get_output_embeddings()
        self.trained = {name: weight for name, weight in self.head.named_parameters() if weight.requires_grad}
        kind = reference_states.device.type
        self.precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def is_known(self, states: Tensor) -> bool:
        """Whether all regularizers are of that kind, on logits of these states, and logits that are made again are the
        same.
        """
        if any(isinstance(one, nn.Dropout) and one.training and one.p > 0 for one in self.head.modules()):
            return False
        with torch.no_grad():
            nothing = logits_in_slices(
                self.policy, states[:0], self.reference, self.reference_states[:0], 1, self.temperature
            )
            both = next(nothing)[1:]
        return all(isinstance(one, LossHolder) and one.holds_loss(*both) for one in self.regularizers)

    def __call__(self, states: Tensor) -> Tensor:
        found: Tensor = _Losses.apply(self, states, *self.trained.values())  # type: ignore[no-untyped-call]
        if found.isnan().any():  # one wait for the device, after all slices
            for rows, held in zip(slices_of(len(states), self.slices), self.held, strict=True):
                with counted_from(rows.start):
                    refuse_rows_without_total(held[0].log_policy, "policy")
                    refuse_rows_without_total(held[0].log_reference, "reference")
        return found

    def losses(self, states: Tensor) -> Tensor:
        """``(P, parts)``, and what is held for the gradient."""
        for _, policy_logits, reference_logits in logits_in_slices(
            self.policy, states, self.reference, self.reference_states, self.slices, self.temperature
        ):
            self.held.append([one.held_loss(policy_logits, reference_logits) for one in self.regularizers])
            del policy_logits, reference_logits
        return torch.cat([torch.stack([one.value for one in held], -1) for held in self.held])

    def gradients(self, states: Tensor, upstream: Tensor) -> Iterator[Tensor]:
        """In the states ``(P, H)``, then in the head's weights, added up over slices in float32 at least."""
        copies = [
            weight.detach().to(self.precision or weight.dtype).requires_grad_() for weight in self.trained.values()
        ]
        named = dict(zip(self.trained, copies, strict=True))
        of_states = torch.empty_like(states)
        sums = [torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in self.trained.values()]
        for rows, held in zip(slices_of(len(states), self.slices), self.held, strict=True):
            own = states[rows].detach().requires_grad_()
            with self._autocast():
                with torch.no_grad(), as_reference(self.policy, self.reference) as model:
                    reference_logits = logits_of(model, self.reference_states[rows], self.temperature)
                with torch.enable_grad():
                    policy_logits = logits_of(self.policy, own, self.temperature, named)
            of_logits = self._of_logits(held, policy_logits.detach(), reference_logits, upstream[rows])
            del reference_logits
            of_states[rows], *of_weights = torch.autograd.grad(
                policy_logits, [own, *copies], of_logits, allow_unused=True
            )
            del policy_logits, of_logits
            for total, more in zip(sums, of_weights, strict=True):
                if more is not None:  # of another adapter, for instance
                    total += more
        yield of_states
        for total, weight in zip(sums, self.trained.values(), strict=True):
            yield total.to(weight.dtype)

    def _of_logits(self, held: Sequence[HeldLoss], policy: Tensor, reference: Tensor, upstream: Tensor) -> Tensor:
        """Of a slice, added up over the parts."""
        found = held[0].gradient(policy, reference, upstream[:, 0])
        for part, one in enumerate(held[1:], 1):
            found += one.gradient(policy, reference, upstream[:, part])
        return found

    def _autocast(self) -> AbstractContextManager[None]:
        """The precision of the forward pass, which a backward pass does not have by itself."""
        enabled = self.precision is not None
        context: AbstractContextManager[None] = torch.autocast(
            self.reference_states.device.type, dtype=self.precision, enabled=enabled
        )
        return context


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: HeadLoss, states: Tensor, *weights: Tensor) -> Tensor:
        ctx.work = work
        ctx.save_for_backward(states)
        return work.losses(states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.work.gradients(*ctx.saved_tensors, upstream)
