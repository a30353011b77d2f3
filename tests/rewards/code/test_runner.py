"""Programs on tests: what is given to them, what comes back, how they end, and many at once."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.code.programs import QUICK, isolated, prints, returns, soon_none_left
from wpr.rewards.code import Case, CodeProblem, Limits, Outcome, Runner, SandboxError, isolation, parse_problem


def run(program: str, problem: CodeProblem, **limits: float) -> Outcome:
    return Runner(replace(QUICK, **limits), workers=1).run([(program, problem)])[0]


@isolated
@pytest.mark.parametrize(
    "program",
    [
        "a, b = map(int, input().split())\nprint(a + b)",
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "print(sum(int(x) for line in open(0) for x in line.split()))",
        "import os\nprint(sum(map(int, os.read(0, os.fstat(0).st_size).split())))",
        "import sys\nsys.stdout.write(str(sum(map(int, sys.stdin.buffer.readline().split()))))",
        "def main():\n    print(sum(map(int, input().split())))\n    exit()\nif __name__ == '__main__':\n    main()",
        "import sys, threading\nthreading.stack_size(2**27)\nsys.setrecursionlimit(10**6)\n"
        "thread = threading.Thread(target=lambda: print(sum(map(int, input().split()))))\nthread.start()",
        "import asyncio\nasync def main():\n    print(sum(map(int, input().split())))\nasyncio.run(main())",
        "print(floor(sqrt(len(defaultdict(int)))) + sum(accumulate([3])))",  # names that APPS's own tester imports
        "import atexit\natexit.register(print, 3)",
        "print(3)\nraise SystemExit",
    ],
)
def test_ways_to_read_and_write(program: str) -> None:
    outcome = run(program, prints("3\n", "1 2\n"))
    assert outcome.passed, outcome
    assert outcome.reward == pytest.approx(1.0)


@isolated
@pytest.mark.parametrize(
    ("program", "expected", "arguments"),
    [
        ("def solve(a, b): return a + b", 3, (1, 2)),
        ("class Solution:\n    def solve(self, a: List[int]) -> Optional[int]:\n        return max(a)", 3, ([1, 3],)),
        ("def solve(): return (1, (2, 3))", [1, [2, 3]], ()),
        ("def solve(): return (1, 2)", [[1, 2]], ()),
        ("def solve(d): return d[1]", 2, ({1: 2},)),
        ("def solve(d): return {key + 1: value for key, value in d.items()}", {"2": 5}, ({1: 5},)),
        ("def solve(): return 'schön'", "schön", ()),
        ("def solve(n): return -(10**n)", -(10**4200), (4200,)),
        ("print('noise')\ndef solve():\n    print('more')\n    return True", True, ()),
        ("solve = lambda: None", None, ()),
        ("def solve(): return 1\nif __name__ == '__main__':\n    solve(int(input()))", 1, ()),
    ],
)
def test_functions(program: str, expected: Any, arguments: tuple[Any, ...]) -> None:
    text = json.dumps({"inputs": [arguments], "outputs": [expected], "fn_name": "solve"})
    outcome = run(program, parse_problem(text))
    assert outcome.passed, outcome


@isolated
def test_numbers_of_many_digits() -> None:
    """Python refuses to read more than 4,300 digits unless told otherwise."""
    text = '{"inputs": [[1' + "0" * 5000 + ']], "outputs": [-2' + "0" * 5000 + '], "fn_name": "solve"}'
    assert run("def solve(n): return -2 * n", parse_problem(text)).passed
    assert run("def solve(n): return -2 * n + 1", parse_problem(text)).results == ("fail",)
    assert run("print(10**5000)", prints("1" + "0" * 5000)).passed


@isolated
@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        ("Infinity", "float('inf')", "5"),
        ("-Infinity", "-float('inf')", "float('inf')"),
        ("1e999", "float('inf')", "10**400"),
        ("NaN", "float('nan')", "0.0"),
    ],
)
def test_infinity_and_nan(expected: str, right: str, wrong: str) -> None:
    """As JSON text, in which Python writes and reads them."""
    problem = parse_problem(f'{{"inputs": [[]], "outputs": [{expected}], "fn_name": "solve"}}')
    assert run(f"def solve(): return {right}", problem).results == ("pass",)
    assert run(f"def solve(): return {wrong}", problem).results == ("fail",)


@isolated
@pytest.mark.parametrize(
    ("program", "result"),
    [
        ("def other(): return 1", "error"),
        ("def solve(a): return 1", "error"),
        ("solve = 1", "error"),
        ("def solve(): return {1, 2}", "fail"),
        ("def solve(): return object()", "fail"),
        ("def solve():\n    a = []\n    a.append(a)\n    return a", "fail"),
        ("def solve():\n    a = []\n    for _ in range(900): a = [a]\n    return a", "fail"),
        ("def solve(): return float('nan')", "fail"),
        ("def solve(): return 10**5000", "fail"),
        ("def solve(): yield 1", "fail"),
    ],
)
def test_functions_that_do_not_answer(program: str, result: str) -> None:
    assert run(program, returns(1)).results == (result,)


@isolated
@pytest.mark.parametrize(
    ("program", "compiled", "result", "named"),
    [
        ("print(3", False, None, "SyntaxError"),
        ("print(3)\0", False, None, "null byte"),
        ("\ud800", False, None, "Error"),
        ("return 3", False, None, "outside function"),
        ("", True, "fail", ""),
        ("print(4)", True, "fail", ""),
        ("print(3)\nraise KeyError('why')", True, "error", "KeyError: 'why'"),
        ("print(3)\nexit(2)", True, "error", "exit status 2"),
        ("import os\nprint(3, flush=True)\nos.abort()", True, "error", "SIGABRT"),
        ("import ctypes\nctypes.string_at(0)", True, "error", "SIGSEGV"),
        ("import sys\nsys.stderr.write('x' * 5000)\nassert False", True, "error", "AssertionError"),
        ("raise BaseException", True, "error", "BaseException"),
        ("import os\nos.write(1, b'\\xff\\xfe')", True, "fail", ""),
        ("raise ValueError('\\x1b[2J')", True, "error", "ValueError: ?[2J"),
        ("import numpy", True, "error", "No module named 'numpy'"),
        ("import os\nos.close(1)\nos.close(2)\nos.close(3)", True, "fail", ""),
    ],
)
def test_ways_to_end(program: str, compiled: bool, result: str | None, named: str) -> None:
    outcome = run(program, prints("3"))
    assert outcome.compiled is compiled
    assert outcome.results == (() if result is None else (result,))
    assert named in outcome.message


@isolated
def test_passes_and_fails_are_counted() -> None:
    problem = CodeProblem(tuple(Case(str(n), str(n % 3)) for n in range(8)))
    outcome = run("print(int(input()) % 4)", problem)
    assert outcome.results == ("pass", "pass", "pass", "fail", "fail", "fail", "fail", "fail")
    assert outcome.reward == pytest.approx(-0.3 + 1.3 * 3 / 8)
    assert not outcome.passed


@isolated
def test_every_test_if_wanted() -> None:
    """Time that is up, or a broken sandbox, costs one test; the others get a new sandbox."""
    program = """
