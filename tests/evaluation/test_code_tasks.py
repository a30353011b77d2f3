"""From responses to programs, and what becomes of them in the sandbox."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.humaneval_like import PROBLEMS, write
from tests.rewards.code.programs import isolated
from wpr.data.readers import Record
from wpr.data.rows import DataError
from wpr.evaluation.code_scores import kind_of
from wpr.evaluation.code_tasks import CodeTask, Style, answered, completed, humaneval_file, humaneval_task, read_tasks
from wpr.rewards.code import Limits, Outcome, Runner


def task(number: int, style: Style) -> CodeTask:
    return humaneval_task(Record("here:1", PROBLEMS[number]), style)


def kind(made: CodeTask, response: str) -> str:
    runner = Runner(Limits(wall_seconds=20, cpu_seconds=1), workers=1)
    return kind_of(runner.run([(made.program(response), made.problem)])[0])


@isolated
@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("    return sum(numbers)\n", "passed"),
        ("    return sum(numbers)\n\n\ndef other():\n    this is cut off", "passed"),
        ("    return sum(numbers)\n\nprint(total([1]))\n# and so on ((", "passed"),
        ("    print('noise')\n    return sum(numbers)\n", "passed"),
        ("    x: List[int] = numbers\n    return sum(x)\n", "passed"),  # the prompt imports List
        ("    return 3\n", "wrong"),
        ("    return missing\n", "error"),
        ("    return math.fsum(numbers)\n", "error"),  # nothing is imported that the program does not import
        ("    while True:\n        pass\n", "timeout"),
        ("    return ((\n", "syntax"),
        ("", "wrong"),  # a function that has nothing but its documentation returns None
        ("    raise SystemExit(0)\n", "wrong"),
        ("    import os\n    os._exit(0)\n", "wrong"),
    ],
)
def test_completions(response: str, expected: str) -> None:
    assert kind(task(0, "complete"), response) == expected


@isolated
@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("Sure!\n```python\ndef quadruple(x):\n    return double(double(x))\n```\nIt doubles twice.", "passed"),
        ("```python\nfrom __future__ import annotations\ndef quadruple(x):\n    return 4 * x\n```", "passed"),
        ("```\ndef quadruple(x):\n    return 4 * x\nprint(quadruple(2))\n", "passed"),  # cut off, no closing fence
        ("```python\n    return double(double(x))\n```", "passed"),  # only the body
        ("1. So:\n    ```python\n    y = double(x)\n    return double(y)\n    ```", "passed"),  # as far in as its fence
        ("def quadruple(x):\n    return 4 * x", "passed"),
        ("```python\ndef quadruple(x):\n    return 5 * x\n```", "wrong"),
        ("```python\ndef check(candidate):\n    pass\ndef quadruple(x):\n    return 0\n```", "wrong"),
        ("```python\nimport sys\nsys.exit(0)\n```", "wrong"),
        # Attempts to pass without an answer.
        ("```\nimport os\nos.write(3, b'\"passed\"')\nos._exit(0)\ndef quadruple(x): return 0\n```", "wrong"),
        ("```\nimport json\njson.dumps = lambda *a, **k: '\"passed\"'\ndef quadruple(x): return 0\n```", "error"),
        (
            "```\nclass Same:\n    def __eq__(self, other): return True\ndef quadruple(x): return Same()\n```",
            "wrong",
        ),
        ("I cannot do that.", "syntax"),
    ],
)
def test_answers(response: str, expected: str) -> None:
    assert kind(task(1, "chat"), response) == expected


@pytest.mark.parametrize("start", ["", "```python\n", "  ````\n", '```\n"""\n', "def f(x):\n"])
@pytest.mark.parametrize(
    "piece",
    [" ", "\t", "\n", " \n", "\r\n", "\f", "async ", "async\n", "def ", "def\n", "def f", "def f\n", "async def ", "`",
     "```", "```\n", "``` x\n", "~~~\n", "'", "'''", "'''\n```\n'''\n", '"""a', "#\n", "\\\n", "x'\n",
     "from __future__ import ", "from __future__ import a\n"],
)  # fmt: skip
def test_long_responses_are_read_in_no_time(start: str, piece: str) -> None:
    """A megabyte of anything, of which every line, word or quote could begin what is looked for."""
    response = (start + piece * (2**20 // len(piece)))[: 2**20]
    seconds = []
    for _ in range(3):  # the best of three: the processor's caches belong to others too
        before = time.process_time()
        answered("def f(x):\n", "f", response)
        completed("def f(x):\n", "f", response)
        seconds.append(time.process_time() - before)
        if seconds[-1] < 0.1:
            return
    pytest.fail(f"{min(seconds):.2f} seconds of processor time")


def test_what_is_asked() -> None:
    assert task(0, "complete").row.prompt == PROBLEMS[0]["prompt"]
    assert PROBLEMS[0]["prompt"].strip() in task(0, "chat").row.prompt


@isolated
@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("    return [4 * x for x in xs]", "passed"),
        ("    return xs", "wrong"),
        ("    global double\n    double = lambda x: 0\n    return [0] * len(xs)", "wrong"),
    ],
)
def test_the_prompts_own_functions(response: str, expected: str) -> None:
    """Which HumanEval's tests use: those of the prompt, not what the program made of them."""
    prompt = 'def double(x):\n    return 2 * x\n\n\ndef all4(xs):\n    """Four times each."""\n'
    test = "def check(candidate):\n    assert candidate([2, 3]) == [double(double(x)) for x in (2, 3)]\n"
    values = {"task_id": "Made/2", "prompt": prompt, "entry_point": "all4", "test": test}
    assert kind(humaneval_task(Record("here:1", values), "complete"), response) == expected


