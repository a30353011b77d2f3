"""The `wpr` command for tests: as a process of its own, or within this one, which saves seconds of imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from wpr.cli import main

SMALL = (
    "prepare.options.pairs=160",
    "prepare.options.hidden=16",
    "prepare.options.layers=1",
    "sft.max_steps=3",
    "sft.save_steps=1",
    "sft.logging_steps=1",
    "reward.max_steps=3",
    "reward.save_steps=1",
    "reward.logging_steps=1",
    "ppo.max_steps=2",
    "ppo.save_steps=1",
    "ppo.logging_steps=1",
    "ppo.batch_size=8",
    "evaluation.prompts=6",
    "evaluation.rows=16",
    "train=[rkl]",
)
"""Changes to the tiny recipe that make every stage a matter of seconds."""


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The paragraph of the error, which must be one line at the end, without a traceback."""
        assert "Traceback" not in self.stderr, self.stderr
        last = self.stderr.rstrip("\n").splitlines()[-1]
        assert last.startswith("Error: "), self.stderr
        assert self.stderr.count("Error") == 1, self.stderr
        return last


def environment(**more: str) -> dict[str, str]:
    """The environment of a process: offline, one thread, no width of a terminal."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | more


def start(
    *arguments: str, cwd: Path, before: tuple[str, ...] = (), launcher: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    """A process of the command. ``before``: a wrapper around it; ``launcher``: Python arguments that start several."""
    command = [*before, sys.executable, *launcher, "-m", "wpr", *arguments]
    # Ctrl-C reaches it also where a shell runs the tests in the background, which ignores that signal.
    return subprocess.Popen(
        command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def run(
    *arguments: str, cwd: Path, before: tuple[str, ...] = (), launcher: tuple[str, ...] = (), timeout: float = 300
) -> Finished:
    """The command in a process of its own, to its end, which must come within so many seconds."""
    process = start(*arguments, cwd=cwd, before=before, launcher=launcher)
    stdout, stderr = process.communicate(timeout=timeout)
    return Finished(process.returncode, stdout, stderr)


class Here:
    """The command within this process; what it changes of the process is put back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *arguments: str) -> Finished:
        variables, path = dict(os.environ), list(sys.path)
        self.monkeypatch.setattr(sys, "argv", ["wpr", *arguments])
        self.capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            os.environ.clear()
            os.environ.update(variables)
            sys.path[:] = path
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Finished(code or 0, *self.capsys.readouterr())

    def succeeds(self, *arguments: str) -> Finished:
        """The command, which must not fail."""
        finished = self(*arguments)
        assert finished.code == 0, finished.stderr
        return finished


def manifest(folder: Path) -> dict[str, Any]:
    """What the run's manifest says."""
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


def statuses(folder: Path) -> dict[str, str]:
    """Status of each stage."""
    return {name: record["status"] for name, record in manifest(folder)["stages"].items()}


def results(folder: Path) -> dict[str, Any]:
    """Results of each stage."""
    return {name: record["results"] for name, record in manifest(folder)["stages"].items()}


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a run by its path, but for its lock and its log, which every command may touch."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".lock", "run.log")
    }
