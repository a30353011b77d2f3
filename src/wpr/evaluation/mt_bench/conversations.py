"""A model's side of MT-Bench: the first turn's answers, then the second turn's with the first in front of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wpr.data import Encoder, Message, Row
from wpr.evaluation.mt_bench.question_file import BenchQuestion
from wpr.evaluation.response_generation import EncodedPrompt
from wpr.runs.responses import ResponseFile


def first_turn(
    questions: Sequence[BenchQuestion], encoder: Encoder, temperatures: Mapping[str, float]
) -> list[EncodedPrompt]:
    """The first questions as prompts."""
    return [_asked(question, [_said("user", question.turns[0])], encoder, temperatures) for question in questions]


def second_turn(
    questions: Sequence[BenchQuestion], first: ResponseFile, encoder: Encoder, temperatures: Mapping[str, float]
) -> list[EncodedPrompt]:
    """The second questions, each after the first one and the model's answer to it."""
    answers = first.by_prompt()
    return [
        _asked(
            question,
            [
                _said("user", question.turns[0]),
                _said("assistant", answers[question.question_id].response),
                _said("user", question.turns[1]),
            ],
            encoder,
            temperatures,
        )
        for question in questions
    ]


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _asked(
    question: BenchQuestion, messages: list[Message], encoder: Encoder, temperatures: Mapping[str, float]
) -> EncodedPrompt:
    row = Row(tuple(messages), origin=f"question {question.question_id}")
    return EncodedPrompt(question.question_id, messages, encoder.prompt(row), temperatures[question.category])