@isolated
def test_humaneval_itself_is_solved_by_its_own_solutions() -> None:
    path = humaneval_file()
    with gzip.open(path, "rt", encoding="utf-8") as file:
        solutions = {row["task_id"]: row["canonical_solution"] for row in map(json.loads, file)}
    name, tasks = read_tasks(path, "complete")
    assert (name, len(tasks)) == ("humaneval", 164)
    runner = Runner(Limits(wall_seconds=60, cpu_seconds=30))
    outcomes = runner.run([(one.program(solutions[one.task_id]), one.problem) for one in tasks])
    assert [one.task_id for one, outcome in zip(tasks, outcomes, strict=True) if not outcome.passed] == []


@isolated
def test_apps(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "Add.", "input_output": {"inputs": ["1 2\n"], "outputs": ["3\n"]}, "difficulty": "interview"},
        {
            "question": "Twice.",
            "input_output": '{"inputs": [[2]], "outputs": [4], "fn_name": "twice"}',
            "problem_id": 9,
        },
    ]
    path = tmp_path / "apps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    name, tasks = read_tasks(path, "complete")
    assert name == "apps"
    assert [(one.task_id, one.problem.difficulty) for one in tasks] == [("1", "interview"), ("9", "unknown")]
    assert kind(tasks[0], "```python\nprint(sum(map(int, input().split())))\n```") == "passed"
    assert kind(tasks[0], "print(4)") == "wrong"
    assert kind(tasks[1], "def twice(x): return 2 * x") == "passed"


def test_limits_and_faults(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert len(read_tasks(path, "chat", limit=1)[1]) == 1
    bad = tmp_path / "bad.jsonl"
    for row, message in (
        (PROBLEMS[0] | {"entry_point": "a b"}, "no name of a function"),
        (PROBLEMS[0] | {"prompt": ""}, "'prompt' is ''"),
        ({"question": "x"}, "input_output"),
    ):
        bad.write_text(json.dumps(row) + "\n")
        with pytest.raises(DataError, match=message):
            read_tasks(bad, "chat")
    bad.write_text(json.dumps(PROBLEMS[0]) + "\n" + json.dumps(PROBLEMS[0]) + "\n")
    with pytest.raises(DataError, match="task 'Made/0' again"):
        read_tasks(bad, "chat")


def test_kinds() -> None:
    assert kind_of(Outcome(False)) == "syntax"
    assert kind_of(Outcome(True, ("pass", "pass"))) == "passed"
    assert kind_of(Outcome(True, ("pass", "fail"))) == "wrong"
    assert kind_of(Outcome(True, ("fail", "error", "skipped"))) == "error"
    assert kind_of(Outcome(True, ("timeout", "error"))) == "timeout"
