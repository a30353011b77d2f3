"""What a policy writes instead of a forbidden word: in its responses, and by its probabilities.

Notation for shapes: ``P`` positions, ``V`` vocabulary, ``T`` tokens.

`written_words` reads responses. A response keeps more of the meaning if a policy changes fewer words, or if it finds
better ones, and these are told apart:

    others_kept   share of a sentence's words that are not forbidden and stay
    one_word      the sentence with nothing changed but one forbidden word, in whose place stands what the policy wrote:
                  how much of its meaning is left, in the mean over all such words (sentence and response are aligned
                  word by word; words that were left out or rephrased do not count)

`expected_words` draws nothing. The policy is given a sentence as it stands, up to a forbidden word, and

    forbidden     is the probability that it gives to forbidden words there
    expected      how much of the meaning is left in the sentence with another word in that place, in the mean over the
                  `LIKELIEST` single-token words that are not forbidden, weighted by their probabilities

so that policies are compared at the same positions, by what each would write there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wpr.data import Encoder
from wpr.data.rows import Row
from wpr.language_models import hidden_states, logits_of, pad
from wpr.recipes.rewrite import WORD_START
from wpr.report.replaced_words import Rewrite
from wpr.rewards.words import WordTable, find_words
from wpr.runs.responses import Response

LIKELIEST = 8
BATCH = 64

Vectors = Callable[[Sequence[str]], Sequence[Tensor]]
"""Texts to unit vectors, one each."""


def remembered(encoder: Callable[[Sequence[str]], Tensor]) -> Vectors:
    """An encoder that is asked about each text once."""
    known: dict[str, Tensor] = {}

    def vectors(texts: Sequence[str]) -> list[Tensor]:
        new = sorted({text for text in texts if text not in known}, key=len)
        for start in range(0, len(new), BATCH):
            part = new[start : start + BATCH]
            known.update(zip(part, encoder(part), strict=True))
        return [known[text] for text in texts]

    return vectors


def written_words(responses: Iterable[Response], forbidden: WordTable, vectors: Vectors) -> dict[str, float]:
    """``one_word`` and ``others_kept`` of responses to sentences, the column ``source``; NaN where there is none."""
    originals: list[str] = []
    changed: list[str] = []
    kept = others = 0
    for row in responses:
        source = str(row.columns["source"])
        rewrite, entries = Rewrite(source, row.response.strip()), forbidden.find(source)
        free = set(range(len(list(find_words(source))))).difference(*(range(first, last) for _, first, last in entries))
        others += len(free)
        kept += len(free & rewrite.kept)
        for (start, end), outcome in zip(_spans(source, forbidden), rewrite.outcomes(forbidden), strict=False):
            if outcome.what == "replaced":
                originals.append(source)
                changed.append(Place(source, start, end, []).with_word(outcome.instead))
    return {
        "one_word": _mean(_similarities(originals, changed, vectors)),
        "others_kept": kept / others if others else float("nan"),
    }


@dataclass(frozen=True)
class Place:
    """A forbidden word of a sentence, from ``start`` to ``end``. before: tokens of the prompt and up to the word."""

    source: str
    start: int
    end: int
    before: list[int]

    def with_word(self, word: str) -> str:
        """The sentence with another word there."""
        return self.source[: self.start] + word + self.source[self.end :]


def find_places(encoder: Encoder, responses: Iterable[Response], forbidden: WordTable) -> list[Place]:
    """Forbidden words of the sentences that responses are to, but for the first word and those inside of a token."""
    found = []
    for row in responses:
        source = str(row.columns["source"])
        prompt, (ids,) = encoder.encode(Row(row.prompt if isinstance(row.prompt, str) else tuple(row.prompt)), [source])
        for start, end in _spans(source, forbidden):
            count = _tokens_before(encoder.tokenizer, ids[:-1], source, start)
            if count is not None:
                found.append(Place(source, start, end, [*prompt, *ids[:count]]))
    return sorted(found, key=lambda place: len(place.before))  # alike in length: little padding


@torch.no_grad()
def expected_words(
    model: Any, encoder: Encoder, responses: Iterable[Response], forbidden: WordTable, vectors: Vectors
) -> dict[str, float]:
    """``expected`` and ``forbidden`` at the `find_places`; NaN where there is none."""
    words = _words_of_tokens(encoder.tokenizer, model.get_output_embeddings().weight.shape[0])
    barred = torch.tensor([bool(word) and bool(forbidden.find(word)) for word in words])
    allowed = torch.tensor([bool(word) for word in words]) & ~barred
    mass: list[float] = []
    expected: list[float] = []
    places = find_places(encoder, responses, forbidden)
    for start in range(0, len(places), BATCH):
        part = places[start : start + BATCH]
        probabilities = _next_probabilities(model, [place.before for place in part])
        mass += (probabilities * barred).sum(-1).tolist()
        likeliest = (probabilities * allowed).topk(LIKELIEST)
        shares = likeliest.values / likeliest.values.sum(-1, keepdim=True)
        for place, tokens, share in zip(part, likeliest.indices.tolist(), shares, strict=True):
            changed = [place.with_word(words[token]) for token in tokens]
            similar = _similarities([place.source] * LIKELIEST, changed, vectors)
            expected.append(float(share @ torch.tensor(similar)))
    return {"expected": _mean(expected), "forbidden": _mean(mass)}


def _words_of_tokens(tokenizer: Any, count: int) -> list[str]:
    """Of each token the word that it is after a space, or nothing."""
    names = [name or "" for name in tokenizer.convert_ids_to_tokens(range(count))]  # the tokenizer may have fewer
    return [name[1:] if name[:1] in WORD_START and name[1:].isascii() and name[1:].isalpha() else "" for name in names]


def _next_probabilities(model: Any, rows: Sequence[list[int]]) -> Tensor:
    """Of the token after each row ``(P, V)``."""
    ids, mask = pad(rows, device=model.device)
    states = hidden_states(model, ids, mask)[torch.arange(len(rows)), mask.sum(-1) - 1]
    return logits_of(model, states).float().softmax(-1).cpu()


def _spans(source: str, forbidden: WordTable) -> list[tuple[int, int]]:
    """Where forbidden words begin and end in a sentence."""
    spans = [word.span() for word in find_words(source)]
    return [(spans[first][0], spans[last - 1][1]) for _, first, last in forbidden.find(source)]


def _tokens_before(tokenizer: Any, ids: Sequence[int], source: str, start: int) -> int | None:
    """How many tokens of a sentence stand before the word at ``start``; None where tokens do not end there, and for the
    first word, which other tokens begin.
    """
    for count in range(1, len(ids)):
        text = tokenizer.decode(ids[:count])
        if text.lstrip() == source[:start].rstrip():
            return count
    return None


def _similarities(originals: Sequence[str], changed: Sequence[str], vectors: Vectors) -> list[float]:
    return [float(one @ other) for one, other in zip(vectors(originals), vectors(changed), strict=True)]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else float("nan")
