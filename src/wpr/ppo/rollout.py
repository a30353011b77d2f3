"""What one rollout holds: prompts, responses, and what the models say of every response token.

Notation for shapes: ``B`` responses, ``Q`` prompt tokens (padded on the left), ``L`` response tokens (padded on the
right), ``T = Q + L``. Response token t stands at index ``Q + t`` and is predicted from the state at index ``Q + t -
1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wpr.ppo.config import PPOConfig

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Prompts:
    """Tokens of prompts, padded on the left.

    input_ids, attention_mask: ``(B, Q)``.
    """

    input_ids: Tensor
    attention_mask: Tensor

    def repeat(self, times: int) -> Prompts:
        """Every prompt so many times in a row."""
        return Prompts(self.input_ids.repeat_interleave(times, 0), self.attention_mask.repeat_interleave(times, 0))

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class Responses:
    """Tokens of responses, padded on the right.

    tokens: ``(B, L)``; what stands on padding has no meaning.
    mask: ``(B, L)`` True on real tokens. The end-of-sequence token is real.
    finished: ``(B,)`` whether the response ended by itself, rather than at the maximum length.
    log_probs: ``(B, L)`` of the tokens at temperature 1, as another engine computed them: to be compared with those of
        the policy, never to be learned from. None: the policy itself drew.
    """

    tokens: Tensor
    mask: Tensor
    finished: Tensor
    log_probs: Tensor | None = None


def responses_from_tokens(tokens: Tensor, eos: Sequence[int]) -> Responses:
    """What of ``tokens`` ``(B, L)``, as a generation loop leaves them, is real: all up to and with the first
    end-of-sequence token.

    The padding token is never looked at: it may equal the end-of-sequence token, or be sampled by the model.
    """
    ends = torch.isin(tokens, torch.tensor(list(eos), dtype=tokens.dtype, device=tokens.device))
    before = ends.long().cumsum(-1) - ends.long()  # ends strictly before this token
    return Responses(tokens, before == 0, ends.any(-1))


@dataclass(frozen=True)
class Rollout:
    """Sequences and what PPO learns from; all that has to survive from generation to the last update.

    input_ids, attention_mask: ``(B, T)``.
    mask: ``(B, L)`` True on real response tokens.
    log_probs: ``(B, L)`` of the tokens under the policy that sampled them.
    values, advantages, returns: ``(B, L)``.
    """

    input_ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    def take(self, rows: Tensor) -> Rollout:
        """Some responses, with the columns cut off that are padding in all of them."""
        parts = {field.name: getattr(self, field.name)[rows] for field in fields(self)}
        ids, attention_mask, mask = trim(parts["input_ids"], parts["attention_mask"], parts["mask"])
        kept = {name: parts[name][:, : mask.shape[1]] for name in ("log_probs", "values", "advantages", "returns")}
        return Rollout(ids, attention_mask, mask, **kept)

    def state_dict(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name).cpu() for field in fields(self)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor], device: torch.device) -> Rollout:
        return cls(**{name: tensor.to(device) for name, tensor in state.items()})


def trim(input_ids: Tensor, attention_mask: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences ``(B, T)``, ``(B, T)`` and their response mask ``(B, L)`` without the columns that are padding in every
    row. One column of prompt and one of response are always left.
    """
    prompt_length = input_ids.shape[1] - mask.shape[1]
    real = attention_mask[:, :prompt_length].bool().any(0).nonzero()
    first = int(real[0]) if len(real) else prompt_length - 1
    length = max(1, int(mask.sum(-1).max())) if len(mask) else 1
    columns = slice(first, prompt_length + length)
    return input_ids[:, columns], attention_mask[:, columns], mask[:, :length]


def join(prompts: Prompts, responses: Responses) -> tuple[Tensor, Tensor]:
    """Prompt and response as one sequence: ids and attention mask ``(B, T)``. Padding holds token 0, which nobody
    sees.
    """
    tokens = responses.tokens.masked_fill(~responses.mask, 0)
    mask = torch.cat([prompts.attention_mask.long(), responses.mask.long()], -1)
    return torch.cat([prompts.input_ids, tokens], -1), mask


def last_token(prompt_length: int, mask: Tensor) -> Tensor:
    """Index in the joined sequence of each row's last real token ``(B,)``: the prompt's last for an empty response."""
    return prompt_length - 1 + mask.sum(-1)


def minibatch_rows(number: int, config: PPOConfig, processes: int, process: int, seed: Sequence[int]) -> IntArray:
    """Responses of this process that micro-batch ``number`` of a rollout learns from.

    Of every ``num_minibatches`` consecutive responses of the *global* batch, each minibatch gets one, drawn again in
    each pass: so a step learns from the same responses however many processes share them.
    """
    parts, accumulation = config.num_minibatches, config.gradient_accumulation_steps
    passes, within = divmod(number, parts * accumulation)
    minibatch, micro_batch = divmod(within, accumulation)
    here = config.responses_per_device // parts  # groups of this process
    groups = np.tile(np.arange(parts), (here * processes, 1))
    drawn = np.random.default_rng([*seed, passes]).permuted(groups, axis=1)
    own: IntArray = drawn[process * here :][:here, minibatch] + parts * np.arange(here)
    start = micro_batch * config.per_device_train_batch_size
    return own[start : start + config.per_device_train_batch_size]
