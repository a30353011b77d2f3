"""Reading JSON files that may be missing, cut off or of another shape: what can be read is, the rest is a problem."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wpr.runs.read_problems import Problems

Row = dict[str, Any]
LARGEST = 1e100
"""Sums and differences of numbers up to this stay finite."""


def finite(value: object) -> float | None:
    """The number, or None for what is none, not finite, or too large to have been measured."""
    found = as_number(value)
    return found if found is not None and abs(found) <= LARGEST else None


def as_number(value: object) -> float | None:
    """The number, NaN and infinity included; None for everything else (true and false are no numbers)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_text(value: object) -> str:
    """Text as it is, of other values what they look like, and nothing for None."""
    return value if isinstance(value, str) else "" if value is None else str(value)


def mapping(value: object) -> Mapping[str, Any]:
    """The mapping, or an empty one for what is none."""
    return value if isinstance(value, dict) else {}


def read_text(path: Path, problems: Problems, remedy: str) -> str | None:
    """A file's text without a byte order mark; bytes that are no UTF-8 show as a replacement sign."""
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except FileNotFoundError:
        problems.add(path, "is missing", remedy)
    except OSError as error:
        problems.add(path, f"cannot be read ({error.strerror})", "check that it is a file that you may read")
    return None


def read_object(path: Path, problems: Problems, remedy: str) -> Row | None:
    """A file that holds one JSON object; ``remedy`` is said where that cannot be had."""
    text = read_text(path, problems, remedy)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.add(path, f"is not valid JSON ({_short(error)})", remedy)
        return None
    if not isinstance(found, dict):
        problems.add(path, f"holds a {type(found).__name__}, not an object", remedy)
        return None
    return found


def read_lines(path: Path, problems: Problems, check: Callable[[Row], str | None], remedy: str) -> list[Row]:
    """The lines of a JSONL file that are objects and pass ``check``, which says what is wrong with a line, or None."""
    text = read_text(path, problems, remedy)
    rows, bad, first = [], 0, ""
    lines = [(number, line) for number, line in enumerate((text or "").split("\n"), 1) if line.strip()]
    for number, line in lines:
        try:
            row = json.loads(line)
            wrong = check(row) if isinstance(row, dict) else f"a {type(row).__name__}, not an object"
        except (ValueError, RecursionError) as error:
            wrong = f"not valid JSON ({_short(error)})"
        if wrong is None:
            rows.append(row)
        else:
            bad += 1
            first = first or f"line {number}: {wrong}"
    if bad:
        rest = "the other lines are shown" if rows else remedy
        problems.add(path, f"{bad} of {len(lines)} lines could not be used ({first})", rest)
    elif text is not None and not lines:
        problems.add(path, "is empty", remedy)
    return rows


def _short(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).split("\n")[0][:120]
