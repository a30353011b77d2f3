"""What became of the words of a sentence in its rewritten version: both are aligned word by word."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Set
from dataclasses import dataclass

from wpr.rewards.words import Entry, WordTable, find_words, folded

LONGEST = 400
"""Words of a text that are aligned; the time is quadratic in them."""

MOST_FOR_ONE = 3
"""Words that one word may be replaced by; of more, it is not known which of them stand for it."""


@dataclass(frozen=True)
class Outcome:
    """What became of a forbidden word.

    what: ``replaced``; ``kept``; ``left out``; ``rephrased``, where which words stand for it is not known.
    instead: the words that replaced it, folded. start: where the first of them begins in the response.
    """

    entry: Entry
    what: str
    instead: str = ""
    start: int = 0


class Rewrite:
    """A sentence and its rewritten version.

    kept: places of the sentence's words that stand unchanged in the response. new: places of the response's words that
    the sentence does not have there.
    """

    def __init__(self, source: str, response: str) -> None:
        self.source = source
        self._starts = [word.start() for word in find_words(response)]
        ours, theirs = (
            [folded(word.group()) for word in itertools.islice(find_words(text), LONGEST)]
            for text in (source, response)
        )
        self._ours, self._theirs = ours, theirs
        self._images: list[range | None] = []
        self.kept: set[int] = set()
        self.new: set[int] = set()
        for what, first, last, start, end in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
            if what == "equal":
                self.kept.update(range(first, last))
            else:
                self.new.update(range(start, end))
            self._images += _images(last - first, range(start, end))

    def outcomes(self, forbidden: WordTable) -> Iterator[Outcome]:
        """What became of each forbidden word of the sentence."""
        for entry, first, last in forbidden.find(self.source):
            if last > len(self._images):
                return
            images = [image for image in self._images[first:last] if image is not None]
            places = [place for image in images for place in image]
            if len(images) < last - first:
                yield Outcome(entry, "rephrased")
            elif not places:
                yield Outcome(entry, "left out")
            else:
                now = self._theirs[places[0] : places[-1] + 1]
                what = "kept" if now == self._ours[first:last] else "replaced"
                yield Outcome(entry, what, " ".join(now), self._starts[places[0]])


def marked_words(text: str, forbidden: WordTable, new: Set[int] = frozenset()) -> list[tuple[int, int, bool, bool]]:
    """A text's forbidden words and those at the places ``new``: where each begins and ends, whether it is forbidden,
    and whether it is new.
    """
    places = {place for _, first, last in forbidden.find(text) for place in range(first, last)}
    return [
        (word.start(), word.end(), place in places, place in new)
        for place, word in enumerate(find_words(text))
        if place in places or place in new
    ]


def _images(count: int, now: range) -> list[range | None]:
    """Where each of so many words, which became the words ``now``, stands there; None where that is not known."""
    if len(now) in (0, count):
        return [now[at : at + 1] for at in range(count)]
    return [now] if count == 1 and len(now) <= MOST_FOR_ONE else [None] * count
