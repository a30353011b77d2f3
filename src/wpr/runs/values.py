"""Values of JSON files that may be of another kind than they should: the value where it can be used, else nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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


def drawable(value: float) -> float:
    """The value, but what is too large to be drawn on any axis as infinity, and what is next to nothing as zero."""
    if abs(value) > LARGEST:
        return math.copysign(math.inf, value)
    return 0.0 if abs(value) < 1 / LARGEST else value


def as_text(value: object) -> str:
    """Text as it is, of other values what they look like, and nothing for None."""
    return value if isinstance(value, str) else "" if value is None else str(value)


def mapping(value: object) -> Mapping[str, Any]:
    """The mapping, or an empty one for what is none."""
    return value if isinstance(value, dict) else {}
