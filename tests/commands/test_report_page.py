"""`wpr report` and `wpr analyze` write figures as PNG files on request, or refuse before they write anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.pipeline.command import Here


@pytest.mark.needs("resvg")
def test_png_files(here: Here, own_run: Path, tmp_path: Path) -> None:
    here.succeeds("analyze", "costs", str(own_run), "--png")
    figures = {path.stem for path in (own_run / "analyses" / "costs").glob("*.svg")}
    assert figures == {path.stem for path in (own_run / "analyses" / "costs").glob("*.png")} != set()
    folders = ("--svg", str(tmp_path / "svg"), "--png", str(tmp_path / "png"))
    here.succeeds("report", str(own_run), "-o", str(tmp_path / "page.html"), *folders)
    drawn = {"curves", "frontier", "win_rates", *(f"costs-{name}" for name in figures)}
    for ending, start in (("svg", b"<svg"), ("png", b"\x89PNG")):
        found = {path.stem: path.read_bytes() for path in (tmp_path / ending).iterdir()}
        assert found.keys() == drawn
        assert all(content.startswith(start) for content in found.values())


def test_without_the_converter_nothing_is_written(
    here: Here, own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    commands = (("report", str(own_run), "-o", str(tmp_path / "page.html"), "--png", str(tmp_path / "png")),
                ("analyze", "costs", str(own_run), "--png"))  # fmt: skip
    for command in commands:
        finished = here(*command)
        assert finished.code == 2
        assert "pip install 'wpr[plots]'" in finished.error
    assert not (tmp_path / "page.html").exists()
    assert not (own_run / "analyses").exists()
