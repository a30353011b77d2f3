"""Words of a text, and lists of words to look them up in.

A word is a run of letters and digits and their combining marks, with apostrophes inside it (`don't`); everything else
separates words, hyphens too. Scripts that are written without spaces between words (Chinese, Japanese, Thai, ...) have
no words here.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3031-\u3035\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
"""Thai, Lao, Myanmar, Khmer, Japanese kana, Han."""
CURLY = "\u2019"
"""The apostrophe of typographers."""


def _marks() -> str:
    """Combining marks, as ranges of a character class: accents, vowel signs (Hindi, Bengali, vocalised Arabic)."""
    unspaced = re.compile(f"[{UNSPACED}]")
    every = (code for code in range(0x300, 0x20000) if unicodedata.category(chr(code))[0] == "M")
    marks = {code for code in every if not unspaced.match(chr(code))}
    starts, ends = (sorted(mark for mark in marks if mark + step not in marks) for step in (-1, 1))
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in zip(starts, ends, strict=True))


RUN = rf"[^\W_{UNSPACED}]+(?:[{_marks()}]+[^\W_{UNSPACED}]*)*"
"""Letters and digits, with the marks on them."""
WORD = re.compile(rf"{RUN}(?:['{CURLY}]{RUN})*")
JOINT = re.compile(r"\s+|[-\u2010\u2011]")
"""What may stand between two words of a phrase."""
VOWELS = "aeiou"


class WordListError(ValueError):
    """A word list that cannot be used."""


def find_words(text: str) -> Iterator[re.Match[str]]:
    """The words of a text, with their places."""
    return WORD.finditer(text)


def folded(word: str) -> str:
    """A word as it is compared: without case, with straight apostrophes, accents as one character with their letter."""
    return unicodedata.normalize("NFC", word.casefold().replace(CURLY, "'"))


def inflections(word: str) -> set[str]:
    """The regular English forms of a word, by its spelling alone: itself, and with -s, -ed and -ing.

    - `-es` instead after s, x, z, ch, sh, and beside -s after a consonant with o;
    - `y` after a consonant becomes `ies`, `ied`; `ie` becomes `ying`;
    - a last e goes before -ed and -ing (not ee, oe, ye before -ing);
    - one consonant (not w, x, y) after one vowel is doubled; in words of several syllables both spellings count.

    Irregular forms (`ran`), comparatives and derived words (`runner`, `quickly`) are words of their own. Words of two
    letters, words without a vowel before a last e (`the`), and words with other letters than a to z have no forms.
    """
    if not re.fullmatch("[a-z]{3,}", word) or not re.search(f"[{VOWELS}y]", word.removesuffix("e")):
        return {word}
    forms = {word, f"{word}es" if word.endswith(("s", "x", "z", "ch", "sh")) else f"{word}s"}
    after_consonant = word[-2] not in VOWELS
    if word[-1] == "o" and after_consonant:
        forms.add(f"{word}es")
    if word[-1] == "y" and after_consonant:
        return (forms - {f"{word}s"}) | {f"{word[:-1]}ies", f"{word[:-1]}ied", f"{word}ing"}
    if word[-1] == "e":
        forms.add(f"{word}d")
        if word.endswith("ie"):
            return forms | {f"{word[:-2]}ying"}
        return forms | {f"{word}ing" if word.endswith(("ee", "oe", "ye")) else f"{word[:-1]}ing"}
    plain, doubled = ({f"{stem}ed", f"{stem}ing"} for stem in (word, word + word[-1]))
    spoken = word.replace("qu", "qw")  # whose u is no vowel
    if not re.search(f"(^|[^{VOWELS}])[{VOWELS}][^{VOWELS}wxy]$", spoken):
        return forms | plain
    syllables = len(re.findall(f"[{VOWELS}y]+", spoken))
    return forms | (doubled if syllables == 1 else plain | doubled)


@dataclass(frozen=True)
class Entry:
    """One entry of a list. words: those that it stands for in sequence, folded. rule: how its last word is matched.
    place: where it was written.
    """

    words: tuple[str, ...]
    rule: str
    weight: float
    place: str

    @property
    def text(self) -> str:
        """As it is written in a list, without its weight."""
        text = " ".join(self.words)
        return {"exact": f'"{text}"', "prefix": f"{text}*"}.get(self.rule, text)

    @classmethod
    def parse(cls, text: str, place: str) -> Entry:
        """Of a line without its comment: `word`, `"word"`, `word*` or several words, and perhaps a weight after a tab
        or an equals sign.
        """
        written, weight = _with_weight(text, place)
        rule = "inflected"
        if len(written) > 1 and written[0] == written[-1] == '"':
            written, rule = written[1:-1], "exact"
        elif written.endswith("*"):
            written, rule = written[:-1], "prefix"
        written = unicodedata.normalize("NFC", written.strip())
        if found := re.search(f"[{UNSPACED}]", written):
            script = unicodedata.name(found.group(), "a letter").split()[0].replace("CJK", "Han")
            raise WordListError(
                f"{place}: {written!r} is in a script that is written without spaces between words ({script.title()}), "
                "where words cannot be told; score such text by a function of your own (scorer.kind: function)"
            )
        words = list(find_words(written))
        if not any(character.isalpha() for character in written):
            raise WordListError(f"{place}: {written!r} has no letter; an entry is a word, or several")
        rest = JOINT.sub("", WORD.sub("", written))
        if rest:
            raise WordListError(
                f"{place}: {written!r} is no word: {rest!r} stands between words or beside them, and is never part of "
                "one; leave it out"
            )
        return cls(tuple(folded(word.group()) for word in words), rule, weight, place)


def _with_weight(text: str, place: str) -> tuple[str, float]:
    written, separator, number = text.rpartition("\t")
    if not separator:
        written, separator, number = text.rpartition("=")
    if not separator:
        return text.strip(), 1.0
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise WordListError(
            f"{place}: the weight {number.strip()!r} must be a number above 0; words that are wanted go to the list of "
            "preferred words"
        )
    return written.strip(), weight


def read_entries(source: str | Path | Iterable[str] | Mapping[str, float]) -> list[Entry]:
    """Entries of a file (UTF-8; one per line; `#` begins a comment), of an iterable of lines, or of a mapping from
    entries to weights.
    """
    if isinstance(source, str | Path):
        path, name = Path(source).expanduser(), str(source)
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise WordListError(f"{name} is not UTF-8 text ({error.reason}, byte {error.start}); convert it") from None
        except OSError as error:
            raise WordListError(f"{name} cannot be read: {error.strerror or error}") from None
    else:
        if isinstance(source, Mapping):
            source = [f"{entry}={weight}" for entry, weight in source.items()]
        lines, name = list(source), "entry"
        for number, line in enumerate(lines, 1):
            if not isinstance(line, str):
                raise WordListError(f"entry:{number}: {line!r} is no text; an entry is a word, or several")
    kept = [(f"{name}:{number}", re.sub(r"(^|\s)#.*", "", line)) for number, line in enumerate(lines, 1)]
    entries = [Entry.parse(line.strip(), place) for place, line in kept if line.strip()]
    if not entries:
        raise WordListError(f"{'the list' if name == 'entry' else name} is empty; write one word per line")
    return entries


class WordTable:
    """What words are worth: the weight of the entry that fits a word best.

    A word that an entry writes out comes first, then its inflections, then the longest prefix; among equals the larger
    weight. A phrase counts beside the words in it. Words may have the possessive `'s`, unless an entry is exact.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = list(entries)
        self.exact: dict[str, Entry] = {}
        self.forms: dict[str, Entry] = {}
        self.prefixes: dict[str, Entry] = {}
        self.phrases: dict[tuple[str, ...], Entry] = {}
        self.phrase_prefixes: dict[tuple[str, ...], Entry] = {}
        self.reach = max((len(entry.words) for entry in self.entries), default=1)
        seen: dict[tuple[tuple[str, ...], str], Entry] = {}
        for entry in self.entries:
            earlier = seen.setdefault((entry.words, entry.rule), entry)
            if earlier.weight != entry.weight:
                raise WordListError(
                    f"{entry.place}: {entry.text} has the weight {entry.weight:g}, and {earlier.weight:g} at "
                    f"{earlier.place}; keep one"
                )
            self._add(entry)
        self._longest_prefix = max(map(len, self.prefixes), default=0)

    def _add(self, entry: Entry) -> None:
        *_, last = entry.words
        if len(entry.words) > 1:
            _add_larger(self.phrase_prefixes if entry.rule == "prefix" else self.phrases, entry.words, entry)
            return
        if entry.rule == "prefix":
            self.prefixes[last] = entry
            return
        _add_larger(self.exact, last, entry)
        if entry.rule == "inflected":
            for form in inflections(last):
                for owned in (form, f"{form}'s"):
                    _add_larger(self.forms, owned, entry)

    def fitting(self, words: tuple[str, ...]) -> list[Entry]:
        """Entries that fit the last of these words, folded, after the words before it: its own one, and phrases that it
        ends.
        """
        last = words[-1]
        own = self.exact.get(last) or self.forms.get(last)
        if own is None:
            starts = (last[:length] for length in range(min(self._longest_prefix, len(last)), 0, -1))
            own = next((self.prefixes[start] for start in starts if start in self.prefixes), None)
        found = [own] if own else []
        for length in range(2, min(len(words), self.reach) + 1):
            phrase = words[-length:]
            fits = self.phrases.get(phrase)
            if fits is None and self.phrase_prefixes:
                starts_of = (self.phrase_prefixes.get((*phrase[:-1], last[:end])) for end in range(len(last), 0, -1))
                fits = next((entry for entry in starts_of if entry), None)
            found += [fits] if fits else []
        return found

    def worth(self, words: tuple[str, ...]) -> float:
        """Weights of the entries that fit the last of these words, see `fitting`."""
        return sum((entry.weight for entry in self.fitting(words)), 0.0)

    def find(self, text: str) -> list[tuple[Entry, int, int]]:
        """The entries in a text. Each with its place among the text's words: of its first word, and after its last."""
        found: list[tuple[Entry, int, int]] = []
        before: list[str] = []
        end = 0
        for place, word in enumerate(find_words(text), 1):
            if not JOINT.fullmatch(text[end : word.start()]):
                before = []
            before = [*before, folded(word.group())][-self.reach :]
            found += [(entry, place - len(entry.words), place) for entry in self.fitting(tuple(before))]
            end = word.end()
        return found


def _add_larger(table: dict[Any, Entry], key: str | tuple[str, ...], entry: Entry) -> None:
    if key not in table or entry.weight > table[key].weight:
        table[key] = entry
