"""One thread a worker: the problems are small, and pytest runs one worker a core."""

import collections
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import pytest
import torch
from hypothesis import settings

from tests.interpreter import improve_interpreter
from tests.needs import CHROMIUM, REQUIRED, missing

torch.set_num_threads(1)

# Without a GPU the Triton kernels run under its interpreter, which is chosen when Triton is imported: so do it first.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    improve_interpreter()

# The same examples every time, so that a change is judged by its own merits; HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=300, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.hookimpl(tryfirst=True)  # before the fixtures that may need the same
def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for what in mark.args:
            reason = missing(what)
            if reason is not None:
                (pytest.fail if what in REQUIRED else pytest.skip)(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Close with what was skipped for want of what."""
    reasons = collections.Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the tiny recipe, what the command printed beside it. It is made once, by the
    worker that asks first, and only read: a test that changes it takes a copy.
    """
    from filelock import FileLock

    from tests.pipeline.command import SMALL, run

    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "whole"
    with FileLock(f"{folder}.lock"):
        if not (folder / "stderr").exists():
            folder.mkdir(exist_ok=True)
            finished = run("run", "tiny", *SMALL, "output=run", cwd=folder)
            assert finished.code == 0, finished.stderr
            (folder / "stdout").write_text(finished.stdout)
            (folder / "stderr").write_text(finished.stderr)
    return folder / "run"


@pytest.fixture
def here(monkeypatch, capsys):
    """The `wpr` command within this process; imported here, since most tests have no use for it."""
    from tests.pipeline.command import Here

    return Here(monkeypatch, capsys)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for tests that need it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Without a sandbox: tests also run as root, and load nothing but their own file.
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()