import os, signal, time
action = input()
if action == 'sleep': time.sleep(100)
if action == 'kill': os.kill(os.getppid(), signal.SIGKILL)
if action == 'raise': raise ValueError
print(action)
"""
    problem = CodeProblem(tuple(Case(text, text) for text in ("fine", "sleep", "fine", "kill", "raise", "fine")))
    limits = replace(QUICK, wall_seconds=2.0)
    whole = Runner(limits, workers=1, stop_early=False).run([(program, problem)])[0]
    assert whole.results == ("pass", "timeout", "pass", "error", "error", "pass")
    early = Runner(limits, workers=1).run([(program, problem)])[0]
    assert early.results == ("pass", "timeout", "skipped", "skipped", "skipped", "skipped")
    assert early.reward == whole.reward == -0.6


@isolated
def test_large_inputs_and_outputs() -> None:
    numbers = " ".join(map(str, range(400_000)))
    outcome = run("print(input())", prints(numbers, numbers), output_bytes=4 * 2**20)
    assert outcome.passed, outcome.message


@isolated
def test_a_harness_that_no_longer_reads() -> None:
    """An input that no pipe holds does not make the caller wait for ever."""
    program = "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)"
    problem = CodeProblem((Case("", "x"), Case("x" * 2**21, "x")))
    runner = Runner(replace(QUICK, wall_seconds=0.5), workers=1, stop_early=False)
    assert runner.run([(program, problem)])[0].results == ("timeout", "timeout")


@isolated
def test_many_keep_their_order() -> None:
    programs = [(f"print({n}, input())", prints(f"{n} x" if n % 3 else "no", "x", tests=2)) for n in range(24)]
    outcomes = Runner(QUICK, workers=4).run(programs)
    assert [outcome.passed for outcome in outcomes] == [n % 3 != 0 for n in range(24)]
    assert Runner(QUICK, workers=4).run([]) == []


@isolated
def test_nothing_outlives_a_killed_caller() -> None:
    """Not even if the caller has no time to clean up."""
    code = """
