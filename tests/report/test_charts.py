"""The page's charts: where marks lie, what is smoothed, what is left out."""

from __future__ import annotations

import math
import re

from wpr.report.axes import Area
from wpr.report.charts import (
    POINTS,
    Bar,
    Charts,
    Interval,
    Line,
    bar_chart,
    curve_chart,
    interval_chart,
    moving_average,
)


def test_a_moving_average_keeps_a_level_and_calms_noise() -> None:
    noisy = [(float(step), 2.0 + (-1) ** step) for step in range(100)]
    calm = moving_average(noisy)
    assert [x for x, _ in calm] == [x for x, _ in noisy]
    assert all(abs(y - 2.0) <= 0.2 for _, y in calm)
    assert moving_average(noisy[:10]) == noisy[:10], "few points are shown as they are"
    assert len(moving_average([*noisy, (100.0, math.nan)])) == 100


def test_curves_go_through_their_points_and_keep_their_numbers() -> None:
    charts = Charts()
    points = [(1.0, 0.5), (2.0, math.nan), (3.0, 1.5)]
    chart = curve_chart("a <title>", [Line("a & b", points, colour=11, dash=5)])
    assert chart is not None
    figure = charts.panel("score", chart)
    path = re.search(r'<path d="([^"]*)" class="line c2 d1"/>', figure)
    assert path is not None
    area = Area.around([points[0], points[2]])
    assert area is not None
    places = [tuple(round(value, 1) for value in area.place(*point) or ()) for point in (points[0], points[2])]
    found = [(float(x), float(y)) for x, y in re.findall(r"M([\d.]+) ([\d.]+)", path[1])]
    assert found == places
    assert charts.data["score"]["lines"][0]["points"] == [[1.0, 0.5], [2.0, None], [3.0, 1.5]]
    assert "a &lt;title&gt;" in figure
    assert curve_chart("none", [Line("a", [(1.0, math.nan)])]) is None


def test_many_points_are_thinned() -> None:
    lines = [Line(str(number), [(float(step), step / 7) for step in range(20_000)]) for number in range(3)]
    chart = curve_chart("many", lines)
    assert chart is not None
    drawn = [line.points for line in chart.lines]
    assert sum(map(len, drawn)) <= POINTS
    assert all(points[0][0] == 0 and points[-1][0] == 19_999 for points in drawn)


def test_intervals_and_bars_lie_where_they_should() -> None:
    drawn = interval_chart([Interval("<a>", 0.7, 0.55, 0.85, "c0", "70%")])
    assert 'cx="70.00%"' in drawn
    assert 'x1="55.00%" x2="85.00%"' in drawn
    assert "&lt;a&gt;" in drawn
    bars = bar_chart([Bar("a", [("x", 1.0), ("y", 3.0)], "4 s"), Bar("b", [("x", 2.0)], "2 s"), Bar("c", [], "")])
    assert re.findall(r'<rect x="([\d.]+)%" y="4" width="([\d.]+)%"', bars) == [
        ("0.00", "25.00"), ("25.00", "75.00"), ("0.00", "50.00"),
    ]  # fmt: skip
    assert "nan" not in bar_chart([Bar("a", [("x", 0.0)], "0 s")])
