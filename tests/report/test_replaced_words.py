"""What became of a word: cases that can be told by hand, and what must hold of any two texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wpr.report.replaced_words import LONGEST, Rewrite, marked_words
from wpr.rewards import WordList
from wpr.rewards.words import WordTable, find_words, folded, read_entries

TABLE = WordTable(read_entries(["big", "happy", "in order to", "run*"]))


def found(source: str, response: str) -> list[tuple[str, str, str]]:
    return [(one.entry.text, one.what, one.instead) for one in Rewrite(source, response).outcomes(TABLE)]


@pytest.mark.parametrize(
    ("source", "response", "outcomes"),
    [
        ("The big dog.", "The large dog.", [("big", "replaced", "large")]),
        ("The big dog.", "The BIG dog!", [("big", "kept", "big")]),
        ("The bigs dog.", "The big dog.", [("big", "replaced", "big")]),
        ("The big dog.", "The dog.", [("big", "left out", "")]),
        ("The big dog.", "The very large dog.", [("big", "replaced", "very large")]),
        ("The big dog.", "The one that is not small dog.", [("big", "rephrased", "")]),
        ("The big old dog.", "The huge dog.", [("big", "rephrased", "")]),
        ("The big old dog.", "The huge grey dog.", [("big", "replaced", "huge")]),
        ("A big happy dog.", "A happy dog.", [("big", "left out", ""), ("happy", "kept", "happy")]),
        ("Big, big hat.", "Wide, big hat.", [("big", "replaced", "wide"), ("big", "kept", "big")]),
        ("We ate in order to live.", "We ate to live.", [("in order to", "replaced", "to")]),
        ("We ate in order to live.", "We ate in order to live.", [("in order to", "kept", "in order to")]),
        ("We ate in order to live.", "We live.", [("in order to", "left out", "")]),
        ("He runs.", "He walks.", [("run*", "replaced", "walks")]),
        ("A big dog.", "", [("big", "left out", "")]),
        ("A big dog.", "...", [("big", "left out", "")]),
        ("A dog.", "A big dog.", []),
        ("", "big", []),
    ],
)
def test_by_hand(source: str, response: str, outcomes: list[tuple[str, str, str]]) -> None:
    assert found(source, response) == outcomes


def test_where_a_replacement_begins() -> None:
    response = "  «The» very large dog ran happily home."
    first, second = Rewrite("The big dog was happy at home.", response).outcomes(TABLE)
    assert response[first.start :].startswith("very large")
    assert second.what == "rephrased"


def test_marks_of_a_text() -> None:
    text = "In order to see, a big cat."
    assert [text[start:end] for start, end, forbidden, _ in marked_words(text, TABLE) if forbidden] == [
        "In", "order", "to", "big",
    ]  # fmt: skip
    marks = marked_words(text, TABLE, {5, 6})
    assert [(text[start:end], *kinds) for start, end, *kinds in marks][-2:] == [
        ("big", True, True), ("cat", False, True),
    ]  # fmt: skip


texts = st.lists(
    st.sampled_from(["big", "Happy", "in", "order", "to", "running", "a", "dog", ",", "-", "été", "<b>", "\n", "東京"]),
    max_size=12,
).map(" ".join)


@given(texts, texts)
def test_of_any_two_texts(source: str, response: str) -> None:
    rewrite = Rewrite(source, response)
    outcomes = list(rewrite.outcomes(TABLE))
    assert [one.entry for one in outcomes] == [entry for entry, _, _ in TABLE.find(source)]
    words = [folded(word.group()) for word in find_words(response)]
    assert rewrite.new <= set(range(len(words)))
    for one in outcomes:
        assert (one.what in ("replaced", "kept")) == bool(one.instead)
        if one.instead:
            after = [folded(word.group()) for word in find_words(response[one.start :])]
            assert " ".join(after).startswith(one.instead)


@given(texts)
def test_a_copy_keeps_all(text: str) -> None:
    rewrite = Rewrite(text, text)
    assert rewrite.new == set()
    assert {one.what for one in rewrite.outcomes(TABLE)} <= {"kept"}


@given(texts)
def test_what_is_found_is_what_the_reward_counts(text: str) -> None:
    assert -sum(entry.weight for entry, _, _ in TABLE.find(text)) == WordList(
        ["big", "happy", "in order to", "run*"]
    ).score(text)


def test_long_texts_are_aligned_as_far_as_that_goes() -> None:
    source = " ".join(["big", *["dog"] * LONGEST, "happy"])
    assert found(source, source.replace("big", "odd").replace("happy", "sad")) == [("big", "replaced", "odd")]
