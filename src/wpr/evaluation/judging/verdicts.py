"""Reading a judge's choice between two responses, strictly: what is not plainly A, B or E is not guessed at."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

from wpr.evaluation.judging.questions import UnreadableError

CHOICES = ("A", "B", "E")
LETTER = 'a single letter, A, B or E (for "equal")'
OBJECT = 'one JSON object with the keys "comparison" (one sentence) and "choice" ("A", "B" or "E")'
FENCE = "```"
SHOWN = 60
"""Characters of an answer in a message."""
BRACKETS = 50_000
"""Of JSON that is read. A body of 2 MB with the probabilities of all its tokens has fewer; a million of them, which
mean nothing, hold up all other answers while they become objects.
"""


def read_letter(text: str) -> str:
    """One of the letters; spaces, quotes and punctuation around it do no harm."""
    text = without_thoughts(text)
    letter = text.strip(" \t\r\n\"'`*()[].:")
    if letter not in CHOICES:
        raise UnreadableError(f"{_cut(text)} is not one of the letters A, B, E")
    return letter


def read_object(text: str) -> str:
    """The ``choice`` of a JSON object, which may stand in a fenced block."""
    text = without_thoughts(text)
    try:
        found = load_json(_within_fence(text), _each_once)
    except UnreadableError:
        raise
    except (ValueError, RecursionError) as error:
        message = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UnreadableError(f"it is not JSON ({message})") from None
    if not isinstance(found, dict) or "choice" not in found:
        raise UnreadableError('it is no object with the key "choice"')
    if found["choice"] not in CHOICES:
        # Piece by piece, as far as it is shown: the whole of it may be too long, or nested too deeply.
        choice = "".join(islice(json.JSONEncoder().iterencode(found["choice"]), SHOWN + 1))
        raise UnreadableError(f'the choice {_cut(choice)} is not "A", "B" or "E"')
    if not isinstance(found.get("comparison"), str):
        raise UnreadableError('it has no text under the key "comparison"')
    return str(found["choice"])


def load_json(text: str, make_object: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of JSON from outside. Raises ValueError or RecursionError, in a time that grows with the length only.

    make_object: see ``object_pairs_hook`` of `json.loads`.
    """
    brackets = text.count("[") + text.count("{")
    if brackets > BRACKETS:
        raise ValueError(f"it has {brackets:,} opening brackets, and at most {BRACKETS:,} are read")
    return json.loads(text, object_pairs_hook=make_object)


def without_thoughts(text: str) -> str:
    """The text behind the thoughts that reasoning models put before their answer."""
    thoughts, ended, answer = text.partition("</think>")
    return answer if ended and thoughts.lstrip().startswith("<think>") else text


def _within_fence(text: str) -> str:
    """What stands in a fenced block that is the whole text; the text itself where it is none.

    By plain search: an expression with several runs of white space in a row tries every way to share them out.
    """
    fenced = text.strip()
    if len(fenced) < 2 * len(FENCE) or not (fenced.startswith(FENCE) and fenced.endswith(FENCE)):
        return text
    inside = fenced[len(FENCE) : -len(FENCE)].removeprefix("json")
    margin = inside[: len(inside) - len(inside.lstrip())]
    return inside[margin.rindex("\n") + 1 :].rstrip() if "\n" in margin else text


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(name for name, _ in pairs)
        again = next(name for name in times if times[name] > 1)
        raise UnreadableError(f"the key {_cut(again)} stands in it more than once")
    return found


def _cut(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 3] + "...")
