"""A run that nothing is wrong with, for tests that read it and for tests that damage a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.report.run_folder import write_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("whole") / "stories")


@pytest.fixture
def owned(whole: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(whole, tmp_path / "stories")
    return tmp_path / "stories"
