"""Checks that call a program's function: the program is in another sandbox, and nothing but plain values comes back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rewards.code.programs import QUICK, isolated, processes_left
from wpr.rewards.code import Case, CodeProblem, Outcome, ProblemError, Runner
from wpr.rewards.code.harness import packed, rebuilt, unpacked
from wpr.rewards.code.problems import PASSES


def run(program: str, check: str, **limits: float) -> Outcome:
    problem = CodeProblem((PASSES,), "solve", problem_id="problem 7", bare=True, check=check)
    outcome = Runner(replace(QUICK, **limits), workers=1).run([(program, problem)])[0]
    assert processes_left() == []
    return outcome


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=3)
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.sets(st.integers() | st.text(max_size=2) | st.tuples(st.integers()), max_size=1)
    | st.frozensets(st.integers(), max_size=1)
    | st.dictionaries(st.integers() | st.text(max_size=3) | st.tuples(st.integers()), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(plain)
def test_plain_values_arrive_as_they_are(value: Any) -> None:
    found = unpacked(json.loads(json.dumps(packed(value))))
    assert found == value
    assert repr(found) == repr(value)  # 1 is not 1.0, and -0.0 not 0.0


def test_derived_classes_become_plain() -> None:
    class Same(list[int]):
        def __eq__(self, other: object) -> bool:
            return True

    class SameNumber(int):
        def __eq__(self, other: object) -> bool:
            return True

    assert type(unpacked(packed(Same([1])))) is list
    assert packed([SameNumber(3)]) == ["list", 3]
    assert math.isnan(unpacked(packed(math.nan)))
    for value in (object(), range(3), len, iter([]), [object()]):
        with pytest.raises(TypeError, match="cannot be sent between a check and a program"):
            packed(value)


@pytest.mark.parametrize(
    "value", [[], {}, ["type"], ["dict", 1], [["list"]], ["bytes", "xy"], ["complex", "x"], ["set", ["list"]], [None]]
)
def test_nonsense_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        unpacked(value)


def test_exceptions_are_pythons_own() -> None:
    assert isinstance(rebuilt("KeyError", "x"), KeyError)
    for name in ("exec", "eval", "print", "object", "int", "__import__", "SystemExit", "KeyboardInterrupt", "nothing"):
        assert type(rebuilt(name, "1")) is RuntimeError
    for name in ("StopIteration", "StopAsyncIteration", "UnicodeDecodeError", "ExceptionGroup"):
        assert str(rebuilt(name, "x")) == f"{name}: x"


CHECK = "for i in range(3):\n    assert solve(i) == 2 * i + 1\n"
FRAME = "import struct\ndef frame(code, body): return struct.pack('>iII', code, 0, len(body)) + body\n"


@isolated
@pytest.mark.parametrize(
    "attack",
    [
        "import os\nos.write(3, b'\"passed\"')\nos._exit(0)",
        "import json\njson.dumps = lambda *_, **__: '\"passed\"'\ndef solve(n): return 0",
        "import json\njson.dumps = lambda *_, **__: '[\"value\", true]'\ndef solve(n): return 0",
        "def solve(n):\n    class Same:\n        def __eq__(self, other): return True\n    return Same()",
        "class Same(int):\n    def __eq__(self, other): return True\ndef solve(n): return Same(7)",
        "import builtins\nbuiltins.AssertionError = builtins.int = Exception\ndef solve(n): assert False",
        "import sys\nsys.setrecursionlimit(10**6)\na = []\nfor _ in range(5000): a = [a]\ndef solve(n): return a",
        "def solve(n):\n    a = []\n    a.append(a)\n    return a",
        "def solve(n): raise StopIteration",
        "def solve(n): raise AssertionError",
        "def solve(n): raise SystemExit(0)",
        "import os\ndef solve(n): os._exit(0)",
        "def check(candidate): pass\nsolve = lambda n: None",
        "import os, signal\ndef solve(n): os.kill(-1, signal.SIGKILL)",
        f"{FRAME}import os\ndef solve(n): os.write(5, frame(0, b'\"passed\"')); os._exit(0)",
        f"{FRAME}import os\nfor fd in range(1, 6): os.write(fd, frame(0, b'\"passed\"'))\nos._exit(0)",
        f'{FRAME}import os\ndef solve(n): os.write(5, frame(1001, b\'["raised", "exec", "raise SystemExit"]\'))',
        f"{FRAME}import os\ndef solve(n): os.write(5, frame(1001, b'[\"value\", [\"list\", ' + b'[' * 60000))",
        f"{FRAME}import os\nwhile True: os.write(5, frame(1001, b'[\"value\", true]'))",
        f"{FRAME}import os\nwhile True: os.write(5, frame(1001, b'\"passed\"'))",
    ],
)
def test_forged_results(attack: str) -> None:
    """Whatever a program does, its answers must be the right ones."""
    outcome = run(attack, CHECK)
    assert outcome.compiled
    assert not outcome.passed
    assert run("def solve(n): return 2 * n + 1", CHECK).passed


@isolated
def test_the_check_is_not_in_the_programs_memory() -> None:
    program = """
