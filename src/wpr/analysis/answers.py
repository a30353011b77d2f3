"""Responses under two models, token by token: the positions that penalties, coherence and the solver are measured at.

Notation for shapes: ``B`` responses of a batch, ``T`` tokens, ``p`` positions of a slice, ``P`` of all, ``V``
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wpr.language_models import hidden_states, logits_of
from wpr.regularizers import Regularizer
from wpr.runs.responses import Answer

NUMBERS_AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Logits of one model that exist at a time: whole responses of a large vocabulary would fill the memory."""


@dataclass(frozen=True)
class Positions:
    """A slice of response positions under two models.

    answer: ``(p,)`` which of the answers. tokens: ``(p,)`` what was drawn. policy, reference: ``(p, V)`` logits.
    """

    answer: Tensor
    tokens: Tensor
    policy: Tensor
    reference: Tensor


@torch.no_grad()
def positions(
    policy: Any, reference: Any, answers: Sequence[Answer], temperature: float = 1.0, batch_size: int = 8
) -> Iterator[Positions]:
    """Every token of every answer, a slice of logits at a time, both models on one device and without dropout.

    temperature: of the distributions that are compared, a run's ``logprob_temperature``.
    """
    device = next(policy.parameters()).device
    budget = NUMBERS_AT_ONCE.get(device.type, NUMBERS_AT_ONCE["cuda"])
    for first in range(0, len(answers), batch_size):
        batch = answers[first : first + batch_size]
        ids, mask, wanted = _padded(batch, device)
        states = [hidden_states(model.eval(), ids, mask) for model in (policy, reference)]
        row, column = wanted.nonzero().unbind(-1)  # in order of answer, then of place
        step = max(1, budget // policy.config.get_text_config().vocab_size)
        for part in torch.arange(len(row), device=device).split(step):
            rows, columns = row[part], column[part]
            # The state before a token predicts it.
            logits = [
                logits_of(model, state[rows, columns - 1]).float() / temperature
                for model, state in zip((policy, reference), states, strict=True)
            ]
            yield Positions(rows + first, ids[rows, columns], *logits)


def _padded(batch: Sequence[Answer], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, which of them are real, and which belong to a response: three ``(B, T)``."""
    longest = max(len(one.prompt_ids) + len(one.response_ids) for one in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask, wanted = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, one in enumerate(batch):
        start, end = len(one.prompt_ids), len(one.prompt_ids) + len(one.response_ids)
        ids[row, :end] = torch.tensor([*one.prompt_ids, *one.response_ids])
        mask[row, :end] = 1
        wanted[row, start:end] = True
    return ids.to(device), mask.to(device), wanted.to(device)


@dataclass(frozen=True)
class TokenPenalties:
    """Penalties of the drawn tokens and divergences of their positions, ``(P,)`` each on the CPU, by regularizer.

    answer: ``(P,)`` which of the answers a token belongs to.
    """

    answer: Tensor
    penalty: dict[str, Tensor]
    divergence: dict[str, Tensor]

    def joined(self, other: TokenPenalties) -> TokenPenalties:
        """These and those of other regularizers at the same tokens."""
        return TokenPenalties(self.answer, self.penalty | other.penalty, self.divergence | other.divergence)

    def means(self, values: Tensor, answers: int) -> Tensor:
        """Means over the tokens of each of ``answers`` answers; NaN for one without tokens."""
        sums = torch.zeros(answers, dtype=torch.float64).index_add_(0, self.answer, values.double())
        return sums / torch.bincount(self.answer, minlength=answers)


@torch.no_grad()
def token_penalties(
    policy: Any,
    reference: Any,
    answers: Sequence[Answer],
    regularizers: Mapping[str, Regularizer],
    temperature: float = 1.0,
    batch_size: int = 8,
) -> TokenPenalties:
    """What each regularizer says of every token of the policy's answers."""
    where: list[Tensor] = []
    penalty: dict[str, list[Tensor]] = {name: [] for name in regularizers}
    divergence: dict[str, list[Tensor]] = {name: [] for name in regularizers}
    for part in positions(policy, reference, answers, temperature, batch_size):
        where.append(part.answer.cpu())
        for name, regularizer in regularizers.items():
            out = regularizer(part.policy, part.reference, part.tokens)
            penalty[name].append(out.penalty.cpu())
            divergence[name].append(out.divergence.cpu())
    if not where:
        raise ValueError(
            "there are no response tokens to measure: all responses are empty; look at ppo/POLICY/responses.jsonl"
        )
    joined = ({name: torch.cat(parts) for name, parts in found.items()} for found in (penalty, divergence))
    return TokenPenalties(torch.cat(where), *joined)
