"""pass@1 of generated programs: run in the sandbox, resumable, counted by difficulty with every outcome shown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wpr.data.rows import DataError
from wpr.evaluation.code_tasks import CodeTask
from wpr.evaluation.win_rate import win_rate
from wpr.findings import Cell, Figure, Finding, Series
from wpr.rewards.code import Limits, Outcome, Runner, reward_of
from wpr.runs.fingerprints import content_fingerprint
from wpr.runs.jsonl_log import Journal, read_finished, refuse_other_header
from wpr.runs.responses import ResponseFile

KINDS = ("passed", "wrong", "error", "timeout", "syntax")
"""passed: every test. wrong: a test gave something else. error: a test raised or was killed. timeout: time was up.
syntax: no Python program at all. Where tests of a program end differently, the first error or timeout names it."""

TESTS = ("tests", "tests_passed", "tests_wrong", "tests_error", "tests_timeout")
"""Counts of tests: all that problems have, and those that ended so. The others were not run, because the program does
not compile or an earlier error had decided its reward."""

PAPER = ("introductory", "interview", "competition")
"""APPS's difficulties in the order of the paper's table."""

AT_A_TIME = 8
"""Programs per worker between two writes to the disk."""


@dataclass(frozen=True)
class ProgramResult:
    """What became of one task's program.

    tests, ...: counts of its tests, see `TESTS`. reward: the paper's, see `reward_of`. None of all in files of earlier
    releases.
    """

    task_id: str
    difficulty: str
    kind: str
    message: str
    program: str
    tests: int | None = None
    tests_passed: int | None = None
    tests_wrong: int | None = None
    tests_error: int | None = None
    tests_timeout: int | None = None
    reward: float | None = None


def result_of(task: CodeTask, program: str, outcome: Outcome) -> ProgramResult:
    """What became of a task's program, with its tests counted."""
    ended = Counter(outcome.results)
    return ProgramResult(
        task.task_id,
        task.problem.difficulty,
        kind_of(outcome),
        outcome.message,
        program,
        tests=len(task.problem.tests),
        tests_passed=ended["pass"],
        tests_wrong=ended["fail"],
        tests_error=ended["error"],
        tests_timeout=ended["timeout"],
        reward=reward_of(outcome),
    )


def kind_of(outcome: Outcome) -> str:
    """One of `KINDS`."""
    if not outcome.compiled:
        return "syntax"
    for result in outcome.results:
        if result in ("error", "timeout"):
            return str(result)
    return "passed" if outcome.passed else "wrong"


def run_programs(
    path: Path,
    tasks: Sequence[CodeTask],
    responses: ResponseFile,
    limits: Limits,
    runner: Runner,
    restart: str,
    advance: Callable[[int], None] = lambda count: None,
) -> list[ProgramResult]:
    """Run the program of each task's response; outcomes that an earlier process wrote to ``path`` are taken as they
    are.
    """
    answers = responses.by_prompt()
    missing = [task.task_id for task in tasks if task.task_id not in answers]
    if missing:
        raise DataError(
            f"{responses.path} has no response to {len(missing)} of {len(tasks)} tasks, {missing[0]} the first; make "
            "it for the same problems"
        )
    programs = {task.task_id: task.program(answers[task.task_id].response) for task in tasks}
    tests = [(task.task_id, asdict(task.problem)) for task in tasks]
    for task, (_, fields) in zip(tasks, tests, strict=True):
        if task.problem.check is None:  # files from before there were checks go on
            del fields["check"]
    header = {
        "format": 1,
        "responses": dict(responses.header),
        "programs": content_fingerprint(programs),
        "tests": content_fingerprint(tests),
        "limits": asdict(limits),
    }
    if path.exists():
        old, rows = read_finished(path)
        refuse_other_header(path, old, header, restart)
        advance(len(tasks))
        return [_tried(row, str(path)) for row in rows]
    with Journal(path, header, restart, _tried) as journal:
        done = {row["task_id"]: ProgramResult(**row) for row in journal.rows}
        advance(len(done))
        waiting = [task for task in tasks if task.task_id not in done]
        size = AT_A_TIME * runner.workers
        for start in range(0, len(waiting), size):
            part = waiting[start : start + size]
            outcomes = runner.run([(programs[task.task_id], task.problem) for task in part])
            tried = [
                result_of(task, programs[task.task_id], outcome) for task, outcome in zip(part, outcomes, strict=True)
            ]
            journal.append([asdict(one) for one in tried])
            done.update((one.task_id, one) for one in tried)
            advance(len(tried))
        ordered = [done[task.task_id] for task in tasks]
        journal.finish([asdict(one) for one in ordered])
    return ordered


def _tried(row: Mapping[str, Any], where: str) -> ProgramResult:
    try:
        return ProgramResult(**row)
    except TypeError as error:
        raise DataError(f"{where} is no result of a program ({str(error).partition(' ')[2]})") from None


