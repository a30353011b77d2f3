"""Policy and critic as one module, so that DDP, FSDP and DeepSpeed wrap and shard them like any model.

Notation for shapes: ``B`` responses, ``Q`` prompt tokens, ``L`` response tokens, ``T = Q + L``, ``P`` real response
tokens of the batch, ``H`` hidden size, ``V`` vocabulary.

Logits are computed for response positions only, and for one slice of them at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from wpr.language_models import adapter_off, hidden_states, is_peft, logits_of, plain_model, scalar_head, scores_at

Visit = Callable[[slice, Tensor, Tensor | None], None]
"""Called for each slice of positions with the policy's logits ``(p, V)`` and, where the reference is the policy
without its adapter, the reference's.
"""

WORKING_COPIES = 9
"""Float32 copies of one slice's logits that exist at a time: both models' logits and what is computed from them.
Measured on an H200, 2,048 positions of 49,152 tokens in bf16: 6.2, and 8.2 with a temperature other than 1. The
workspace of the Wasserstein solvers has a limit of its own (`transport.sinkhorn.chunk_size`).
"""


def positions_per_slice(vocabulary: int, budget_mb: float) -> int:
    """How many positions' logits fit the memory budget."""
    return max(1, int(budget_mb * 2**20 / (4 * WORKING_COPIES * vocabulary)))


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
        visit: Visit | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the response tokens and values of the states before them, ``(B, L)`` each, in float32.

        input_ids, attention_mask: ``(B, T)``; mask: ``(B, L)``, True on real response tokens.
        slices: in how many parts the logits are computed. Under sharding all processes must say the same.
        visit: if given, it is handed every slice's logits, at temperature 1, and log-probabilities are left to it
            (zeros are returned).
        """
        length = mask.shape[1]
        start = input_ids.shape[1] - length
        everything = hidden_states(self.policy, input_ids, attention_mask)
        states = everything[:, start - 1 : start - 1 + length]
        values = self._values(states, input_ids, attention_mask, start, length)
        chosen, tokens = states[mask], input_ids[:, start:][mask]
        log_probs = torch.zeros(mask.shape, device=mask.device)
        if visit is not None:
            self._visit(visit, chosen, slices, input_ids, attention_mask, mask)
        else:
            parts = [
                self._log_probs(chosen[rows], tokens[rows], temperature, recompute=slices > 1)
                for rows in slices_of(len(chosen), slices)
            ]
            log_probs = log_probs.masked_scatter(mask, torch.cat(parts))
        return log_probs, values

    def _values(self, states: Tensor, input_ids: Tensor, attention_mask: Tensor, start: int, length: int) -> Tensor:
        if hasattr(self, "value_head"):
            return self.value_head(states.to(self.value_head.weight.dtype)).squeeze(-1).float()  # type: ignore[no-any-return]
        critic_states = hidden_states(self.critic, input_ids, attention_mask)
        return scores_at(self.critic, critic_states[:, start - 1 : start - 1 + length])

    def _log_probs(self, states: Tensor, tokens: Tensor, temperature: float, recompute: bool) -> Tensor:
        """Of the tokens ``(p,)``. With several slices, logits are computed again in the backward pass, not kept."""

        def compute(states: Tensor) -> Tensor:
            logits = logits_of(self.policy, states).float() / temperature
            return -cross_entropy(logits, tokens, reduction="none")

        if recompute and torch.is_grad_enabled():
            return checkpoint(compute, states, use_reentrant=False)  # type: ignore[no-any-return]
        return compute(states)

    def _visit(
        self, visit: Visit, states: Tensor, slices: int, input_ids: Tensor, attention_mask: Tensor, mask: Tensor
    ) -> None:
        reference = None
        if self.own_reference:
            length = mask.shape[1]
            start = input_ids.shape[1] - length
            with adapter_off(self.policy):
                everything = hidden_states(self.policy, input_ids, attention_mask)
            reference = everything[:, start - 1 : start - 1 + length][mask]
        for rows in slices_of(len(states), slices):
            logits = logits_of(self.policy, states[rows])
            reference_logits = None
            if reference is not None:
                with adapter_off(self.policy):
                    reference_logits = logits_of(self.policy, reference[rows])
            visit(rows, logits, reference_logits)

    own_reference = False
    """Whether the reference is the policy with its adapter off."""

    def generate(self, *args: Any, **kwargs: Any) -> Tensor:
        """The policy's ``generate``; through this module, so that FSDP gathers what is sharded here."""
        return self.policy.generate(*args, **kwargs)  # type: ignore[no-any-return]

    @property
    def parts(self) -> Iterator[Any]:
        """The transformers models in here."""
        yield self.policy
        if hasattr(self, "critic"):
            yield self.critic

    # What the Trainer, accelerate and DeepSpeed ask a transformers model for.

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

    def get_input_embeddings(self) -> nn.Module:
        return plain_model(self.policy).get_input_embeddings()  # type: ignore[no-any-return]

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        for part in self.parts:
            if is_peft(part):  # the frozen input embeddings start the graph
                plain_model(part).enable_input_require_grads()
            plain_model(part).gradient_checkpointing_enable(**options)

    def gradient_checkpointing_disable(self) -> None:
        for part in self.parts:
            plain_model(part).gradient_checkpointing_disable()


def slices_of(count: int, slices: int) -> Iterator[slice]:
    """``slices`` contiguous parts of ``count`` positions, as equal as can be; some are empty if there are more parts
    than positions.
    """
    bounds = [math.floor(count * part / slices) for part in range(slices + 1)]
    for start, stop in pairwise(bounds):
        yield slice(start, stop)
