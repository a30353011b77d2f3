"""Eighty two-turn questions of our own in MT-Bench's format: `python -m tests.evaluation.mt_bench.eighty FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

THINGS = ["a river", "the moon", "a bakery", "a clock", "a bicycle", "an orchard", "a lighthouse", "a library", "rain",
          "a bridge"]  # fmt: skip


def questions() -> list[dict[str, Any]]:
    """Ten of each of the eight categories; those of math and reasoning have reference answers."""
    made: list[dict[str, Any]] = []
    for n, thing in enumerate(THINGS, 2):
        asked: dict[str, tuple[str, str]] = {
            "writing": (f"Write two sentences about {thing}.", "Say the same in one sentence."),
            "roleplay": (f"Speak as if you were {thing}. Who are you?", "What are you afraid of?"),
            "reasoning": (f"Tom is {n} years older than Ann, who is 9. How old is Tom?", "And in three years?"),
            "math": (f"What is {n} times 7?", "Add 5 to that."),
            "coding": (f"Write a Python function that returns {n} times its argument.", "Now without multiplication."),
            "extraction": (f"List the nouns in: Ann saw {thing} and {n} dogs.", "Which of them is a number of?"),
            "stem": (f"Why does {thing} matter for the climate?", "Name one way to measure that."),
            "humanities": (f"What did {thing} mean to poets?", "Name one of them."),
        }
        for category, turns in asked.items():
            row: dict[str, Any] = {"question_id": len(made) + 81, "category": category, "turns": list(turns)}
            if category == "math":
                row["reference"] = [str(n * 7), str(n * 7 + 5)]
            if category == "reasoning":
                row["reference"] = [str(n + 9), str(n + 12)]
            made.append(row)
    return made


def write(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in questions()), encoding="utf-8")
    return path


if __name__ == "__main__":
    write(Path(sys.argv[1]))
