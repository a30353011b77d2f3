"""A drawn figure: shown by notebooks, saved as SVG, and as PNG by resvg."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wpr.atomic_io import write_atomically
from wpr.errors import OptionError
from wpr.findings import Figure
from wpr.report.plots import draw_figure

ENDINGS = (".svg", ".png")

FONTS = (
    "Arial", "Helvetica", "DejaVu Sans", "Liberation Sans", "Noto Sans", "Roboto", "Ubuntu", "Open Sans", "Cantarell",
    "Segoe UI", "FreeSans",
)  # fmt: skip
"""Families that text of a PNG is set in, the first that the machine has; resvg draws no text in one that it lacks."""


@dataclass(frozen=True)
class Picture:
    """An SVG document. Notebooks show it; `save` writes it to a file."""

    svg: str

    @classmethod
    def of(cls, figure: Figure) -> Picture:
        """The figure of a finding, drawn."""
        return cls(draw_figure(figure))

    def save(self, path: str | Path, zoom: float = 2.0) -> Path:
        """Write an ``.svg`` or a ``.png`` file, and return its path. zoom: pixels of a PNG per unit of the SVG."""
        path = Path(path)
        if path.suffix not in ENDINGS:
            raise OptionError(f"{path} must end with {' or '.join(ENDINGS)}, which says what is written")
        content = self.svg.encode(errors="replace") if path.suffix == ".svg" else self.png(zoom)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
        return path

    def png(self, zoom: float = 2.0) -> bytes:
        """The picture as a PNG file has it, always light."""
        resvg = converter()
        return bytes(resvg.svg_to_bytes(svg_string=self.svg, zoom=zoom, sans_serif_family=_font()))

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Picture({len(self.svg)} bytes of SVG; shown by notebooks, .save('name.svg') or .save('name.png'))"


def converter() -> Any:
    """The package that draws PNG files; `OptionError` says how to get it where it is missing, and that there is no font
    where there is none. Call it before work whose figures are to be PNG.
    """
    try:
        resvg = importlib.import_module("resvg_py")
    except ImportError:
        raise OptionError("PNG files are drawn by resvg-py, which is missing; pip install 'wpr[plots]'") from None
    if _font() is None:
        raise OptionError(
            "this machine has none of the fonts that PNG files are written in, so that they would have no text; "
            f"install one of {', '.join(FONTS)} (such as `apt install fonts-dejavu-core`), or write SVG"
        )
    return resvg


@functools.cache
def _font() -> str | None:
    """The first of `FONTS` in which something is drawn."""
    render = importlib.import_module("resvg_py").svg_to_bytes
    start = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20"'
    empty = render(svg_string=f"{start}/>")
    text = f'{start}><text x="2" y="16" font-family="sans-serif">W</text></svg>'
    return next((name for name in FONTS if render(svg_string=text, sans_serif_family=name) != empty), None)
