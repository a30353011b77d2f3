"""TRL's on-policy distillation by any regularizer: its divergence D_t of student and teacher in the place of TRL's own.

Notation for shapes: ``H`` hidden size, ``P`` completion tokens that the student drew, without padding.
"""

from __future__ import annotations

from typing import Any

import torch
import trl
from torch import Tensor

from wpr.language_models import Module, evaluating, plain_model
from wpr.ppo.measures import token_statistics
from wpr.ppo.scoring import logits_in_slices, slice_count
from wpr.regularizers.spec import RECOMMENDED
from wpr.trl.measuring import AnyRegularizer, Measuring, drawn, sequences, states_before
from wpr.trl_settings import liger, refuse


class DistillationTrainer(Measuring, trl.DistillationTrainer):  # type: ignore[misc]
    """TRL's on-policy `DistillationTrainer`, whose loss is a regularizer's divergence of student and teacher in the
    place of TRL's own. ``regularizer`` and ``regularizer_memory_mb`` are as of `Regularized`; costs between tokens come
    from the teacher's embeddings.
    """

    def __init__(
        self,
        model: Any,
        teacher_model: Any = None,
        args: Any = None,
        *others: Any,
        regularizer: AnyRegularizer = RECOMMENDED,
        regularizer_memory_mb: float = 256.0,
        **options: Any,
    ) -> None:
        self.regularizer_memory_mb = regularizer_memory_mb
        refuse({"teacher_model=None leaves nothing to measure; pass a model or its name": teacher_model is None})
        if args is not None:  # before a model is loaded
            chosen = (
                f"beta={args.beta} of {type(args).__name__} chooses TRL's divergence, which the regularizer replaces; "
                "leave it out, and set regularizer: 'reverse-kl' (TRL's 1.0), 'forward-kl' (0.0) or another"
            )
            refuse(liger(args) | {chosen: args.beta != trl.DistillationConfig.beta})
        super().__init__(model, teacher_model, args, *others, **options)
        student, teacher = map(self.accelerator.unwrap_model, (self.model, self.teacher_model))
        refuse(self._faults(student) | self._faults(teacher))
        self._place(regularizer, teacher)

    def compute_loss(self, *given: Any, **options: Any) -> Any:
        """TRL's, with the divergences in the log."""
        loss = super().compute_loss(*given, **options)
        self._log_measured()
        return loss

    def _compute_loss(self, student: Module, inputs: Any, count: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The mean divergence over completion tokens (of all, by their ``count``), the student's entropies summed, and
        how many tokens these are.
        """
        mask, teacher = drawn(inputs), self.accelerator.unwrap_model(self.teacher_model)
        given = {**sequences(inputs), "use_cache": False}
        with self.accelerator.autocast():
            own = states_before(plain_model(student).base_model(**given), mask)
            with torch.no_grad(), evaluating(teacher):
                other = states_before(plain_model(teacher).base_model(**given), mask)

        divergence, tokens = self._divergence(student, own, teacher, other), mask.sum()
        entropy = self._entropy(student, own.detach(), teacher, other)
        return divergence.sum() / (tokens.clamp(min=1) if count is None else count), entropy.sum(), tokens

    @torch.no_grad()
    def _entropy(self, student: Module, own: Tensor, teacher: Module, other: Tensor) -> Tensor:
        """The student's, of positions ``(P,)``, for TRL's log."""
        vocabulary = len(plain_model(student).get_output_embeddings().weight)
        slices = slice_count(len(own), vocabulary, self.regularizer_memory_mb, 8)
        found, given = [torch.zeros(0, device=own.device)], (student, own, teacher, other, slices, self.temperature)
        with self._head_context():
            for _, student_logits, teacher_logits in logits_in_slices(*given):
                any_tokens = torch.zeros(len(student_logits), dtype=torch.long, device=own.device)
                found.append(token_statistics(student_logits, teacher_logits, any_tokens)[2])
        return torch.cat(found)