import gc, sys
texts, frame = [], sys._getframe()
while frame:
    texts.append(repr(frame.f_locals)); texts.append(repr(frame.f_globals)); frame = frame.f_back
for thing in gc.get_objects():
    if isinstance(thing, (dict, list, tuple)):
        try: texts.append(repr(thing))
        except Exception: pass
def solve():
    return any(''.join(reversed('akkouq')) in text for text in texts)
"""
    check = "quokka = 'quokka'\nassert solve() is False\n"
    assert run(program, check, wall_seconds=10, cpu_seconds=10, memory_mb=512).results == ("pass",)


@isolated
@pytest.mark.parametrize(
    ("program", "check", "result"),
    [
        ("def solve(a, b=0, *, c=0): return a, b, c", "assert solve(1, c=[2]) == (1, 0, [2])", "pass"),
        ("def solve(x): return [x]", "assert solve((1, {2}, {3: b'4'}, 5j)) == [(1, {2}, {3: b'4'}, 5j)]", "pass"),
        ("def solve(): return (1, 2)", "assert solve() == [1, 2]", "fail"),
        ("def solve(): return 0.1 + 0.2", "assert solve() == 0.1 + 0.2 != 0.3", "pass"),
        ("def solve(n): return 10**n", "assert solve(5000) == 10**5000", "pass"),
        ("def solve(n): return n > 1", "assert solve(2) is True and solve(1) is False", "pass"),
        ("def solve(): return {}.keys()", "assert solve() == []", "fail"),
        ("def solve(a): a.clear(); return []", "a = [2, 1]\nassert solve(a) == sorted(a)", "fail"),  # a is a copy
        ("from collections import Counter\ndef solve(a): return Counter(a)", "assert solve('aa') == {'a': 2}", "pass"),
        ("seen = []\ndef solve(n): seen.append(n); return len(seen)", "assert [solve(0), solve(0)] == [1, 2]", "pass"),
        (
            "def solve(n):\n    if n: raise KeyError('x')\n    class Mine(ValueError): pass\n    raise Mine('y')",
            "for n, kind in ((1, KeyError), (0, ValueError)):\n    try:\n        solve(n)\n        assert False\n"
            "    except kind as error:\n        assert 'xy'[1 - n] in str(error)",
            "pass",
        ),
        ("def solve(n): raise StopIteration", "assert all(map(solve, [1, 2]))", "error"),
        ("def solve(n): return 1", "import random\nassert solve(random.random()) == 1", "pass"),
        (
            "print('noise')\ndef solve():\n    print('noise')\n    return 1",
            "print('more')\nassert solve() == 1",
            "pass",
        ),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()\nsolve = int",
            "solve()",
            "pass",
        ),
        ("class Solution:\n    def solve(self): return 1", "assert solve() == 1", "error"),  # no function
        ("def solve(): return 1", "solve() + ''", "error"),
        ("def solve(): input()", "solve()", "error"),  # the end of the input, not a message
        ("def solve(): print('x' * 10**6)", "solve()", "error"),
        ("def solve():\n    while True: pass", "solve()", "timeout"),
        ("def solve(): return 1", "solve()\nwhile True: pass", "timeout"),
    ],
)
def test_checks(program: str, check: str, result: str) -> None:
    assert run(program, check).results == (result,)


@isolated
def test_what_is_said_of_failures() -> None:
    assert "ValueError: why" in run("def solve(): raise ValueError('why')", "solve()").message
    assert "the program has no function solve" in run("x = 1", "solve()").message
    assert "type range cannot be sent" in run("def solve(x): return x", "solve(range(3))").message
    assert run("def solve(:", "solve()") == Outcome(False, (), "SyntaxError: invalid syntax (program.py, line 1)")
    with pytest.raises(ProblemError, match=r"problem 7: its check does not compile \(SyntaxError"):
        run("def solve(): return 1", "solve((")
    assert run("def solve(): return 1", "import time\ntime.sleep(9)", wall_seconds=0.5).results == ("timeout",)


@isolated
def test_thousands_of_calls() -> None:
    """In one process, which is not started for each."""
    assert run("def solve(n): return n", "for n in range(3000):\n    assert solve([n]) == [n]", cpu_seconds=5).passed


def test_without_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.warns(UserWarning, match="WITHOUT isolation"):
        runner = Runner(QUICK, workers=1, unsafe=True)
    problem = CodeProblem((PASSES,), "solve", check=CHECK)
    outcomes = runner.run([("def solve(n): return 2 * n + 1", problem), ("def solve(n): return 1", problem)])
    assert [outcome.results for outcome in outcomes] == [("pass",), ("fail",)]


def test_a_check_needs_a_function() -> None:
    for tests, fn_name in (((PASSES,), None), ((Case([], 3),), "solve")):
        with pytest.raises(ProblemError, match="problem has a check; it needs fn_name"):
            CodeProblem(tests, fn_name, check="pass")
