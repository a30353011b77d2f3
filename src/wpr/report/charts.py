"""The page's charts: SVG coloured by its style sheet, with the numbers that its script shows on hover and focus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wpr.report.axes import HEIGHT, TOP, WIDTH, Area, Points
from wpr.report.markup import Content, Markup, shown, tag
from wpr.report.tables import thinned
from wpr.runs.tolerant import Policy

COLOURS = 9
"""Policies' colours in the style sheet; more policies than that share them."""

DASHES = 4
POINTS = 6000
"""Points that a chart draws at most, over all its lines."""

SMOOTHED = 24
"""Lines of at least so many points are drawn as a moving average over faint points."""


@dataclass(frozen=True)
class Line:
    """A line or a trail of points with its name and looks."""

    name: str
    points: Points
    colour: int = 0
    dash: int = 0
    neutral: bool = False

    @property
    def looks(self) -> str:
        """Classes of the style sheet."""
        return looks(self.colour, self.dash, self.neutral)


@dataclass(frozen=True)
class Chart:
    """What was drawn on axes: on the page, and in documents of their own (`wpr.report.figures`). lines: whose numbers
    can be read from it.
    """

    title: str
    x_label: str
    area: Area
    drawn: Sequence[Markup]
    lines: Sequence[Line]

    @property
    def description(self) -> str:
        """The chart in words, for those who do not see it."""
        return f"{self.title}, by {self.x_label}. {_ranges(self.lines)}"


def curve_chart(title: str, lines: Sequence[Line], x_label: str = "step") -> Chart | None:
    """Lines over training on shared axes; None where no line has a number."""
    lines = _within_budget(lines)
    area = Area.around([point for line in lines for point in line.points])
    if area is None:
        return None
    drawn = []
    for line in lines:
        smooth = moving_average(line.points)
        if smooth is not line.points:
            drawn.append(tag("path", d=area.path(line.points), class_=f"raw {line.looks}"))
        drawn.append(tag("path", d=area.path(smooth), class_=f"line {line.looks}"))
        placed = [place for point in line.points if (place := area.place(*point)) is not None]
        if len(placed) == 1:
            x, y = placed[0]
            drawn.append(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="3.5", class_=f"dot {line.looks}"))
    return Chart(title, x_label, area, drawn, lines)


def trail_chart(title: str, trails: Sequence[Line], ends: Sequence[Line], x_label: str) -> Chart | None:
    """Paths of policies through a plane, and where they ended as large marks with their names."""
    trails = _within_budget(trails)
    area = Area.around([point for line in (*trails, *ends) for point in line.points], x_margin=0.06)
    if area is None:
        return None
    drawn = []
    for line in trails:
        finite = [(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y)]
        across = moving_average([(index, x) for index, (x, _) in enumerate(finite)])
        upwards = moving_average([(index, y) for index, (_, y) in enumerate(finite)])
        smooth = [(x, y) for (_, x), (_, y) in zip(across, upwards, strict=True)]
        drawn.append(tag("path", d=area.path(smooth), class_=f"trail {line.looks}"))
    for line in ends:
        if (place := area.place(*line.points[0])) is not None:
            drawn.append(tag("g", end_mark(line, *place), tag("title", line.name)))
    return Chart(title, x_label, area, drawn, ends)


@dataclass
class Charts:
    """Collects what the page's script needs of every chart, by the chart's id."""

    data: dict[str, Any] = field(default_factory=dict)

    def panel(self, identifier: str, chart: Chart) -> Markup:
        """The chart as a panel of the page."""
        area = chart.area
        self.data[identifier] = {
            "x": chart.x_label,
            "frame": {"left": area.left, "right": area.right, "top": area.top, "bottom": area.bottom, "width": WIDTH},
            "xs": [area.x.low, area.x.high],
            "ys": [area.y.low, area.y.high],
            "lines": [
                {
                    "name": line.name,
                    "looks": line.looks,
                    "points": [[_short(x), _short(y)] for x, y in line.points if math.isfinite(x)],
                }
                for line in chart.lines
            ],
        }
        svg = tag(
            "svg",
            area.grid(chart.x_label),
            *chart.drawn,
            viewbox=f"0 {TOP - 12} {WIDTH} {HEIGHT - TOP + 12}",
            class_="chart",
            role="img",
            tabindex="0",
            aria_label=f"{chart.description} Arrow keys read the values.",
            id=identifier,
        )
        return tag("figure", tag("figcaption", chart.title), svg, class_="panel")


def end_mark(line: Line, x: float, y: float) -> Markup:
    """The mark of where a policy ended, or the SFT model stands."""
    return tag("path", d=_mark(x, y, line.dash), class_=f"mark {line.looks}")


def looks(colour: int, dash: int = 0, neutral: bool = False) -> str:
    """Classes for a policy's colour and its run's dash."""
    return "neutral" if neutral else f"c{colour % COLOURS} d{dash % DASHES}"


