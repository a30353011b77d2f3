"""Reading a judge's choice between two responses, strictly: what is not plainly A, B or E is not guessed at."""

from __future__ import annotations

import json
import re
from typing import Any

from wpr.evaluation.judging.questions import UnreadableError

CHOICES = ("A", "B", "E")
LETTER = 'a single letter, A, B or E (for "equal")'
OBJECT = 'one JSON object with the keys "comparison" (one sentence) and "choice" ("A", "B" or "E")'


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
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", text, re.DOTALL)
    try:
        found = json.loads(fenced.group(1) if fenced else text, object_pairs_hook=_each_once)
    except UnreadableError:
        raise
    except (ValueError, RecursionError) as error:
        told = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UnreadableError(f"it is not JSON ({told})") from None
    if not isinstance(found, dict) or "choice" not in found:
        raise UnreadableError('it is no object with the key "choice"')
    if found["choice"] not in CHOICES:
        raise UnreadableError(f'the choice {_cut(json.dumps(found["choice"]))} is not "A", "B" or "E"')
    if not isinstance(found.get("comparison"), str):
        raise UnreadableError('it has no text under the key "comparison"')
    return str(found["choice"])


def without_thoughts(text: str) -> str:
    """The text behind the thoughts that reasoning models put before their answer."""
    return re.sub(r"\A\s*<think>.*?</think>", "", text, count=1, flags=re.DOTALL)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    again = next((name for name in names if names.count(name) > 1), None)
    if again is not None:
        raise UnreadableError(f"the key {_cut(again)} stands in it more than once")
    return dict(pairs)


def _cut(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
