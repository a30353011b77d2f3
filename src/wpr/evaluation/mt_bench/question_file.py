"""Questions in MT-Bench's public format, one per line:

    {"question_id": 81, "category": "writing", "turns": ["first question", "second"], "reference": ["...", "..."]}

``reference`` holds answers that are known to be right, one per turn; questions of writing and the like have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wpr.data.readers import read_records
from wpr.data.rows import BadRowError, DataError, checked_text, shown

TEMPERATURES = {
    "writing": 0.7,
    "roleplay": 0.7,
    "extraction": 0.0,
    "math": 0.0,
    "coding": 0.0,
    "reasoning": 0.0,
    "stem": 0.1,
    "humanities": 0.1,
}
"""At which MT-Bench lets models answer, by category."""

OTHER = 0.7
"""Of a category that MT-Bench does not have."""


@dataclass(frozen=True)
class BenchQuestion:
    """One question. references: of the first and the second turn, None where there is none."""

    question_id: str
    category: str
    turns: tuple[str, str]
    references: tuple[str | None, str | None] = (None, None)


def read_questions(path: Path, references: Path | None = None, limit: int | None = None) -> list[BenchQuestion]:
    """The first ``limit`` questions of a file.

    references: a file of reference answers as MT-Bench has them beside its questions (``question_id`` and
        ``choices[0].turns``); they come before those in the questions' own file.
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}; it must be 1 or more")
    known = {} if references is None else _reference_file(references)
    questions: dict[str, BenchQuestion] = {}
    for record in read_records(path, str(path)):
        if record.fault:
            raise DataError(f"{record.origin}: {record.fault}; fix the line, or take it out")
        try:
            question = _question(record.values, known)
        except BadRowError as error:
            raise DataError(f"{record.origin}: {error}") from None
        if question.question_id in questions:
            raise DataError(f"{record.origin} has the question_id {question.question_id} again; names must differ")
        questions[question.question_id] = question
        if limit is not None and len(questions) == limit:
            break
    return list(questions.values())


def temperatures(questions: Sequence[BenchQuestion], given: Mapping[str, float]) -> dict[str, float]:
    """The temperature of each category of the questions, ``given`` before MT-Bench's own."""
    found = {question.category: OTHER for question in questions}
    for name, value in given.items():
        if name not in found:
            raise DataError(
                f"a temperature is given for the category {name!r}, which no question has; they have {', '.join(found)}"
            )
        if not 0 <= value < float("inf"):
            raise DataError(f"the temperature of {name} is {value}; it must be 0 or more")
    return {name: given.get(name, TEMPERATURES.get(name, other)) for name, other in found.items()}


def _question(values: Mapping[str, Any], known: Mapping[str, tuple[str | None, str | None]]) -> BenchQuestion:
    name = _id(values)
    category = checked_text(values.get("category"), "category").strip()
    if not category:
        raise BadRowError("'category' is empty")
    first, second = _texts(values.get("turns"), "turns", 2)
    if first is None or second is None:
        raise BadRowError("'turns' has one question; two are needed")
    own = values.get("reference")
    references = known.get(name) or ((None, None) if not own else _texts(own, "reference", 1))
    return BenchQuestion(name, category, (first, second), references)


def _id(values: Mapping[str, Any]) -> str:
    found = values.get("question_id")
    if isinstance(found, bool) or not isinstance(found, str | int) or found == "":
        raise BadRowError(f"'question_id' is {shown(found)}; it must be a text or a whole number")
    return str(found)


def _texts(value: Any, name: str, least: int) -> tuple[str | None, str | None]:
    """One or two texts of a list, the second None if it is not there."""
    if not isinstance(value, list) or not least <= len(value) <= 2:
        wanted = "two texts" if least == 2 else "one or two texts, one per turn"
        raise BadRowError(f"{name!r} is {shown(value)}; a list of {wanted} is needed")
    texts = [checked_text(text, name) for text in value]
    for number, text in enumerate(texts, 1):
        if least == 2 and not text.strip():
            raise BadRowError(f"turn {number} of {name!r} is empty")
    filled = [text if text.strip() else None for text in texts]
    return filled[0], filled[1] if len(filled) == 2 else None


def _reference_file(path: Path) -> dict[str, tuple[str | None, str | None]]:
    found = {}
    for record in read_records(path, str(path)):
        try:
            if record.fault:
                raise BadRowError(record.fault)
            choices = record.values.get("choices")
            if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
                raise BadRowError(f"'choices' is {shown(choices)}; a list with an object that has turns is needed")
            found[_id(record.values)] = _texts(choices[0].get("turns"), "choices[0].turns", 1)
        except BadRowError as error:
            raise DataError(f"{record.origin}: {error}") from None
    return found
