"""Pictures: what notebooks get, and files of both kinds."""

from __future__ import annotations

import functools
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.report.some_findings import figures
from wpr.errors import OptionError
from wpr.findings import Figure, Finding, Series, save
from wpr.report import picture
from wpr.report.picture import Picture


def test_what_notebooks_and_files_get(tmp_path: Path) -> None:
    drawn = Picture.of(figures()[0])
    assert drawn._repr_svg_() == drawn.save(tmp_path / "new" / "a.svg").read_text()
    assert "SVG" in repr(drawn)
    with pytest.raises(OptionError, match=r"a.jpg must end with .svg or .png"):
        drawn.save(tmp_path / "a.jpg")


def pixels(content: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(content)).convert("RGB")


@pytest.mark.needs("resvg")
def test_a_png_has_colours_and_text() -> None:
    figure = Figure("bars", "Bars", "", "rate", [Series("a", ["one", "two"], [1.0, 2.0])])
    found = pixels(Picture.of(figure).png(zoom=1))
    colours = {colour for _, colour in found.getcolors(100_000)}
    assert (255, 255, 255) in colours
    assert any(blue > 200 and red < 90 for red, _, blue in colours), "the bars"
    title = found.crop((0, 0, found.width, 40))  # nothing but text stands there
    assert min(red for _, (red, _, _) in title.getcolors(100_000)) < 80
    assert pixels(Picture.of(figure).png(zoom=0.5)).width == found.width // 2


@pytest.mark.needs("resvg")
def test_findings_as_png(tmp_path: Path) -> None:
    """Files of another time are gone when the finding is made again."""
    finding = Finding("some", "Some", [], [], [], figures()[:1])
    name = figures()[0].name
    save(finding, tmp_path, draw_png=lambda figure: Picture.of(figure).png())
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    save(finding, tmp_path, draw=lambda figure: Picture.of(figure).svg)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.svg", "finding.json", "table.csv"}


def test_without_the_converter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(OptionError, match=r"resvg-py, which is missing; pip install 'wpr\[plots\]'"):
        Picture("<svg/>").save(tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


@pytest.mark.needs("resvg")
def test_without_a_font(monkeypatch: pytest.MonkeyPatch) -> None:
    import resvg_py

    monkeypatch.setattr(resvg_py, "svg_to_bytes", functools.partial(resvg_py.svg_to_bytes, skip_system_fonts=True))
    picture._font.cache_clear()
    try:
        with pytest.raises(OptionError, match="none of the fonts .*`apt install fonts-dejavu-core`"):
            Picture("<svg/>").png()
    finally:
        picture._font.cache_clear()
