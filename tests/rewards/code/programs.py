"""Small problems and what is left of programs, for the tests of code rewards."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from wpr.rewards.code import Case, CodeProblem, Limits

# Loops end after a second of processor time, which does not depend on what else the machine does.
QUICK = Limits(wall_seconds=20.0, cpu_seconds=1.0, output_bytes=100_000, tmp_mb=2)

isolated = pytest.mark.needs("bubblewrap")


def prints(expected: str, given: str = "", tests: int = 1) -> CodeProblem:
    """A problem that wants ``expected`` on standard output."""
    return CodeProblem((Case(given, expected),) * tests)


def returns(expected: object, *arguments: object, fn_name: str = "solve") -> CodeProblem:
    """A problem whose function must return ``expected``."""
    return CodeProblem((Case(list(arguments), expected),), fn_name)


def processes_left(label: str = f"wpr-program-{os.getpid()}-") -> list[str]:
    """Command lines of all processes on this machine that belong to sandboxes, of this test process or another."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:  # ended while we looked
            continue
        if label in command:
            found.append(f"{path.parent.name}: {command}")
    return found


def soon_none_left(label: str = f"wpr-program-{os.getpid()}-") -> bool:
    """Where nobody waits for the processes: whether they are gone within ten seconds."""
    for _ in range(100):
        if not processes_left(label):
            return True
        time.sleep(0.1)
    return False
