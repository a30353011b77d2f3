"""Programming problems with their tests, as the APPS dataset writes them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class ProblemError(ValueError):
    """A problem that no program can be scored on: no tests, or tests that cannot be read."""


@dataclass(frozen=True)
class Case:
    """What goes in and what must come out.

    given: the text of standard input; or, for a problem with a function, the list of its arguments.
    expected: the text of standard output; or the returned value, as JSON has it.
    """

    given: Any
    expected: Any


PASSES = Case([], "passed")
"""A check that runs to its end."""


@dataclass(frozen=True)
class CodeProblem:
    """A problem's tests, never empty.

    fn_name: the function that is called, on its own or as a method of a class ``Solution``; None where a program reads
        standard input and writes standard output.
    difficulty: for `pass_at_1`, such as ``introductory``, ``interview`` and ``competition``.
    problem_id: what messages call it.
    starter_code: the first lines of the function, which the prompt shows.
    bare: without the names that APPS's tester has ready (``List``, ``deque``, ``sqrt``, ...): a program imports what it
        uses.
    check: source of a program that calls ``fn_name`` and asserts what it returns, as HumanEval's tests do. It runs in a
        sandbox of its own, where the name stands for the function in the other. That gets and gives plain values: None,
        numbers, text, bytes, and lists, tuples, sets and dictionaries of them. The one test is then `PASSES`.
    """

    tests: tuple[Case, ...]
    fn_name: str | None = None
    difficulty: str = "unknown"
    problem_id: str = "problem"
    starter_code: str = ""
    bare: bool = False
    check: str | None = None

    def __post_init__(self) -> None:
        if not self.tests:
            raise ProblemError(f"{self.problem_id} has no tests, so no program can be scored on it; filter it out")
        if self.check is not None and (self.fn_name is None or self.tests != (PASSES,)):
            raise ProblemError(f"{self.problem_id} has a check; it needs fn_name, and (PASSES,) for its tests")


def parse_problem(
    input_output: str | Mapping[str, Any] | None,
    *,
    fn_name: str | None = None,
    difficulty: str = "unknown",
    problem_id: str = "problem",
    starter_code: str = "",
) -> CodeProblem:
    """A problem from APPS's ``input_output`` column: ``{"inputs": [...], "outputs": [...], "fn_name": ...}``, as JSON
    text or already read. ``fn_name`` is for datasets that keep it in a column of its own.

    Raises `ProblemError` where there are no tests, where inputs and outputs are not as many, or where they are of the
    wrong kind.
    """
    data = _read(input_output, problem_id)
    inputs, outputs = data.get("inputs"), data.get("outputs")
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        raise ProblemError(f"{problem_id} has no list of inputs and outputs, so it has no tests; filter it out")
    if not inputs and not outputs:
        raise ProblemError(f"{problem_id} has no tests, so no program can be scored on it; filter it out")
    if len(inputs) != len(outputs):
        raise ProblemError(
            f"{problem_id} has {len(inputs)} inputs but {len(outputs)} outputs; each test needs one of both"
        )
    name = data.get("fn_name") or fn_name or None
    if name is not None and (not isinstance(name, str) or not name.isidentifier()):
        raise ProblemError(f"{problem_id} has fn_name={name!r}, which is no name of a function")
    pairs = enumerate(zip(inputs, outputs, strict=True))
    if name is None:
        tests = tuple(
            Case(_text(given, f"{problem_id}, input {i}"), _text(expected, f"{problem_id}, output {i}"))
            for i, (given, expected) in pairs
        )
    else:
        tests = tuple(Case(_arguments(given, f"{problem_id}, input {i}"), expected) for i, (given, expected) in pairs)
    return CodeProblem(tests, name, difficulty, problem_id, starter_code)


def read_json(text: str | bytes) -> Any:
    """JSON with whole numbers of up to 100,000 digits, as some answers have; Python alone stops at 4,300.

    Raises ValueError or RecursionError for anything else.
    """
    return json.loads(text, parse_int=_whole_number)


def _whole_number(text: str) -> int:
    piece, most = 4000, 100_000  # reading takes time that grows with the square, so there must be an end
    if len(text) <= piece:
        return int(text)
    if len(text) > most:
        raise ValueError(f"a whole number of {len(text)} digits; {most} are read")
    digits, value = text.lstrip("-"), 0
    for start in range(0, len(digits), piece):
        part = digits[start : start + piece]
        value = value * 10 ** len(part) + int(part)
    return -value if text.startswith("-") else value


def _read(input_output: str | Mapping[str, Any] | None, problem_id: str) -> Mapping[str, Any]:
    if isinstance(input_output, str) and input_output.strip():
        try:
            input_output = read_json(input_output)
        except (ValueError, RecursionError) as error:
            raise ProblemError(f"{problem_id}: input_output is no JSON ({error})") from None
    if not input_output:
        raise ProblemError(f"{problem_id} has no tests (input_output is empty); filter it out")
    if not isinstance(input_output, Mapping):
        raise ProblemError(
            f"{problem_id}: input_output is a {type(input_output).__name__}; it must have inputs and outputs"
        )
    return input_output


def _text(value: Any, where: str) -> str:
    """Standard input or output: text, or a list of its lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise ProblemError(f"{where} is {value!r:.80}; without fn_name it must be text or a list of lines")


def _arguments(value: Any, where: str) -> list[Any]:
    """A function's arguments. A single dictionary gets its whole-number keys back, which JSON had made text."""
    if not isinstance(value, list | tuple):
        raise ProblemError(f"{where} is {value!r:.80}; with fn_name it must be the list of arguments")
    arguments = list(value)
    if len(arguments) == 1 and isinstance(arguments[0], dict):
        with contextlib.suppress(ValueError):  # the keys are words
            arguments = [{int(key): item for key, item in arguments[0].items()}]
    return arguments
