"""From conversations to questions for a judge, and from the judge's answers to grades."""

from __future__ import annotations

from collections.abc import Sequence

from wpr.evaluation.judging.asking import JudgeResults
from wpr.evaluation.judging.questions import Answer, Message, Question
from wpr.evaluation.mt_bench.grading_rubric import (
    ANSWER_FORM,
    GradingRubric,
    grading_prompt,
    read_number,
    read_rating,
)
from wpr.evaluation.mt_bench.question_file import BenchQuestion
from wpr.evaluation.mt_bench.scores import Grade
from wpr.runs.responses import ResponseFile

TURNS = (1, 2)


def to_be_graded(
    model: str,
    questions: Sequence[BenchQuestion],
    answers: Sequence[ResponseFile],
    bare_numbers: bool = False,
    rubric: GradingRubric | None = None,
) -> list[Question]:
    """One question for the judge about each answer.

    answers: of the first and of the second turn. bare_numbers: the judge is a function, which may return a number. It
    is called with ``questions`` and ``answers`` (lists, one text a turn so far), ``reference`` (None if there is none),
    ``category`` and ``turn``. rubric: of a file; None for ours.
    """
    turns = [file.by_prompt() for file in answers]
    asked = []
    for question in questions:
        given = (turns[0][question.question_id].response, turns[1][question.question_id].response)
        for turn in TURNS:
            asked.append(
                Question(
                    _name(model, question, turn),
                    _messages(question, given, turn, rubric),
                    {
                        "questions": list(question.turns[:turn]),
                        "answers": list(given[:turn]),
                        "reference": question.references[turn - 1],
                        "category": question.category,
                        "turn": turn,
                    },
                    read_number if bare_numbers else read_rating,
                    ANSWER_FORM,
                )
            )
    return asked


def _messages(
    question: BenchQuestion, answers: tuple[str, str], turn: int, rubric: GradingRubric | None
) -> tuple[Message, ...]:
    if rubric is not None:
        return rubric.messages(question, answers, turn)
    return ({"role": "user", "content": grading_prompt(question, answers, turn)},)


def grades_of(model: str, questions: Sequence[BenchQuestion], asked: JudgeResults) -> list[Grade]:
    """What the judge said of a model's answers."""
    return [
        _grade(question.question_id, turn, asked.answers[_name(model, question, turn)])
        for question in questions
        for turn in TURNS
    ]


def _grade(name: str, turn: int, answer: Answer) -> Grade:
    status = {"read": "graded", "unreadable": "unparsable"}.get(answer.status, "failed")
    return Grade(name, turn, answer.value, status, answer.reason, [reply.text for reply in answer.replies])


def _name(model: str, question: BenchQuestion, turn: int) -> str:
    return f"{model} {question.question_id} {turn}"
