"""Rewards for how something is said: words to avoid or to prefer, spelling, reading level.

Each is a `TokenReward`, and a reward function of TRL's trainers too. docs/rewards.md has formulas and file formats.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from wpr.rewards.base import Completions, RewardError
from wpr.rewards.token_text import TokenText
from wpr.rewards.words import (
    JOINT,
    WORD,
    Entry,
    WordListError,
    WordTable,
    find_words,
    folded,
    inflections,
    read_entries,
)

SPELLINGS = Path(__file__).with_name("spellings.txt")
"""British and American spellings, one pair per line."""
FOREIGN = 1.5
"""Tokens per letter beyond which a tokenizer does not know a word's script."""
SHOWN = 5
"""Entries that an error names."""

Source = str | Path | Iterable[str] | Mapping[str, float]
Placement = Literal["token", "end"]


class Wording(ABC):
    """What these rewards share: both ways to be called, and responses without any word, which have no score."""

    name = "wording"
    may_skip = True

    @property
    def __name__(self) -> str:
        """What TRL's trainers call it in their logs."""
        return self.name

    @abstractmethod
    def score(self, text: str) -> float:
        """Of a text that has words."""

    def place(self, text: str, tokens: Sequence[int], tokenizer: Any) -> list[float]:
        """What each token of such a text earned; nothing, unless a reward knows better."""
        return []

    def __call__(self, completions: Any = None, completion_ids: Any = None, **others: Any) -> Any:
        """Scores ``(B,)`` of `Completions`, NaN without words; or, called as TRL's trainers do, a list, with None."""
        if isinstance(completions, Completions):
            return self._scores(completions)
        texts = [_text_of(completion) for completion in completions]
        return [self.score(text) if _has_words(text) else None for text in texts]

    def by_token(self, completions: Completions) -> tuple[Tensor, Tensor]:
        """See `TokenReward.by_token`."""
        rows: list[list[float]] = []
        for row, text in enumerate(completions.responses):
            tokens = [] if completions.response_ids is None else completions.response_ids[row]
            rows.append(self.place(text, tokens, completions.tokenizer) if _has_words(text) else [])
        return self._scores(completions), completions.placed(rows)

    def _scores(self, completions: Completions) -> Tensor:
        scores = [self.score(text) if _has_words(text) else math.nan for text in completions.responses]
        return torch.tensor(scores, dtype=torch.float32, device=completions.input_ids.device)


