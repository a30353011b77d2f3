"""What a policy writes instead of a forbidden word: in its responses, and by its probabilities.

Notation for shapes: ``P`` positions, ``V`` vocabulary, ``T`` tokens.

`written_words` reads responses. A response keeps more of the meaning if a policy changes fewer words, or if it finds
better ones, and these are told apart:

    others_kept   of the words that are not forbidden, the share that stays where it was (sentence and response are
                  aligned word by word)
    replaced      of the forbidden words, the share that became others that are not; the rest stayed, were left out,
                  became other forbidden words, or were rephrased, where it is not known which words stand for them
    one_word      the sentence with nothing changed but one of these, in whose place stands what the policy wrote: how
                  much of its meaning is left, in the mean. Policies replace words at places that differ

`expected_words` draws nothing, and all policies are compared at the same places. A policy is given a sentence as it
stands, up to a forbidden word (not the first word, and no phrase), and

    forbidden     is the probability that it gives to forbidden words there
    later         that of words which the sentence has after the place, as where the forbidden one is left out
    covered       that of the `LIKELIEST` other words
    expected      how much of the meaning is left in the sentence with another word in that place, in the mean over
                  these, weighted by their probabilities; every place counts alike

Words here are tokens of letters that follow a space; some are the beginning of a longer word.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wpr.data import Encoder
from wpr.data.rows import Row
from wpr.language_models import hidden_states, logits_of, pad
from wpr.recipes.rewrite import WORD_START
from wpr.report.replaced_words import Rewrite
from wpr.rewards.words import WordTable, find_words, folded
from wpr.runs.responses import Response

LIKELIEST = 8
BATCH = 64

Vectors = Callable[[Sequence[str]], Sequence[Tensor]]
"""Texts to unit vectors, one each."""

Change = tuple[tuple[int, int], str]
"""Where a word begins and ends in a sentence, and what is written in its place."""


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
    """``one_word``, ``replaced``, ``others_kept``, ``all_words`` and ``rest`` of responses to sentences, the column
    ``source``. What there is nothing of is left out.
    """
    originals: list[str] = []
    changed: list[str] = []
    sources: list[str] = []
    all_changed: list[str] = []
    texts: list[str] = []
    kept = others = words = 0
    for row in responses:
        source = str(row.columns["source"])
        rewrite, entries = Rewrite(source, row.response.strip()), forbidden.find(source)
        found = [word.span() for word in find_words(source)]
        free = set(range(len(found))).difference(*(range(first, last) for _, first, last in entries))
        others += len(free)
        kept += len(free & rewrite.kept)
        spans = [(found[first][0], found[last - 1][1]) for _, first, last in entries]
        words += len(spans)
        outcomes = zip(spans, rewrite.outcomes(forbidden), strict=False)  # those end with the words that are aligned
        found_words = [
            (span, outcome.instead)
            for span, outcome in outcomes
            if outcome.what == "replaced" and not forbidden.find(outcome.instead)
        ]
        originals += [source] * len(found_words)
        changed += [with_words(source, [one]) for one in found_words]
        sources.append(source)
        all_changed.append(with_words(source, found_words))
        texts.append(row.response.strip())
    similar, all_words = _similarities(originals, changed, vectors), _similarities(sources, all_changed, vectors)
    rest = [one - other for one, other in zip(_similarities(sources, texts, vectors), all_words, strict=True)]
    return _means({
        "one_word": similar,
        "replaced": [len(similar) / words] if words else [],
        "others_kept": [kept / others] if others else [],
        "all_words": all_words,
        "rest": rest,
    })  # fmt: skip


def with_words(source: str, words: Sequence[Change]) -> str:
    """The sentence with other words in some places, from one character to another; where they overlap (a phrase and a
    word of it), the longest counts.
    """
    chosen: list[Change] = []
    for (start, end), word in sorted(words, key=lambda item: item[0][0] - item[0][1]):
        if all(end <= first or last <= start for (first, last), _ in chosen):
            chosen.append(((start, end), word))
    for (start, end), word in sorted(chosen, reverse=True):  # from the last to the first: places stay where they are
        source = source[:start] + word + source[end:]
    return source


@dataclass(frozen=True)
class Place:
    """A forbidden word of a sentence. span: where it begins and ends. before: tokens of the prompt and up to the word.
    later: the words after it, folded.
    """

    source: str
    span: tuple[int, int]
    before: list[int]
    later: frozenset[str]


def find_places(encoder: Encoder, responses: Iterable[Response], forbidden: WordTable) -> list[Place]:
    """Single forbidden words of the sentences that responses are to, where the text before the word's space ends with a
    token.
    """
    places = []
    for row in responses:
        source = str(row.columns["source"])
        prompt, (ids,) = encoder.encode(Row(row.prompt if isinstance(row.prompt, str) else tuple(row.prompt)), [source])
        words = list(find_words(source))
        for first in sorted({first for _, first, last in forbidden.find(source) if last == first + 1}):
            count = _tokens_before(encoder.tokenizer, ids[:-1], source, words[first].start())
            if count is not None:
                later = frozenset(folded(word.group()) for word in words[first + 1 :])
                places.append(Place(source, words[first].span(), [*prompt, *ids[:count]], later))
    return sorted(places, key=lambda place: len(place.before))  # alike in length: little padding


@torch.no_grad()
def expected_words(
    model: Any, encoder: Encoder, responses: Iterable[Response], forbidden: WordTable, vectors: Vectors
) -> dict[str, float]:
    """``forbidden``, ``later``, ``covered`` and ``expected`` at the `find_places`; nothing where there is none."""
    words = _words_of_tokens(encoder.tokenizer, model.get_output_embeddings().weight.shape[0])
    is_word = torch.tensor([bool(word) for word in words])
    barred = torch.tensor([bool(word) and bool(forbidden.find(word)) for word in words])
    tokens_of: dict[str, list[int]] = {}
    for token, word in enumerate(words):
        tokens_of.setdefault(folded(word), []).append(token)
    found: dict[str, list[float]] = {"forbidden": [], "later": [], "covered": [], "expected": []}
    places = find_places(encoder, responses, forbidden)
    for start in range(0, len(places), BATCH):
        part = places[start : start + BATCH]
        for place, shares in zip(part, _next_probabilities(model, [place.before for place in part]), strict=True):
            later = [token for word in place.later for token in tokens_of.get(word, []) if not barred[token]]
            found["forbidden"].append(float(shares[barred].sum()))
            found["later"].append(float(shares[later].sum()))
            free = shares * (is_word & ~barred)
            free[later] = 0.0
            best = free.topk(LIKELIEST)
            changed = [with_words(place.source, [(place.span, words[token])]) for token in best.indices.tolist()]
            similar = torch.tensor(_similarities([place.source] * LIKELIEST, changed, vectors))
            found["covered"].append(float(best.values.sum()))
            found["expected"].append(float(best.values @ similar / best.values.sum()))
    return _means(found)


def _words_of_tokens(tokenizer: Any, count: int) -> list[str]:
    """Of each token the word that it is after a space, or nothing."""
    names = [name or "" for name in tokenizer.convert_ids_to_tokens(range(count))]  # the tokenizer may have fewer
    return [name[1:] if name[:1] in WORD_START and name[1:].isascii() and name[1:].isalpha() else "" for name in names]


def _next_probabilities(model: Any, rows: Sequence[list[int]]) -> Tensor:
    """Of the token after each row ``(P, V)``."""
    ids, mask = pad(rows, device=model.device)
    states = hidden_states(model, ids, mask)[torch.arange(len(rows)), mask.sum(-1) - 1]
    return logits_of(model, states).float().softmax(-1).cpu()


def _tokens_before(tokenizer: Any, ids: Sequence[int], source: str, start: int) -> int | None:
    """How many tokens of a sentence stand before the word at ``start``. None where tokens do not end there, or no
    space is before it: the first word, and one after a hyphen, begin with other tokens.
    """
    if not source[:start].endswith(" "):
        return None
    for count in range(1, len(ids)):
        text = tokenizer.decode(ids[:count])
        if text.lstrip() == source[:start].rstrip():
            return count
    return None


def _similarities(originals: Sequence[str], changed: Sequence[str], vectors: Vectors) -> list[float]:
    return [float(one @ other) for one, other in zip(vectors(originals), vectors(changed), strict=True)]


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.fmean(every) for name, every in values.items() if every}
