"""What the trainers share: divergences of completion tokens from the hidden states of two models, and their log.

Notation for shapes: ``B`` completions of this process, ``T`` completion tokens, padding included, ``H`` hidden size,
``P`` completion tokens that the policy drew, without padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import ProcessorMixin

from wpr.language_models import Module, check_split, is_peft
from wpr.ppo.distributed import is_sharded
from wpr.ppo.head_loss import loss_from_hidden
from wpr.ppo.parts import place_regularizer
from wpr.regularizers import Regularizer, Sum
from wpr.regularizers.spec import RegularizerSpec

_Trainer: Any = object  # one of TRL's stands behind it
AnyRegularizer = Regularizer | RegularizerSpec | str | Mapping[str, Any] | Sequence[Any]


class Measuring(_Trainer):  # type: ignore[misc]
    """A trainer that measures its model against another, and logs the divergences."""

    def _place(self, regularizer: AnyRegularizer, reference: Module) -> None:
        """On the reference's embeddings, as a sum; heads in the precision of TRL's own."""
        self._head_context = nullcontext if getattr(self.args, "cast_lm_head_to_fp32", 0) else self.accelerator.autocast
        placed = place_regularizer(regularizer, reference, self.accelerator)
        self.regularizer = placed if isinstance(placed, Sum) else Sum([(1.0, placed)])

    def _faults(self, policy: Module) -> dict[str, bool]:
        """What is true of a model that cannot be measured here."""
        check_split(policy)
        kind = policy.active_peft_config if is_peft(policy) else None
        images = isinstance(self.processing_class, ProcessorMixin)
        return {
            f"{type(policy).__name__} takes images; wpr.trl trains text models": images,
            "ZeRO-3 and FSDP hold weights in parts; use DDP or ZeRO-2": is_sharded(self.accelerator),
            f"{kind} trains prompts, not weights; use LoRA": kind is not None and kind.is_prompt_learning,
        }

    def _divergence(self, policy: Module, own: Tensor, reference: Module | None, other: Tensor) -> Tensor:
        """Of positions ``(P,)``, from hidden states ``(P, H)`` of both models; kept for the log, with each part's."""
        with self._head_context():
            parts = loss_from_hidden(
                self.regularizer, policy, own, reference, other,
                temperature=self.temperature, memory_mb=self.regularizer_memory_mb, by_part=True,
            ).float()  # fmt: skip
        divergence: Tensor = (parts * parts.new_tensor([weight for weight, _ in self.regularizer.parts])).sum(-1)
        self._measured = torch.cat([divergence.unsqueeze(0), parts.T]).detach()
        return divergence

    def _log_measured(self) -> None:
        """The last divergences; outside of the model's forward pass, since processes meet here."""
        names = ["divergence", *self.regularizer.labels]
        self._log_means(names, self._measured, "train" if self.model.training else "eval")

    def _log_means(self, names: Sequence[str], values: Tensor, mode: str) -> None:
        """Means of ``values`` (names, P) over the tokens of all processes, in TRL's log as ``regularizer/NAME``."""
        totals = torch.cat([values.sum(-1), values.new_tensor([values.shape[-1]])])
        *sums, count = self.accelerator.reduce(totals, reduction="sum").tolist()
        for name, total in zip(names, sums, strict=True):
            self._metrics[mode][f"regularizer/{name}"].append(total / max(count, 1))


def sequences(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Prompts with their completions, and which tokens are real, as a model takes them."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    return {"input_ids": ids, "attention_mask": torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)}


def drawn(batch: Mapping[str, Any]) -> Tensor:
    """Which completion tokens ``(B, T)`` the policy drew: no padding, no answers of tools."""
    mask: Tensor = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask


def states_before(output: Any, mask: Tensor) -> Tensor:
    """The last hidden states ``(P, H)`` that predict the completion tokens of a mask ``(B, T)``."""
    states: Tensor = output.last_hidden_state[:, -mask.shape[1] - 1 : -1][mask]
    return states
