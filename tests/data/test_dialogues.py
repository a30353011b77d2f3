"""Transcripts to turns and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wpr.data.dialogues import MARKER, parse_transcript, render_transcript
from wpr.data.rows import BadRowError, Message


def dialogue(*said: str) -> list[Message]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]


contents = st.one_of(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=30),
    st.lists(st.sampled_from(["Human:", "Assistant:", "\n", "\n\n", " ", "yes", "Humans:", "\t"]), max_size=6).map(
        "".join
    ),
).map(str.strip)
"""What a turn may hold: anything but white space around it, nothing at all, or the beginning of another turn."""


@given(st.lists(contents.filter(lambda text: text and not MARKER.search("." + text)), min_size=1, max_size=6))
def test_round_trip(said: list[str]) -> None:
    turns = dialogue(*said)
    assert parse_transcript(render_transcript(turns)) == turns


def test_the_prompt_ends_where_the_assistant_begins() -> None:
    assert render_transcript(dialogue("Hello"), answer=True) == "\n\nHuman: Hello\n\nAssistant:"


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("Human: Hello\n\nAssistant: Hi", dialogue("Hello", "Hi")),
        ("\n\nHuman:Hello \n\n\nAssistant:   Hi\n", dialogue("Hello", "Hi")),
        ("\n\nHuman: Hello\n\nAssistant:", dialogue("Hello", "")),
        # Speakers within a line are text; so is another word that begins the same.
        ("\n\nHuman: a Human: b\nAssistant: c\n\nHumans: d", dialogue("a Human: b\nAssistant: c\n\nHumans: d")),
        # One who speaks twice has one turn.
        ("\n\nHuman: a\n\nAssistant: b\n\nAssistant: c\n\nHuman: d", dialogue("a", "b\n\nc", "d")),
        ("\n\nHuman: a\n\nAssistant:\n\nAssistant: c", dialogue("a", "c")),
    ],
)
def test_odd_transcripts(text: str, turns: list[Message]) -> None:
    assert parse_transcript(text) == turns


@pytest.mark.parametrize("text", ["Hello", "", "Hello\n\nHuman: a", "\n\nAssistant: Hi\n\nHuman: a"])
def test_a_transcript_begins_with_the_human(text: str) -> None:
    with pytest.raises(BadRowError, match="not with 'Human:'"):
        parse_transcript(text)