def swatch(name: str, looked: str) -> Markup:
    """A name with its colour before it."""
    line = tag("line", x1="1", x2="21", y1="6", y2="6")
    sample = tag("svg", line, width="22", height="12", class_=f"swatch {looked}", aria_hidden="true")
    return tag("span", sample, name, class_="named")


def policy_name(policy: Policy) -> Markup:
    """A policy's name with its colour before it."""
    return swatch(policy.name, looks(policy.colour, policy.dash))


def legend(names: Sequence[Markup]) -> Markup:
    """Names with their colours in one line."""
    return tag("p", *names, class_="legend")


@dataclass(frozen=True)
class Interval:
    """A row of an interval chart: a share with its interval. looks: of the mark. note: the numbers, to read."""

    label: Content
    rate: float
    low: float
    high: float
    looks: str
    note: str


def interval_chart(rows: Sequence[Interval]) -> Markup:
    """Shares from 0 to 100% with their intervals, one per row, a line at one half."""
    drawn = []
    for row in rows:
        svg = tag(
            "svg",
            *(_upright(f"{at}%", "0", "100%", "half" if at == 50 else "g") for at in QUARTERS),
            tag(
                "svg",
                tag("line", x1=_share(row.low), x2=_share(row.high), y1="0", y2="0", class_="bar"),
                *(_upright(_share(end), "-5", "5", "bar") for end in (row.low, row.high)),
                tag("circle", cx=_share(row.rate), cy="0", r="5.5", class_="dot"),
                y="50%",
                overflow="visible",
            ),
            class_=f"interval {row.looks}",
            aria_hidden="true",
        )
        drawn.append(_row(row.label, svg, row.note))
    ticks = [
        tag("text", f"{at}%", x=f"{at}%", y="12", text_anchor="start" if at == 0 else "end" if at == 100 else "middle")
        for at in (0, 50, 100)
    ]
    axis = tag("svg", *ticks, class_="interval axis", aria_hidden="true")
    drawn.append(_row("", axis, "", "row last"))
    return tag("div", *drawn, class_="rows")


QUARTERS = (0, 25, 50, 75, 100)


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart: parts ``(classes, size)`` after each other. note: the numbers, to read."""

    label: Content
    parts: Sequence[tuple[str, float]]
    note: str


def bar_chart(rows: Sequence[Bar]) -> Markup:
    """Bars on one scale, each of one or several parts."""
    longest = max((sum(size for _, size in row.parts) for row in rows), default=0.0) or 1.0
    drawn = []
    for row in rows:
        at, parts = 0.0, []
        for classes, size in row.parts:
            x, width = _share(at / longest), _share(size / longest)
            parts.append(tag("rect", x=x, y="4", width=width, height="16", class_=classes))
            at += size
        drawn.append(_row(row.label, tag("svg", *parts, class_="interval", aria_hidden="true"), row.note))
    return tag("div", *drawn, class_="rows")


def _row(label: Content, drawn: Markup, note: str, classes: str = "row") -> Markup:
    return tag("div", tag("span", label, class_="label"), drawn, tag("span", note, class_="value"), class_=classes)


def _upright(x: str, top: str, bottom: str, classes: str) -> Markup:
    return tag("line", x1=x, x2=x, y1=top, y2=bottom, class_=classes)


def moving_average(points: Points) -> Points:
    """Means over a window of about a tenth of the points around each; the points themselves where there are few."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if len(finite) < SMOOTHED:
        return points
    half = max(2, len(finite) // 20)
    sums = [0.0]
    for _, y in finite:
        sums.append(sums[-1] + y)
    found = []
    for index, (x, _) in enumerate(finite):
        first, last = max(0, index - half), min(len(finite), index + half + 1)
        found.append((x, (sums[last] - sums[first]) / (last - first)))
    return found


def _within_budget(lines: Sequence[Line]) -> list[Line]:
    most = max(20, POINTS // max(1, len(lines)))
    return [replace(line, points=thinned(line.points, most)) for line in lines if line.points]


def _mark(x: float, y: float, run: int) -> str:
    """The outline of a mark: circle, square, diamond, triangle, by run."""
    kind = run % DASHES
    if kind == 0:
        return f"M{x - 6:.1f} {y:.1f}a6 6 0 1 0 12 0a6 6 0 1 0 -12 0z"
    if kind == 1:
        return f"M{x - 5.5:.1f} {y - 5.5:.1f}h11v11h-11z"
    if kind == 2:
        return f"M{x:.1f} {y - 7.5:.1f}l7.5 7.5l-7.5 7.5l-7.5 -7.5z"
    return f"M{x:.1f} {y - 7:.1f}l7 12.5h-14z"


def _ranges(lines: Sequence[Line]) -> str:
    ranges = []
    for line in lines[:8]:
        finite = [y for _, y in line.points if math.isfinite(y)]
        if finite:
            first, last = (shown(y) for y in (finite[0], finite[-1]))
            ranges.append(f"{line.name}: {last}." if len(finite) == 1 else f"{line.name}: from {first} to {last}.")
    return " ".join(ranges)


def _share(value: float) -> str:
    return f"{100 * value:.2f}%"


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
