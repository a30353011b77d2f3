"""What counts as A, B or E, and what does not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wpr.evaluation.judging.questions import UnreadableError
from wpr.evaluation.judging.verdicts import CHOICES, read_letter, read_object


@pytest.mark.parametrize(
    "text", ["A", " A\n", "A.", '"A"', "**A**", "[[A]]", "(A)", "`A`", "<think>B or\nA</think>\nA"]
)
def test_letters(text: str) -> None:
    assert read_letter(text) == "A"


@pytest.mark.parametrize(
    "text", ["", "a", "C", "AB", "A B", "A or B", "Summary A", "Choice: A", "A, because", "<think>A", "Ä", "A\x00"]
)
def test_what_is_no_letter(text: str) -> None:
    with pytest.raises(UnreadableError, match="is not one of the letters A, B, E"):
        read_letter(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"comparison": "x", "choice": "B"}',
        '\n {"choice": "B", "comparison": "", "score": 3}\n',
        '```json\n{"comparison": "x", "choice": "B"}\n```',
        '```\n{"comparison": "x", "choice": "B"}\n```\n',
        '<think>{"choice": "A"}</think>{"comparison": "x", "choice": "B"}',
    ],
)
def test_objects(text: str) -> None:
    assert read_object(text) == "B"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON"),
        ("B", "not JSON"),
        ('{"choice": "A"', "not JSON"),
        ('Sure: {"comparison": "x", "choice": "A"}', "not JSON"),
        ('{"comparison": "x", "choice": "A"} {"comparison": "x", "choice": "B"}', "not JSON"),
        ("[1]", "no object with the key"),
        ('{"comparison": "x"}', "no object with the key"),
        ('{"comparison": "x", "choice": "C"}', "the choice '\"C\"' is not"),
        ('{"comparison": "x", "choice": ["A"]}', "is not"),
        ('{"comparison": "x", "choice": {}}', "is not"),
        ('{"comparison": "x", "choice": null}', "is not"),
        ('{"choice": "A"}', "no text under the key"),
        ('{"comparison": 1, "choice": "A"}', "no text under the key"),
        ('{"comparison": "x", "choice": "A", "choice": "B"}', "more than once"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_such_object(text: str, told: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        read_object(text)
    assert told in str(caught.value)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (read_letter, read_object):
        told = ""
        try:
            assert read(text) in CHOICES
        except UnreadableError as error:
            told = str(error)
        assert len(told) < 300


@given(st.sampled_from(CHOICES), st.text())
def test_any_comparison_is_read(choice: str, comparison: str) -> None:
    assert read_object(json.dumps({"comparison": comparison, "choice": choice})) == choice
