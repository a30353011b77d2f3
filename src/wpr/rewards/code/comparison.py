"""Whether what a program gave is what was expected. Runs outside the sandbox, on untrusted text of bounded size."""

from __future__ import annotations

import math
import re
from itertools import zip_longest
from typing import Any

RELATIVE, ABSOLUTE = 1e-5, 1e-8
"""Tolerances for numbers with a fraction or an exponent, those of numpy's ``allclose`` that APPS's tester uses."""

FRACTION = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
WORD = re.compile(r"\S+")
LONGEST_NUMBER = 400  # characters; longer ones are compared as text, so that nobody makes us parse megabytes


def same_output(given: str, expected: str) -> bool:
    """Whether standard output is the expected one.

    That is: the same words in the same order, however spaced, where numbers that are *expected* with a fraction or an
    exponent may differ by ``1e-8 + 1e-5 * |expected|``. Whole numbers must be exact, and so must infinity and NaN.
    """
    # Word by word, so that megabytes of nonsense are left at the first wrong one.
    found = (word.group() for word in WORD.finditer(given))
    return all(_same_word(word, wanted) for word, wanted in zip_longest(found, expected.split(), fillvalue=""))


def same_value(given: Any, expected: Any) -> bool:
    """Whether a returned value is the expected one, both as JSON has them (a tuple is a list).

    APPS wraps some expected values in a list of one, so that is looked into. Numbers with a fraction are compared with
    the tolerance of `same_output`. NaN is the right answer where NaN is expected.
    """
    if _same(given, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _same(given, expected[0])


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    if max(len(given), len(expected)) > LONGEST_NUMBER or not FRACTION.fullmatch(expected):
        return False
    try:
        return _close(float(given), float(expected))
    except ValueError:
        return False


def _close(given: float, expected: float) -> bool:
    if not math.isfinite(expected):  # the tolerance would be infinite too, and every number within it
        return given == expected or (math.isnan(given) and math.isnan(expected))
    return abs(given - expected) <= ABSOLUTE + RELATIVE * abs(expected)


def _same(given: Any, expected: Any) -> bool:
    if isinstance(expected, list | tuple):
        return isinstance(given, list) and len(given) == len(expected) and all(map(_same, given, expected))
    if isinstance(expected, dict):
        return (
            isinstance(given, dict)
            and given.keys() == {str(key) for key in expected}
            and all(_same(given[str(key)], value) for key, value in expected.items())
        )
    if isinstance(expected, float) and isinstance(given, int | float):
        try:
            return given == expected or _close(float(given), expected)
        except OverflowError:  # a whole number too large for a float
            return False
    return bool(given == expected)
