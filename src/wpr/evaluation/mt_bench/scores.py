"""MT-Bench's scores: means of the ratings by category and turn, with what could not be graded in sight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wpr.evaluation.mt_bench.grading_rubric import HIGHEST, LOWEST
from wpr.evaluation.mt_bench.question_file import BenchQuestion
from wpr.findings import Cell, Figure, Finding, Series

COLUMNS = [
    "model", "category", "questions", "score", "standard_error", "turn_1", "turn_2", "graded", "unparsable", "failed",
]  # fmt: skip
EVERYTHING = "all"


@dataclass(frozen=True)
class Grade:
    """What a judge said of one answer.

    rating: None where it gave none. status: ``graded``, ``unparsable`` (no rating in the judge's words, also after it
    was told so) or ``failed`` (no answer from the judge). reason: why there is none. words: all that the judge said.
    """

    question_id: str
    turn: int
    rating: float | None
    status: str
    reason: str = ""
    words: list[str] = field(default_factory=list)


def score_rows(model: str, questions: Sequence[BenchQuestion], grades: Sequence[Grade]) -> list[list[Cell]]:
    """Table rows of a model: a category each, and all together."""
    categories = {question.question_id: question.category for question in questions}
    names = [*dict.fromkeys(categories.values()), EVERYTHING]
    return [_row(model, name, [g for g in grades if name in (EVERYTHING, categories[g.question_id])]) for name in names]


def mt_bench_finding(
    name: str,
    judge: str,
    questions: Sequence[BenchQuestion],
    grades: Mapping[str, Sequence[Grade]],
    settings: dict[str, Any],
) -> Finding:
    """The table and the radar of all models."""
    rows = [row for model, own in grades.items() for row in score_rows(model, questions, own)]
    text = [
        f"{len(questions)} two-turn questions, each answer graded from 1 to 10 by {judge}. score: mean of all ratings; "
        "standard_error: of the mean over questions, whose two turns count as one observation; turn_1 and turn_2: "
        "means of each turn. Only graded answers count in the means; unparsable ones got no rating in [[n]] form, "
        "failed ones no answer from the judge."
    ]
    for model, own in grades.items():
        missing = sum(grade.rating is None for grade in own)
        if missing:
            known = sum(grade.rating for grade in own if grade.rating is not None)
            low, high = ((known + missing * end) / len(own) for end in (LOWEST, HIGHEST))
            text.append(
                f"Warning: {missing} of {len(own)} answers of {model} have no rating; with them its score could lie "
                f"anywhere between {low:.2f} and {high:.2f}."
            )
    series = [
        Series(
            model,
            [str(row[1]) for row in rows if row[0] == model and row[1] != EVERYTHING],
            [_value(row[3]) for row in rows if row[0] == model and row[1] != EVERYTHING],
        )
        for model in grades
    ]
    return Finding(
        name=name,
        title=f"MT-Bench, graded by {judge}",
        text=text,
        columns=COLUMNS,
        rows=rows,
        figures=[Figure("radar", "MT-Bench by category", "category", "score, 1 to 10", series, includes=[10.0])],
        settings=settings,
    )


def _row(model: str, name: str, grades: Sequence[Grade]) -> list[Cell]:
    counts = {status: sum(g.status == status for g in grades) for status in ("graded", "unparsable", "failed")}
    by_question: dict[str, list[float]] = {}
    for grade in grades:
        if grade.rating is not None:
            by_question.setdefault(grade.question_id, []).append(grade.rating)
    ratings = [rating for group in by_question.values() for rating in group]
    turns = [_mean([g.rating for g in grades if g.turn == turn and g.rating is not None]) for turn in (1, 2)]
    score = _mean(ratings)
    questions = len({grade.question_id for grade in grades})
    error = None if score is None else _standard_error(list(by_question.values()), score)
    return [model, name, questions, score, error, *turns, *counts.values()]


def _standard_error(groups: Sequence[Sequence[float]], mean: float) -> float | None:
    """Of a mean over all N values in G independent groups: sqrt(G/(G-1) sum_g (sum_{i in g} (y_i - mean))^2) / N."""
    if len(groups) < 2:
        return None
    total = sum(len(group) for group in groups)
    spread = sum((sum(group) - len(group) * mean) ** 2 for group in groups)
    return math.sqrt(spread * len(groups) / (len(groups) - 1)) / total


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _value(cell: Cell) -> float:
    return math.nan if cell is None or isinstance(cell, str) else float(cell)
