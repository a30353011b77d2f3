"""How well a word stands in a text in place of another: by a sentence encoder, and by a language model.

Notation for shapes: ``P`` positions, ``n`` support entries, ``B`` texts, ``H`` hidden size.

    similarity    cosine of the encoder's vectors of the text with the other word and of the original text
    nll           -log p(word | text before it), the sum over the tokens that the model's own tokenizer makes of it

Both judges are independent of the model whose words are judged if they are other models than that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wpr.analysis.word_positions import WordPositions, opening_of
from wpr.evaluation.encoders import TextEncoder
from wpr.language_models import logits_of, pad, plain_model


def similarities(words: WordPositions, wanted: Tensor, encoder: TextEncoder) -> Tensor:
    """Similarity of the wanted entries ``(P, n)`` to the original: ``(P, n)`` float64, NaN for others."""
    pairs = wanted.nonzero().tolist()
    originals = encoder([position.with_word(position.word) for position in words.positions])
    others = encoder([words.positions[p].with_word(words.word(p, entry)) for p, entry in pairs])
    found = torch.full(wanted.shape, torch.nan, dtype=torch.float64)
    for (p, entry), vector in zip(pairs, others, strict=True):
        found[p, entry] = float(vector.double() @ originals[p].double())
    return found


@torch.no_grad()
def word_nll(words: WordPositions, wanted: Tensor, model: Any, tokenizer: Any) -> Tensor:
    """Negative log-likelihood of the wanted entries ``(P, n)`` under a language model, in nats: ``(P, n)``, NaN for
    others. Where a word changes how the text before it is cut into tokens, those tokens count too.
    """
    opening = opening_of(tokenizer)
    found = torch.full(wanted.shape, torch.nan, dtype=torch.float64)
    for p, position in enumerate(words.positions):
        entries = wanted[p].nonzero().squeeze(-1).tolist()
        if not entries:
            continue
        texts = [position.context, *(position.context + words.word(p, entry) for entry in entries)]
        start, *rows = ([*opening, *ids] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
        for entry, nll in zip(entries, _nll_beyond(model, start, rows), strict=True):
            found[p, entry] = nll
    return found


def _nll_beyond(model: Any, start: list[int], rows: Sequence[list[int]]) -> list[float]:
    """Of each row the negative log-likelihood of its tokens after those that all rows share with ``start``."""
    shared = max(1, min(_common(start, row) for row in rows))  # the first token has nothing before it
    device = next(model.parameters()).device
    body = plain_model(model).base_model
    before = body(input_ids=torch.tensor([rows[0][:shared]], device=device), use_cache=True)
    cache = before.past_key_values
    cache.batch_repeat_interleave(len(rows))  # what they share is read once
    targets, mask = pad([row[shared:] for row in rows], device=device)
    seen = torch.cat([mask.new_ones(len(rows), shared), mask], -1)
    after = body(input_ids=targets, attention_mask=seen, past_key_values=cache).last_hidden_state
    states = torch.cat([before.last_hidden_state[:, -1:].expand(len(rows), 1, -1), after[:, :-1]], 1)
    real = mask.bool()
    logs = logits_of(model, states[real]).double().log_softmax(-1).gather(-1, targets[real].unsqueeze(-1)).squeeze(-1)
    nll = torch.zeros(targets.shape, dtype=torch.float64, device=device)
    nll[real] = -logs
    return [float(value) for value in nll.sum(-1)]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two sequences begin with alike; less than all of the second, whose last token is always judged."""
    most = min(len(one), len(other) - 1)
    return next((index for index in range(most) if one[index] != other[index]), most)
