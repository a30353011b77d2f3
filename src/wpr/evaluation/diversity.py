"""How unlike one another a policy's responses are: distinct n-grams, self-BLEU, spread of mean embeddings.

A policy that has found one way to please its reward says it to every prompt. Scores do not show that; these do. None
of the measures is comparable between sets of different size or length: compare policies on the same prompts.

Words are found by one rule (`words`): lower case; a word is a run of letters, digits and underscores, apostrophes
within it included; every other character that is no white space is a word of its own.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ORDERS = (1, 2, 3, 4)
"""The n-grams of BLEU-4."""

COMPARED = 256
"""Responses that self-BLEU compares. More responses find more matches in one another, so a fixed number of them is also
what makes two policies comparable.
"""

_WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")


def diversity(responses: Sequence[str]) -> dict[str, float]:
    """``distinct_1``, ``distinct_2``, ``distinct_3`` and ``self_bleu``, which is left out for a single response."""
    found = {f"distinct_{n}": distinct(responses, n) for n in (1, 2, 3)}
    return found | ({"self_bleu": self_bleu(responses)} if len(responses) > 1 else {})


def words(text: str) -> list[str]:
    """The words of a text, by the rule that the module states."""
    return _WORD.findall(text.lower())


def distinct(responses: Sequence[str], n: int) -> float:
    """Different n-grams over all n-grams of all responses together; n-grams end where a response does.

    1 if nothing is said twice. 0 if no response has ``n`` words: who says nothing does not say different things.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    _refuse_too_few(len(responses), 1, "responses")
    counts: Counter[tuple[str, ...]] = Counter()
    for response in responses:
        counts.update(_ngrams(words(response), n))
    return len(counts) / counts.total() if counts else 0.0


def self_bleu(responses: Sequence[str], limit: int = COMPARED, seed: int = 0) -> float:
    """Mean over the responses of the BLEU-4 of each against all others: 1 if all are alike, near 0 if they share
    nothing.

    limit: so many responses are drawn without replacement, by ``seed``, if there are more. The same positions are
        drawn from every list of the same length.

    BLEU of one response is BP * exp(mean_n log precision_n) over n = 1..4, or up to its length if that is shorter. A
    precision counts an n-gram at most as often as one other response has it. BP = exp(1 - r / c) where its length c is
    below that of the other response of nearest length r (of two, the shorter). Without any matching word BLEU is 0.
    Where longer n-grams have no match, the first such precision is 1/2 of one match, the next 1/4, and so on
    (the exponential smoothing of mteval). An empty response is 1 if another one is empty, else 0.
    """
    _refuse_too_few(len(responses), 2, "responses to compare with one another")
    if limit < 2:
        raise ValueError(f"limit={limit} must be at least 2, to leave responses to compare")
    if len(responses) > limit:
        chosen = sorted(random.Random(seed).sample(range(len(responses)), limit))
        responses = [responses[i] for i in chosen]
    tokens = [words(response) for response in responses]
    lengths = [len(row) for row in tokens]
    grams = [[Counter(_ngrams(row, n)) for row in tokens] for n in ORDERS]
    others = [_most_elsewhere(counts) for counts in grams]
    ordered = sorted(lengths)
    total = 0.0
    for i, length in enumerate(lengths):
        if not length:
            total += float(lengths.count(0) > 1)
            continue
        matches = [
            sum(min(count, elsewhere[gram].without(i)) for gram, count in counts[i].items())
            for counts, elsewhere in zip(grams, others, strict=True)
        ]
        total += _bleu(matches, length, _nearest_other(ordered, length))
    return total / len(lengths)


@torch.no_grad()
def embedding_spread(responses: Sequence[str], tokenizer: Any, embedding: Tensor) -> float:
    """Mean over all pairs of responses of the cosine distance between their mean token embeddings.

    tokenizer: of the model that ``embedding`` ``(V, d)`` belongs to; special tokens are not added.

    0 if all responses say the same, in whatever order of words. Token embeddings have much in common, so typical values
    are far below 1; they mean something beside those of another policy under the same embedding. Responses without
    tokens have no direction and are left out.
    """
    rows = [tokenizer(response, add_special_tokens=False)["input_ids"] for response in responses]
    rows = [row for row in rows if row]
    _refuse_too_few(len(rows), 2, "responses with tokens")
    table = embedding.detach()
    means = torch.stack([table[torch.tensor(row, device=table.device)].double().mean(0) for row in rows])
    units = torch.nn.functional.normalize(means, dim=-1)
    # The sum of <u_i, u_j> over all i and j, less those with i = j.
    alike = units.sum(0).square().sum() - units.square().sum()
    return 1 - float(alike) / (len(rows) * (len(rows) - 1))


@dataclass
class _Most:
    """The largest count of an n-gram in any response, whose that is, and the largest in any other response."""

    count: int
    holder: int
    second: int = 0

    def without(self, response: int) -> int:
        return self.second if response == self.holder else self.count


def _most_elsewhere(counts: Sequence[Mapping[tuple[str, ...], int]]) -> dict[tuple[str, ...], _Most]:
    """For every n-gram, how often one response has it at most: one pass, where comparing all pairs would take many."""
    found: dict[tuple[str, ...], _Most] = {}
    for i, row in enumerate(counts):
        for gram, count in row.items():
            most = found.get(gram)
            if most is None:
                found[gram] = _Most(count, i)
            elif count > most.count:
                found[gram] = _Most(count, i, most.count)
            else:
                most.second = max(most.second, count)
    return found


def _bleu(matches: Sequence[int], length: int, reference_length: int) -> float:
    """BLEU of one response from its clipped matches of each order; see `self_bleu`."""
    if not matches[0]:
        return 0.0
    possible = [length - n + 1 for n in ORDERS if length >= n]
    log_precision, missing = 0.0, 0
    for found, all_of_them in zip(matches, possible, strict=False):
        missing += not found
        log_precision += math.log((found or 0.5**missing) / all_of_them)
    brevity = min(0.0, 1 - reference_length / length)
    return math.exp(brevity + log_precision / len(possible))


def _nearest_other(ordered: Sequence[int], length: int) -> int:
    """The length in ``ordered`` nearest to ``length``, one entry equal to it left out; of two, the shorter."""
    place = bisect_left(ordered, length)
    around = [ordered[k] for k in (place - 1, place + 1) if 0 <= k < len(ordered)]
    return min(around, key=lambda other: (abs(other - length), other))


def _ngrams(tokens: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def _refuse_too_few(count: int, least: int, what: str) -> None:
    if count < least:
        raise ValueError(f"{count} {what}; at least {least} are needed: pass more responses")
