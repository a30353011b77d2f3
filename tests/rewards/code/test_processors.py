"""Which processor a program runs on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.rewards.code.programs import QUICK, prints
from wpr.rewards.code import Runner, processors
from wpr.rewards.code.processors import own_processor, usable_processors

HOLDER = """
import sys
from wpr.rewards.code import processors
processors.NAME = "\\0" + sys.argv[1]
with processors.own_processor() as number:
    print(number, flush=True)
    input()
"""

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no os.sched_setaffinity on this system")


@pytest.fixture(autouse=True)
def name(monkeypatch: pytest.MonkeyPatch) -> str:
    """Of no processor that is held outside the test."""
    name = f"test-{os.getpid()}-{{}}"
    monkeypatch.setattr(processors, "NAME", f"\0{name}")
    return name


@linux
def test_each_has_its_own_while_there_are_enough() -> None:
    mine = os.sched_getaffinity(0)
    held = [own_processor() for _ in mine]
    try:
        assert {one.__enter__() for one in held} == mine
        with own_processor() as shared:  # all are given away
            assert shared in mine
    finally:
        for one in held:
            one.__exit__(None, None, None)
    assert usable_processors() == len(mine)


@linux
@pytest.mark.parametrize("end", ["done", "killed"])
def test_processes_do_not_take_each_others(end: str, name: str) -> None:
    """Nor is a processor lost when the process that held it is killed."""
    free = set(os.sched_getaffinity(0))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        assert theirs in free
        if len(free) > 1:
            for _ in range(20):  # the order is random
                with own_processor() as number:
                    assert number in free - {theirs}
        if end == "killed":
            other.kill()
    test_each_has_its_own_while_there_are_enough()


@pytest.mark.filterwarnings("ignore:generated programs run WITHOUT isolation")
def test_at_most_one_program_per_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("PATH", "")
    assert Runner(unsafe=True).workers == usable_processors()
    assert Runner(workers=1, unsafe=True).workers == 1
    assert Runner(workers=1000, unsafe=True).workers == usable_processors()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # as torchrun says
    assert Runner(unsafe=True).workers == 1


def test_systems_that_cannot_bind_to_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as macOS."""
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setenv("PATH", "")
    assert usable_processors() == os.cpu_count()
    with own_processor() as number:
        assert number is None
    with pytest.warns(UserWarning, match="WITHOUT isolation"):
        runner = Runner(QUICK, unsafe=True)
    assert runner.run([("print(1)", prints("1"))])[0].passed