import os, threading, time
from tests.rewards.code.programs import prints, processes_left
from wpr.rewards.code import Runner

work = [("import time; time.sleep(1000)", prints(""))] * 2
threading.Thread(target=Runner(workers=2).run, args=(work,), daemon=True).start()
while sum(": /python/" in line for line in processes_left()) < 4:  # two harnesses, two programs
    time.sleep(0.05)
print(os.getpid(), flush=True)
os.kill(os.getpid(), 9)
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == -9
    assert soon_none_left(f"wpr-program-{done.stdout.strip()}-")


def test_without_isolation_it_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not isolation().available
    assert str(isolation()) == "none: there is no bwrap (bubblewrap) in PATH"
    with pytest.raises(SandboxError, match="cannot be isolated: there is no bwrap"):
        Runner()


def test_a_bubblewrap_that_does_not_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no namespaces today >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no namespaces today" in isolation().reason
    with pytest.raises(SandboxError, match="no namespaces today"):
        Runner()


def test_unsafe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ATTACK_SECRET", "hunter2")
    with pytest.warns(UserWarning, match="WITHOUT isolation: there is no bwrap"):
        runner = Runner(QUICK, workers=2, unsafe=True)
    program = (
        "import os\nopen('file', 'w').write('x')\n"
        "print(input(), 'ATTACK_SECRET' in os.environ, os.getcwd() == os.environ['TMPDIR'])"
    )
    before = set(Path("/tmp").glob("wpr-program-*"))
    outcomes = runner.run(
        [
            (program, prints("a False True", "a")),
            ("def solve(n): return n + 1", returns(2, 1)),
            ("while True: pass", prints("")),
            ("print(", prints("")),
            ("x = bytearray(2**30)", prints("")),
        ]
    )
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0, -0.6, -1.0, -0.6]
    assert set(Path("/tmp").glob("wpr-program-*")) <= before
    assert soon_none_left()


@isolated
def test_isolation_is_used_where_there_is_some_even_if_unsafe(recwarn: pytest.WarningsRecorder) -> None:
    runner = Runner(QUICK, workers=1, unsafe=True)
    assert runner.bwrap is not None
    assert not recwarn.list


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"wall_seconds": 0}, "wall_seconds=0 leaves no time"),
        ({"cpu_seconds": float("nan")}, "cpu_seconds=nan is no limit"),
        ({"memory_mb": 1}, "memory_mb=1 is too little; give a whole number, 16 or more"),
        ({"processes": 0}, "processes=0 is too little"),
        ({"output_bytes": 1.5}, "output_bytes=1.5 is too little; give a whole number"),
        ({"tmp_mb": True}, "tmp_mb=True is no limit"),
    ],
)
def test_limits_are_checked(limits: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Limits(**limits)


def test_workers_are_checked() -> None:
    with pytest.raises(ValueError, match="workers=0 runs nothing"):
        Runner(workers=0)
