"""One small run for all tests of commands that work on runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.pipeline.command import SMALL, run


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the tiny recipe."""
    folder = tmp_path_factory.mktemp("commands")
    finished = run("run", "tiny", *SMALL, "output=run", cwd=folder)
    assert finished.code == 0, finished.stderr
    return folder / "run"


@pytest.fixture
def own_run(whole_run: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    shutil.copytree(whole_run, tmp_path / "run")
    return tmp_path / "run"