def scores(model: str, tried: Sequence[ProgramResult]) -> list[list[Cell]]:
    """Table rows of one model: a difficulty each, and all together where there are several."""
    groups: dict[str, list[ProgramResult]] = {}
    for one in tried:
        groups.setdefault(one.difficulty, []).append(one)
    if len(groups) > 1:
        groups["all"] = list(tried)
    rows: list[list[Cell]] = []
    for name, group in groups.items():
        counts = Counter(one.kind for one in group)
        # A pass is a win over one half and a failure a loss, so that this is Wilson's interval of the share.
        rate = win_rate([float(one.kind == "passed") for one in group], [0.5] * len(group))
        error = math.sqrt(rate.rate * (1 - rate.rate) / len(group))
        kinds = [counts[kind] for kind in KINDS]
        rows.append([model, name, len(group), rate.rate, error, rate.low, rate.high, *kinds, *_rewards(group)])
    return rows


COLUMNS = [
    "model", "difficulty", "problems", "pass_at_1", "standard_error", "low", "high", *KINDS, "reward",
    "reward_standard_error", *TESTS,
]  # fmt: skip


def _rewards(group: Sequence[ProgramResult]) -> list[Cell]:
    """The last columns: mean reward with its standard error over problems, and sums of tests; empty where a result has
    none.
    """
    rewards = [one.reward for one in group if one.reward is not None]
    if len(rewards) < len(group):
        return [None] * (2 + len(TESTS))
    mean = sum(rewards) / len(rewards)
    spread = sum((reward - mean) ** 2 for reward in rewards)
    error = math.sqrt(spread / (len(rewards) - 1) / len(rewards)) if len(rewards) > 1 else None
    return [mean, error, *(sum(getattr(one, name) for one in group) for name in TESTS)]


def paper_table(finding: Finding) -> tuple[list[str], list[list[Cell]]]:
    """Columns and rows as the paper's table of APPS has them: a row per model; reward, and pass@1 in percent, of each
    difficulty and of all problems.
    """
    found = {(row["model"], row["difficulty"]): row for row in (dict(zip(finding.columns, cells, strict=True)) for cells
             in finding.rows)}  # fmt: skip
    models, names = (list(dict.fromkeys(str(key[place]) for key in found)) for place in (0, 1))
    ordered = sorted(names, key=lambda name: (name == "all", PAPER.index(name) if name in PAPER else len(PAPER)))
    columns = ["model", *(f"{name} {what}" for name in ordered for what in ("reward", "pass@1"))]
    rows: list[list[Cell]] = []
    for model in models:
        cells: list[Cell] = [model]
        for name in ordered:
            row = found.get((model, name), {})
            share = row.get("pass_at_1")
            cells += [row.get("reward"), None if share is None else 100 * float(share)]
        rows.append(cells)
    return columns, rows


def pass_at_1_finding(
    benchmark: str,
    tried: Mapping[str, Sequence[ProgramResult]],
    responses: Mapping[str, ResponseFile],
    settings: dict[str, Any],
) -> Finding:
    """The table and the figure of models that were tried on the same tasks."""
    rows = [row for model, one in tried.items() for row in scores(model, one)]
    text = [
        "pass@1: the share of problems whose program passes every test, one program a problem. standard_error is "
        "sqrt(p (1 - p) / n); low and high are Wilson's 95% interval. Counts: passed; wrong, a test gave something "
        "else; error, a test raised or was killed; timeout; syntax, no Python program at all. reward: the mean of what "
        "PPO is given for a program (-1 does not compile, -0.6 error or timeout, else -0.3 + 1.3 passed / tests), with "
        "its standard error over problems. tests: all that the problems have; the next columns say how many of them "
        "ended how, and the others were not run. paper-table.csv has reward and pass@1 in percent side by side."
    ]
    old = [model for model, one in tried.items() if any(result.reward is None for result in one)]
    if old:
        text.append(
            f"{', '.join(old)}: programs were run by an earlier release, which did not count tests; for the reward, "
            "run them again with --restart."
        )
    if not settings.get("isolated", True):
        text.append(
            "Programs were run without isolation (--unsafe): one that looks for its check could forge its result."
        )
    for model, file in responses.items():
        cut = sum(row.finished is False for row in file.rows)
        if cut:
            text.append(
                f"{model}: {cut} of {len(file.rows)} responses were cut at the longest length allowed; where programs "
                "are missing their end, raise --max-new-tokens."
            )
    series = [
        Series(
            model,
            [str(row[1]) for row in rows if row[0] == model],
            [float(row[3] or 0) for row in rows if row[0] == model],
            [float(row[5] or 0) for row in rows if row[0] == model],
            [float(row[6] or 0) for row in rows if row[0] == model],
        )
        for model in tried
    ]
    return Finding(
        name=f"pass-at-1-{benchmark}",
        title=f"pass@1 on {benchmark}",
        text=text,
        columns=COLUMNS,
        rows=rows,
        figures=[Figure("bars", f"pass@1 on {benchmark}", "difficulty", "pass@1", series)],
        settings=settings,
    )
