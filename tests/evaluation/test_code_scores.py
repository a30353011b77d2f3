"""pass@1: counts, intervals, and programs that are not run twice."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.humaneval_like import write
from tests.rewards.code.programs import isolated
from wpr.data.rows import DataError
from wpr.evaluation.code_scores import (
    COLUMNS,
    PAPER,
    ProgramResult,
    paper_table,
    pass_at_1_finding,
    run_programs,
    scores,
)
from wpr.evaluation.code_tasks import read_tasks
from wpr.rewards.code import Limits, Runner
from wpr.runs.responses import Response, ResponseFile

GOOD = {"Made/0": "    return sum(numbers)", "Made/1": "    return 4 * x"}


class Counting(Runner):
    """Counts what it runs."""

    def __init__(self, limits: Limits, stop_after: int | None = None) -> None:
        super().__init__(limits, workers=1)
        self.count, self.stop_after = 0, stop_after

    def run(self, programs: Any) -> Any:
        if self.stop_after is not None and self.count >= self.stop_after:
            raise KeyboardInterrupt
        self.count += len(programs)
        return super().run(programs)


def responses(texts: dict[str, str]) -> ResponseFile:
    rows = tuple(Response(name, "", text, length=5, finished=name != "Made/1") for name, text in texts.items())
    return ResponseFile(Path("m-t0.jsonl"), {"seed": 0}, rows)


@isolated
def test_runs_once_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wpr.evaluation.code_scores.AT_A_TIME", 1)
    _, tasks = read_tasks(write(tmp_path), "complete")
    limits, path = Limits(wall_seconds=20), tmp_path / "outcomes.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_programs(path, tasks, responses(GOOD), limits, Counting(limits, stop_after=1), "")
    runner = Counting(limits)
    found = run_programs(path, tasks, responses(GOOD), limits, runner, "")
    assert runner.count == 1
    assert [(one.task_id, one.kind) for one in found] == [("Made/0", "passed"), ("Made/1", "passed")]
    assert run_programs(path, tasks, responses(GOOD), limits, runner, "") == found
    assert runner.count == 1
    changed = GOOD | {"Made/1": "    return 5 * x"}
    with pytest.raises(DataError, match="made otherwise.*programs"):
        run_programs(path, tasks, responses(changed), limits, runner, "")
    with pytest.raises(DataError, match="no response to 1 of 2 tasks, Made/1 the first"):
        run_programs(path, tasks, responses({"Made/0": ""}), limits, runner, "")


@isolated
def test_outcomes_of_apps_from_before_there_were_checks(tmp_path: Path) -> None:
    problems, path = tmp_path / "apps.jsonl", tmp_path / "outcomes.jsonl"
    problems.write_text('{"question": "Add.", "input_output": {"inputs": ["1 2"], "outputs": ["3"]}}\n')
    _, tasks = read_tasks(problems, "complete")
    run_programs(path, tasks, responses({"1": "print(3)"}), Limits(), Counting(Limits()), "")
    header = json.loads(path.read_text().splitlines()[0])["header"]
    assert header["tests"] == "e1459b2f45a8737a465b4baa11f0cc9488fea41369024a3e23cec78b797ff3f4"  # as written then


def test_a_line_that_is_no_outcome_is_named(tmp_path: Path) -> None:
    _, tasks = read_tasks(write(tmp_path), "complete")
    limits, path = Limits(wall_seconds=20), tmp_path / "outcomes.jsonl"
    runner = Runner(limits, workers=1, unsafe=True)
    run_programs(path, tasks, responses(GOOD), limits, runner, "")
    path.write_text(path.read_text().replace('"task_id"', '"task"'))
    with pytest.raises(DataError, match="outcomes.jsonl is no result of a program"):
        run_programs(path, tasks, responses(GOOD), limits, runner, "")
    path.rename(tmp_path / "outcomes.jsonl.partial")
    with pytest.raises(DataError, match=r"outcomes.jsonl.partial:2 is no result .*; delete the line"):
        run_programs(path, tasks, responses(GOOD), limits, runner, "")


@isolated
def test_tests_are_counted(tmp_path: Path) -> None:
    """Against the rewards by hand, in the paper's layout."""
    problems = tmp_path / "apps.jsonl"
    problem = {"question": "Say it.", "input_output": {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "4"]}}
    levels = ["competition", "introductory", "introductory", "interview", "interview"]
    rows = [problem | {"difficulty": level, "problem_id": i} for i, level in enumerate(levels)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, tasks = read_tasks(problems, "complete")
    programs = [
        "print(input())",
        "print(1)",
        "x = (",
        "n = input()\nprint(n if n < '3' else 1 / 0)",
        "while True: pass",
    ]
    answers = responses(dict(zip([task.task_id for task in tasks], programs, strict=True)))
    limits = Limits(wall_seconds=1, cpu_seconds=1)
    found = run_programs(tmp_path / "o.jsonl", tasks, answers, limits, Runner(limits, workers=1), "")
    counts = [(one.tests, one.tests_passed, one.tests_wrong, one.tests_error, one.tests_timeout) for one in found]
    assert counts == [(4, 4, 0, 0, 0), (4, 1, 3, 0, 0), (4, 0, 0, 0, 0), (4, 2, 0, 1, 0), (4, 0, 0, 0, 1)]
    rewards = [1.0, -0.3 + 1.3 / 4, -1.0, -0.6, -0.6]
    assert [one.reward for one in found] == pytest.approx(rewards)
    finding = pass_at_1_finding("apps", {"m": found}, {"m": answers}, {})
    whole = dict(zip(COLUMNS, finding.rows[-1], strict=True))
    assert [whole[name] for name in ("tests", "tests_passed", "tests_error", "tests_timeout")] == [20, 7, 1, 1]
    assert whole["reward"] == pytest.approx(statistics.mean(rewards))
    assert whole["reward_standard_error"] == pytest.approx(statistics.stdev(rewards) / 5**0.5)
    columns, (cells,) = paper_table(finding)
    assert columns == ["model", *(f"{name} {what}" for name in (*PAPER, "all") for what in ("reward", "pass@1"))]
    means = [statistics.mean(rewards[1:3]), -0.6, 1.0, statistics.mean(rewards)]
    assert cells == ["m", *(pytest.approx(one) for pair in zip(means, [0, 0, 100, 20], strict=True) for one in pair)]


def test_results_without_counts_have_no_reward() -> None:
    finding = pass_at_1_finding("apps", {"m": tried(passed=2)}, {"m": responses(GOOD)}, {})
    assert finding.rows[0][COLUMNS.index("reward") :] == [None] * 7
    assert any("m: programs were run by an earlier release" in text for text in finding.text)
    assert paper_table(finding)[1][0][1] is None


def tried(**counts: int) -> list[ProgramResult]:
    return [
        ProgramResult(f"{kind}{i}", "hard" if i % 2 else "easy", kind, "", "")
        for kind, n in counts.items()
        for i in range(n)
    ]


def test_table() -> None:
    """Wilson's interval for 30 of 100, from its closed form."""
    rows = scores("m", tried(passed=30, wrong=40, error=15, timeout=5, syntax=10))
    assert [row[1] for row in rows] == ["easy", "hard", "all"]
    whole = dict(zip(COLUMNS, rows[-1], strict=True))
    assert whole["problems"] == 100
    assert whole["pass_at_1"] == pytest.approx(0.3)
    assert whole["standard_error"] == pytest.approx((0.3 * 0.7 / 100) ** 0.5)
    assert (whole["low"], whole["high"]) == (pytest.approx(0.21895, abs=1e-5), pytest.approx(0.39585, abs=1e-5))
    assert [whole[kind] for kind in ("passed", "wrong", "error", "timeout", "syntax")] == [30, 40, 15, 5, 10]
    assert sum(int(row[2] or 0) for row in rows[:2]) == 100


def test_finding_says_what_was_cut() -> None:
    finding = pass_at_1_finding("humaneval", {"m": tried(passed=2)}, {"m": responses(GOOD)}, {})
    assert any("1 of 2 responses were cut" in text for text in finding.text)
    assert finding.name == "pass-at-1-humaneval"
    assert not any("without isolation" in text for text in finding.text)
    unsafe = pass_at_1_finding("humaneval", {"m": tried(passed=2)}, {"m": responses(GOOD)}, {"isolated": False})
    assert any("could forge its result" in text for text in unsafe.text)
