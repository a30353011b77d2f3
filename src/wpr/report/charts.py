"""Line charts as SVG text: no dependency, readable in light and dark, small enough to put in a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

Series = Sequence[tuple[float, float]]
"""Points from left to right."""

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#65a30d", "#475569")
"""Of the series, in order; told apart also by people who do not see all colours, with the dashes below."""

DASHES = ("", "6 3", "2 2", "8 3 2 3")
WIDTH, HEIGHT = 340, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 36

STYLE = (
    "<style>.wpr-chart{font:11px system-ui,sans-serif}.wpr-chart .t{font-weight:600;font-size:12px}"
    ".wpr-chart text{fill:#1f2937}.wpr-chart .g{stroke:#9ca3af;stroke-opacity:.35}"
    "@media (prefers-color-scheme:dark){.wpr-chart text{fill:#e5e7eb}.wpr-chart .back{fill:#111827}}</style>"
)


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, that cover ``low`` to ``high`` without going beyond."""
    if not high > low:
        return [low]
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


@dataclass(frozen=True)
class Frame:
    """The axes of a chart of `WIDTH` x `HEIGHT`: where values lie in the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    @classmethod
    def around(cls, points: Series, x_margin: float = 0.0) -> Frame:
        """Axes that hold all points, with a little room above and below."""
        x_low, x_high = _range([x for x, _ in points], x_margin)
        y_low, y_high = _range([y for _, y in points], margin=0.05)
        return cls(x_low, x_high, y_low, y_high)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies."""
        return (
            LEFT + (x - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM),
        )

    def path(self, points: Series) -> str:
        """A line through the points, with a gap where one is not finite."""
        commands, pen = [], "M"
        for x, y in points:
            if not math.isfinite(y):
                pen = "M"
                continue
            at_x, at_y = self.place(x, y)
            commands.append(f"{pen}{at_x:.1f} {at_y:.1f}")
            pen = "L"
        return " ".join(commands)

    def grid(self, x_label: str) -> str:
        """Lines and numbers of both axes, and what the lower one counts."""
        parts = []
        for value in ticks(self.y_low, self.y_high):
            _, y = self.place(self.x_low, value)
            parts.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
        for value in ticks(self.x_low, self.x_high):
            x, _ = self.place(value, self.y_low)
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{number(value)}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
        return "".join(parts)


def line_chart(title: str, series: Mapping[str, Series], x_label: str = "step") -> str:
    """One chart as an SVG group of `WIDTH` x `HEIGHT`. Points that are not finite leave a gap.

    Series keep their colour and dash by their place in the mapping, so that charts of one page agree.
    """
    points = [(x, y) for values in series.values() for x, y in values if math.isfinite(y)]
    if not points:
        return f'<g><text class="t" x="{LEFT}" y="18">{escape(title)}</text><text x="{LEFT}" y="60">no data</text></g>'
    frame = Frame.around(points)
    parts = [f'<text class="t" x="{LEFT}" y="18">{escape(title)}</text>', frame.grid(x_label)]
    for index, (name, values) in enumerate(series.items()):
        parts.append(f'<path d="{frame.path(values)}" {_stroke(index)}><title>{escape(name)}</title></path>')
    return f"<g>{''.join(parts)}</g>"


def panels(charts: Sequence[str], names: Sequence[str], columns: int = 3) -> str:
    """Charts side by side under one legend, as an SVG document."""
    rows = math.ceil(len(charts) / columns)
    width, height = columns * WIDTH, rows * HEIGHT + 28
    legend, at = [], LEFT
    for index, name in enumerate(names):
        legend.append(f'<line x1="{at}" x2="{at + 24}" y1="14" y2="14" {_stroke(index)}/>')
        legend.append(f'<text x="{at + 30}" y="18">{escape(name)}</text>')
        at += 44 + 7 * len(name)
    placed = (
        f'<g transform="translate({index % columns * WIDTH},{28 + index // columns * HEIGHT})">{chart}</g>'
        for index, chart in enumerate(charts)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="wpr-chart" viewBox="0 0 {width} {height}" role="img" '
        f'width="{width}" height="{height}">{STYLE}'
        f'<rect class="back" width="{width}" height="{height}" fill="#ffffff"/>'
        f"{''.join(legend)}{''.join(placed)}</svg>\n"
    )


def number(value: float) -> str:
    """A tick's number, short."""
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.6g}"


def _range(values: Sequence[float], margin: float = 0.0) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1.0) * 0.1, high + (abs(high) or 1.0) * 0.1
    return low - margin * (high - low), high + margin * (high - low)


def _stroke(index: int) -> str:
    dash = DASHES[index % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="1.8"{dashes}'
