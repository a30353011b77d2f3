"""A small run for the tests of commands that work on runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def own_run(whole_run: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    shutil.copytree(whole_run, tmp_path / "run")
    return tmp_path / "run"
