"""What counts as A, B or E, and what does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.evaluation.judging.asked import outcome
from tests.evaluation.judging.nasty import ANSWERS, LIMIT, seconds
from wpr.evaluation.judging.questions import UnreadableError
from wpr.evaluation.judging.verdicts import BRACKETS, CHOICES, read_letter, read_object


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
    ("text", "message"),
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
        ("[" * 2000, "nested too deeply"),
        ("9" * 5000, "it is not JSON (Exceeds the limit (4300 digits)"),
        ("[]," * (BRACKETS + 1), "it has 50,001 opening brackets, and at most 50,000 are read"),
        ('{"comparison": "x", "choice": %s}' % ("[" * 900 + "]" * 900), "the choice '" + "[" * 57 + "...' is not"),
        ('{"a": 1, "b": 1, "b": 1, "a": 1}', "the key 'a' stands in it more than once"),
    ],
)
def test_what_is_no_such_object(text: str, message: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        read_object(text)
    assert message in str(caught.value)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (read_letter, read_object):
        message = ""
        try:
            assert read(text) in CHOICES
        except UnreadableError as error:
            message = str(error)
        assert len(message) < 300


@given(st.sampled_from(CHOICES), st.text())
def test_any_comparison_is_read(choice: str, comparison: str) -> None:
    assert read_object(json.dumps({"comparison": comparison, "choice": choice})) == choice


# Against the expressions that were here before, which are slow where there is much white space.


def object_by_expressions(text: str) -> str:
    text = re.sub(r"\A\s*<think>.*?</think>", "", text, count=1, flags=re.DOTALL)
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", text, re.DOTALL)

    def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise UnreadableError(f"the key {name!r} stands in it more than once")
        return dict(pairs)

    try:
        found = json.loads(fenced.group(1) if fenced else text, object_pairs_hook=each_once)
    except json.JSONDecodeError as error:
        raise UnreadableError(f"it is not JSON ({error})") from None
    if not isinstance(found, dict) or "choice" not in found:
        raise UnreadableError('it is no object with the key "choice"')
    if found["choice"] not in CHOICES:
        shown = json.dumps(found["choice"])
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise UnreadableError(f'the choice {shown!r} is not "A", "B" or "E"')
    if not isinstance(found.get("comparison"), str):
        raise UnreadableError('it has no text under the key "comparison"')
    return str(found["choice"])


PIECES = ["```", "json", "\n", " ", "\t", "\u2003", "\x1c", "`", "x", '{"comparison": "", "choice": "A"}', "<think>",
          "</think>", '{"choice": 1, "choice": 1}']  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text("`\n \tjsonx{}", max_size=16))
@example("```\n```")
@example("``` ```")
@example("```json\n \n  x \n\n```\n")
@example("````\nx\n````")
def test_fences_and_thoughts_are_read_as_by_expressions(text: str) -> None:
    assert outcome(read_object, text) == outcome(object_by_expressions, text)


NESTED = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
)


@given(st.lists(st.tuples(st.sampled_from(["choice", "comparison", "a", "b"]), NESTED), max_size=6))
def test_keys_and_choices_are_told_as_before(pairs: list[tuple[str, Any]]) -> None:
    text = "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in pairs) + "}"
    assert outcome(read_object, text) == outcome(object_by_expressions, text)


@pytest.mark.parametrize("read", [read_letter, read_object])
@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS.keys())
def test_no_answer_of_a_megabyte_takes_long(read: Callable[[str], Any], text: str) -> None:
    assert seconds(read, text, UnreadableError) < LIMIT


def test_a_long_comparison_is_read() -> None:
    assert read_object(json.dumps({"comparison": "x " * 500_000, "choice": "B"})) == "B"
