"""Dialogues: Anthropic's ``Human:`` / ``Assistant:`` transcripts, and lists of chat messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from wpr.data.rows import BadRowError, Message, checked_text, shown

MARKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
"""A new turn. Speakers named within a line are text: the models that wrote HH-RLHF sometimes went on as the human."""

_ROLES = {"Human": "user", "Assistant": "assistant"}
_SPEAKERS = {"user": "Human", "assistant": "Assistant", "system": "System"}


def parse_transcript(text: str) -> list[Message]:
    """The turns of a transcript, without the white space around them.

    A speaker who speaks twice in a row (22 of the 4,708 transcripts of helpful-base's test set) has one turn, of both
    texts: chat templates demand that speakers take turns.
    """
    before, *rest = MARKER.split(text)
    if before.strip() or not rest:
        raise BadRowError(f"the transcript begins with {shown(text[:40])}, not with 'Human:'")
    turns: list[Message] = []
    for speaker, said in zip(rest[::2], rest[1::2], strict=True):
        role, content = _ROLES[speaker], said.strip()
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] = "\n\n".join(filter(None, (turns[-1]["content"], content)))
        else:
            turns.append({"role": role, "content": content})
    if turns[0]["role"] != "user":
        raise BadRowError("the transcript begins with 'Assistant:', not with 'Human:'")
    return turns


def render_transcript(turns: Sequence[Message], answer: bool = False) -> str:
    """The transcript of some turns; with ``answer``, up to where the assistant's next turn begins."""
    text = "".join(f"\n\n{_SPEAKERS[turn['role']]}: {turn['content']}" for turn in turns)
    return text + "\n\nAssistant:" if answer else text


def as_messages(value: Any, column: str) -> list[Message]:
    """A column's list of chat messages, checked; other keys than role and content are left out."""
    turns = []
    for number, turn in enumerate(value, 1):
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if not isinstance(role, str) or role not in _SPEAKERS or not isinstance(content, str):
            raise BadRowError(
                f"message {number} of {column!r} is {shown(turn)}; a message has a role ({', '.join(_SPEAKERS)}) and a "
                "content of text"
            )
        turns.append({"role": role, "content": checked_text(content, column)})
    return turns


def answered(turns: Sequence[Message], column: str) -> tuple[tuple[Message, ...], str]:
    """A dialogue as its prompt and the last assistant turn."""
    if not turns:
        raise BadRowError(f"{column!r} is a dialogue without a turn")
    if turns[-1]["role"] != "assistant":
        raise BadRowError(f"{column!r} ends with a {turns[-1]['role']} turn; the last turn must be the assistant's")
    return tuple(turns[:-1]), turns[-1]["content"]


def check_prompt(turns: Sequence[Message]) -> tuple[Message, ...]:
    """A dialogue that an assistant can answer: no empty turn, and the last one the user's."""
    if not turns:
        raise BadRowError("the prompt is a dialogue without a turn")
    for number, turn in enumerate(turns, 1):
        if not turn["content"].strip():
            raise BadRowError(f"turn {number} of the prompt ({turn['role']}) is empty")
    if turns[-1]["role"] != "user":
        raise BadRowError(
            f"the prompt ends with a turn of role {turns[-1]['role']!r}; the last turn must be the user's"
        )
    return tuple(turns)


def same_prompt(chosen: Sequence[Message], rejected: Sequence[Message]) -> None:
    """Refuse two dialogues that part before their last turn: they answer different prompts."""
    if list(chosen) == list(rejected):
        return
    pairs = zip(chosen, rejected, strict=False)
    turn = next((number for number, (one, other) in enumerate(pairs, 1) if one != other), None)
    turn = min(len(chosen), len(rejected)) + 1 if turn is None else turn
    raise BadRowError(
        f"chosen and rejected part at turn {turn}, before the last one (of {len(chosen) + 1} and {len(rejected) + 1}); "
        "they must answer the same prompt"
    )
