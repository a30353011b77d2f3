"""Policy and critic as one module, so that DDP, FSDP and DeepSpeed wrap and shard them like any model.

Notation for shapes: ``B`` responses, ``Q`` prompt tokens, ``L`` response tokens, ``T = Q + L``, ``P`` real response
tokens of the batch, ``H`` hidden size, ``V`` vocabulary.

Logits are computed for response positions only, and for one slice of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from wpr.language_models import (
    as_reference,
    is_peft,
    logits_of,
    plain_model,
    scalar_head,
    scores_at,
    states_before,
)
from wpr.ppo.scoring import PositionScorer, logits_in_slices, slices_of


class ActorCritic(nn.Module):
    """A causal LM and a critic: a sequence classifier read at every position, or a linear head on the policy's
    states.
    """

    def __init__(self, policy: Any, critic: Any | None) -> None:
        """``critic=None`` shares the policy's backbone: a linear value head on its last hidden states, initially 0."""
        super().__init__()
        self.policy = policy
        if critic is not None:
            scalar_head(critic)
            self.critic = critic
        else:
            size = plain_model(policy).config.get_text_config().hidden_size
            self.value_head = nn.Linear(size, 1)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
            self.value_head.to(plain_model(policy).device)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        mask: Tensor,
        temperature: float = 1.0,
        slices: int = 1,
        scorer: PositionScorer | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Log-probabilities of the response tokens and values of the states before them, ``(B, L)`` each, in float32.

        input_ids, attention_mask: ``(B, T)``; mask: ``(B, L)``, True on real response tokens.
        temperature: of the policy's distribution, and of the reference's.
        slices: in how many parts the logits are computed. Under sharding all processes must say the same.
        scorer: if given, it gets the logits of policy and reference, and what it makes of them takes the place of the
            log-probabilities: None is returned for them.
        """
        length = mask.shape[1]
        states = states_before(self.policy, input_ids, attention_mask, length)
        values = self._values(states, input_ids, attention_mask)
        chosen, tokens = states[mask], input_ids[:, -length:][mask]
        if scorer is not None:
            with as_reference(self.policy, scorer.reference) as model:
                reference = states_before(model, input_ids, attention_mask, length)[mask]
            for rows, policy_logits, reference_logits in logits_in_slices(
                self.policy, chosen, scorer.reference, reference, slices, temperature
            ):
                scorer.add(tokens[rows], policy_logits, reference_logits)
                del policy_logits, reference_logits
            return None, values
        parts = [
            self._log_probs(chosen[rows], tokens[rows], temperature, recompute=slices > 1)
            for rows in slices_of(len(chosen), slices)
        ]
        return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, torch.cat(parts)), values

    def _values(self, states: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        if hasattr(self, "value_head"):
            return self.value_head(states.to(self.value_head.weight.dtype)).squeeze(-1).float()  # type: ignore[no-any-return]
        return scores_at(self.critic, states_before(self.critic, input_ids, attention_mask, states.shape[1]))

    def _log_probs(self, states: Tensor, tokens: Tensor, temperature: float, recompute: bool) -> Tensor:
        """Of the tokens ``(p,)``. With several slices, logits are computed again in the backward pass, not kept."""

        def compute(states: Tensor) -> Tensor:
            return -cross_entropy(logits_of(self.policy, states, temperature).float(), tokens, reduction="none")

        if recompute and torch.is_grad_enabled():
            return checkpoint(compute, states, use_reentrant=False)  # type: ignore[no-any-return]
        return compute(states)

    def generate(self, *args: Any, **kwargs: Any) -> Tensor:
        """The policy's ``generate``; through this module, so that FSDP gathers what is sharded here."""
        return self.policy.generate(*args, **kwargs)  # type: ignore[no-any-return]

    @property
    def parts(self) -> Iterator[Any]:
        """The transformers models in here."""
        yield self.policy
        if hasattr(self, "critic"):
            yield self.critic

    # What the Trainer, accelerate and DeepSpeed ask a transformers model for. Not get_input_embeddings: accelerate
    # would give them an FSDP unit of their own, and torch refuses it where the head is tied to them.

    @property
    def config(self) -> Any:
        return plain_model(self.policy).config

    @property
    def generation_config(self) -> Any:
        return plain_model(self.policy).generation_config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def _no_split_modules(self) -> list[str]:
        return sorted({name for part in self.parts for name in plain_model(part)._no_split_modules or ()})

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        for part in self.parts:
            if is_peft(part):  # the frozen input embeddings start the graph
                plain_model(part).enable_input_require_grads()
            plain_model(part).gradient_checkpointing_enable(**options)

    def gradient_checkpointing_disable(self) -> None:
        for part in self.parts:
            plain_model(part).gradient_checkpointing_disable()
