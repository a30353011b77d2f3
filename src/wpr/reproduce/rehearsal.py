"""What a rehearsal uses where nothing else is given: small programming problems, two-turn questions, a grading rule.

They make every command run; what comes of them says nothing about a model.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wpr.atomic_io import write_atomically

GRADE = "wpr.reproduce.rehearsal:grade"
PROBLEMS, QUESTIONS = Path("rehearsal/problems.jsonl"), Path("rehearsal/questions.jsonl")
"""Below the folder of runs."""
LEVELS = ("introductory", "interview", "competition")
OPERATIONS = {"sum": ("+", operator.add), "difference": ("-", operator.sub), "product": ("*", operator.mul)}
TURNS = {
    "writing": ("Write a sentence about {}.", "Write it again, shorter."),
    "reasoning": ("Is there more of {} in summer or in winter?", "Why?"),
}
THINGS = ("rain", "snow", "bread", "music", "traffic", "light")


def problems_file(folder: Path, count: int = 90) -> Path:
    """Problems in APPS's format, three levels alike, to ``folder``; each asks for one operation on two numbers."""
    rows = []
    for number in range(count):
        word, (sign, apply) = list(OPERATIONS.items())[number % 3]
        cases = [(number + 1, 2), (7, number), (10 * number, 3)]
        program = f"a, b = map(int, input().split())\nprint(a {sign} b)\n"
        tests = {"inputs": [f"{a} {b}\n" for a, b in cases], "outputs": [f"{apply(a, b)}\n" for a, b in cases]}
        rows.append({
            "problem_id": number, "difficulty": LEVELS[number // 3 % 3], "starter_code": "",
            "question": f"Read two integers. Print their {word} and then stop. (Variant {number}.)",
            "solutions": json.dumps([program]), "input_output": json.dumps(tests),
        })  # fmt: skip
    return _write(folder / PROBLEMS, rows)


def questions_file(folder: Path) -> Path:
    """Questions in MT-Bench's format, to ``folder``."""
    rows = (
        {"question_id": f"{category}-{thing}", "category": category, "turns": [turns[0].format(thing), turns[1]]}
        for category, turns in TURNS.items()
        for thing in THINGS
    )
    return _write(folder / QUESTIONS, rows)


def grade(answers: Sequence[str], **others: Any) -> int:
    """A grade from 1 to 10 by the number of different words of the last answer. It stands in for a judge."""
    return min(10, 1 + len(set(answers[-1].split())) // 2)


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return path