class WordList(Wording):
    """Minus the weights of a response's forbidden words, plus those of its preferred ones; every occurrence counts.

    forbidden, preferred: files of entries, or the entries themselves (`wpr.rewards.words`), or a mapping from entries
        to weights; either may be left out.
    placement: ``token``: what a word is worth lands on the token that completes it; ``end``: on the end of the
        response.

    With S(y_1 .. y_t) for the score of a response as it stands after t tokens, token t gets S(y_1 .. y_t) - S(y_1 ..
    y_{t-1}). So a token that completes a word gets what that is worth, and one that goes on to make another word of it
    (`cat`, then `alog`) gets it back: nothing depends on tokens that are still to come.
    """

    name = "words"

    def __init__(
        self, forbidden: Source | None = None, preferred: Source | None = None, placement: Placement = "token"
    ) -> None:
        if forbidden is None and preferred is None:
            raise WordListError("no list is given; name words to avoid (forbidden), to prefer (preferred), or both")
        if placement not in ("token", "end"):
            raise ValueError(f"placement={placement!r} must be 'token' or 'end'")
        self._set_lists(
            [] if forbidden is None else read_entries(forbidden),
            [] if preferred is None else read_entries(preferred),
            placement,
        )

    def _set_lists(self, forbidden: list[Entry], preferred: list[Entry], placement: Placement) -> None:
        self.forbidden, self.preferred, self.placement = WordTable(forbidden), WordTable(preferred), placement
        # Responses have few different words.
        self._worth = lru_cache(1 << 16)(self._make_worth)

    def _make_worth(self, words: tuple[str, ...]) -> list[float]:
        """Of the last of these words, which the others are before, by how many of its characters are written: from none
        to all.
        """
        *before, last = words
        found = [0.0]
        for end in range(1, len(last) + 1):
            start = WORD.match(last[:end])
            written = (*before, folded(start.group() if start else last[:end]))
            found.append(self.preferred.worth(written) - self.forbidden.worth(written))
        return found

    def _valued(self, text: str) -> list[tuple[int, list[float]]]:
        """Words that are worth something, at some length: where they begin, and what their starts are worth."""
        reach = max(self.forbidden.reach, self.preferred.reach)
        found: list[tuple[int, list[float]]] = []
        before: list[str] = []
        end = 0
        for word in find_words(text):
            if not JOINT.fullmatch(text[end : word.start()]):
                before = []
            values = self._worth((*before, word.group()))
            if any(values):
                found.append((word.start(), values))
            before = [*before, folded(word.group())][1 - reach :] if reach > 1 else []
            end = word.end()
        return found

    def score(self, text: str) -> float:
        return math.fsum(values[-1] for _, values in self._valued(text))

    def place(self, text: str, tokens: Sequence[int], tokenizer: Any) -> list[float]:
        """What each token earned: the change of the score that it made."""
        valued = self._valued(text) if self.placement == "token" else []
        if not valued:
            return []
        if tokenizer is None or not tokens:
            unknown = "no tokenizer is" if tokens else "no tokens are"
            raise RewardError(
                f"{self.name}: words are placed on tokens by the tokenizer, and {unknown} known; give the trainer its "
                "tokenizer (processing_class), or set placement='end'"
            )
        spelled, earned = TokenText(tokens, text, tokenizer), [0.0] * len(tokens)
        for start, values in valued:
            worth = 0.0
            for token, known in spelled.spelling(start, start + len(values) - 1):
                earned[token] += values[known - start] - worth
                worth = values[known - start]
        return earned

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse entries that no tokens of this tokenizer can spell, and lists in a script that it hardly knows."""
        if tokenizer is None and self.placement == "token":
            raise WordListError(
                f"{self.name}: words are placed on tokens by the tokenizer, and there is none; give the trainer its "
                "tokenizer (processing_class), or set placement='end'"
            )
        entries = [] if tokenizer is None else [*self.forbidden.entries, *self.preferred.entries]
        lost = [entry for entry in entries if not _can_spell(tokenizer, entry)]
        if lost:
            named = ", ".join(f"{entry.text} ({entry.place})" for entry in lost[:SHOWN])
            raise WordListError(
                f"{len(lost)} of {len(entries)} entries cannot be written with the model's tokens: {named}"
                f"{', ...' if len(lost) > SHOWN else ''}; leave them out, or use a list in the model's language"
            )
        # Letters that a byte-level tokenizer has no tokens for are two bytes or more.
        foreign = [(entry, count) for entry in entries if (count := _tokens_per_letter(tokenizer, entry)) > FOREIGN]
        if 2 * len(foreign) > len(entries):
            entry, count = foreign[0]
            raise WordListError(
                f"{entry.place}: the list seems to be in another language than the model's: {len(foreign)} of "
                f"{len(entries)} entries take more tokens than letters ({entry.text}: {count:.1f} a letter); use a "
                "list in the model's language"
            )


class Spelling(WordList):
    """Minus the words that are spelled otherwise than wanted, by a table of British and American spellings.

    variant: the spelling that is wanted. placement: as of `WordList`.
    """

    name = "spelling"

    def __init__(self, variant: Literal["british", "american"], placement: Placement = "token") -> None:
        if variant not in ("british", "american"):
            raise ValueError(f"spelling={variant!r} must be 'british' or 'american'")
        if placement not in ("token", "end"):
            raise ValueError(f"placement={placement!r} must be 'token' or 'end'")
        column = 1 if variant == "british" else 0
        lines = SPELLINGS.read_text(encoding="utf-8").splitlines()
        pairs = [line.split() for line in lines if line and not line.startswith("#")]
        self._set_lists(read_entries(pair[column] for pair in pairs), [], placement)


class ReadingLevel(Wording):
    """``-max(0, g - grade)`` for a response of the US school grade g: 0 for one that is as simple as wanted.

    grade: the grade that is wanted. measure: a function of `textstat` that gives a grade; the automated readability
        index counts characters, words and sentences: 4.71 characters/words + 0.5 words/sentences - 21.43.

    A grade is one of a whole text: it lands on the end of the response.
    """

    name = "reading_level"

    def __init__(self, grade: float, measure: str = "automated_readability_index") -> None:
        if isinstance(grade, bool) or not isinstance(grade, int | float) or not math.isfinite(grade):
            raise ValueError(f"grade={grade!r} must be a number: a US school grade, such as 6")
        try:
            import textstat
        except ModuleNotFoundError as error:
            raise RewardError("reading levels need textstat; install it with `pip install 'wpr[wording]'`") from error
        self.grade, self.measure = grade, measure
        found = getattr(textstat, measure, None)
        if not callable(found):
            raise ValueError(
                f"textstat has no measure {measure!r}; use automated_readability_index or coleman_liau_index"
            )
        self._grade_of = found
        try:
            tried = found("A word.")
        except LookupError:
            raise RewardError(
                f"textstat's {measure} counts syllables by a dictionary that it could not download; run `python -m "
                "nltk.downloader cmudict`, or use automated_readability_index"
            ) from None
        except Exception as error:
            tried = error
        if isinstance(tried, bool) or not isinstance(tried, int | float):
            raise ValueError(
                f"textstat's {measure} gives {tried!r} for a text, and no grade; use automated_readability_index or "
                "coleman_liau_index"
            )

    def score(self, text: str) -> float:
        return min(0.0, self.grade - float(self._grade_of(text)))


def wording_reward(
    kind: str,
    *,
    words: str | None = None,
    preferred: str | None = None,
    grade: float | None = None,
    spelling: Any = None,
    placement: Placement | None = None,
) -> Wording:
    """The reward of a recipe's `scorer` of this kind, by its settings."""
    if kind == "words":
        return WordList(words, preferred, placement or "token")
    if kind == "spelling":
        return Spelling(spelling, placement or "token")
    assert kind == "reading-level"
    assert grade is not None
    return ReadingLevel(grade)


def _text_of(completion: Any) -> str:
    """Of a completion as TRL's trainers have it: text, or messages."""
    return completion if isinstance(completion, str) else "".join(str(one.get("content") or "") for one in completion)


def _has_words(text: str) -> bool:
    return WORD.search(text) is not None


def _tokens_per_letter(tokenizer: Any, entry: Entry) -> float:
    text = " ".join(entry.words)
    counts = [len(tokenizer.encode(written, add_special_tokens=False)) for written in (text, f" {text}")]
    return min(counts) / len(text)


def _can_spell(tokenizer: Any, entry: Entry) -> bool:
    """Whether some form of an entry is itself again once it was encoded and decoded."""
    *before, last = entry.words
    forms = sorted(inflections(last)) if entry.rule == "inflected" and not before else [last]
    for text in (" ".join([*before, form]) for form in [last, *forms]):
        for written in (text, f" {text}", text.capitalize(), text.upper()):
            again = tokenizer.decode(tokenizer.encode(written, add_special_tokens=False), skip_special_tokens=True)
            if [folded(word.group()) for word in find_words(again)] == [folded(w.group()) for w in find_words(text)]:
                return True
    return False
