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

from wpr.language_models import as_reference, hidden_states, pad, plain_model
from wpr.ppo.scoring import logits_in_slices, slice_count
from wpr.regularizers import Regularizer
from wpr.runs.responses import Response

LOGITS_MB = {"cpu": 64.0, "cuda": 1024.0}
"""Memory of one model's logits, in float32, that exist at a time: whole responses of a large vocabulary would fill all
of it.
"""


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
    policy: Any, reference: Any | None, answers: Sequence[Response], temperature: float = 1.0, batch_size: int = 8
) -> Iterator[Positions]:
    """Every token of every answer, a slice of logits at a time, both models on one device and without dropout.

    reference: None is the policy with its adapter off.
    temperature: of the distributions that are compared, a run's ``logprob_temperature``.
    """
    device = next(policy.parameters()).device
    vocabulary = plain_model(policy).config.get_text_config().vocab_size
    for first in range(0, len(answers), batch_size):
        batch = answers[first : first + batch_size]
        ids, mask = pad([[*one.prompt_ids, *one.response_ids] for one in batch], device=device)
        starts = torch.tensor([[len(one.prompt_ids)] for one in batch], device=device)
        in_response = mask.bool() & (torch.arange(ids.shape[1], device=device) >= starts)
        row, column = in_response.nonzero().unbind(-1)  # in order of answer, then of place
        before = row, column - 1  # the state before a token predicts it
        policy_states = hidden_states(policy.eval(), ids, mask)[before]
        with as_reference(policy, reference) as model:
            reference_states = hidden_states(model.eval(), ids, mask)[before]
        slices = slice_count(len(row), vocabulary, LOGITS_MB.get(device.type, LOGITS_MB["cuda"]), 4)
        for rows, *logits in logits_in_slices(policy, policy_states, reference, reference_states, slices, temperature):
            yield Positions(row[rows] + first, ids[in_response][rows], *(one.float() for one in logits))
            del logits


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
    answers: Sequence[Response],
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
