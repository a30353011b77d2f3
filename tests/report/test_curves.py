"""Training curves: paths that go through the points of the logs, and gaps where there is no number."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from wpr.report.axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from wpr.report.curves import training_charts
from wpr.report.section import ReportData
from wpr.runs.tolerant import Policy, Problems, RunRecord


def data(lines: list[dict[str, Any]]) -> ReportData:
    run = RunRecord(Path("run"), "run", {}, None)
    run.policies.append(Policy("a", run, {}, lines, name="a"))
    return ReportData([run], Problems())


def points(values: list[tuple[float, float]]) -> tuple[list[tuple[float, float]], str]:
    """Where the line of these scores goes, and with which strokes."""
    drawn = training_charts(data([{"step": step, "loss": 1.0, "score": value} for step, value in values]))["score"]
    path = re.search(r'<path d="([^"]*)"', drawn.drawn[0])
    assert path is not None
    found = re.findall(r"([ML])([\d.-]+) ([\d.-]+)", path[1])
    return [(float(x), float(y)) for _, x, y in found], "".join(pen for pen, _, _ in found)


def test_a_line_goes_through_its_points() -> None:
    ((x0, y0), (x1, y1), (x2, y2)), _ = points([(0, 1.0), (5, 3.0), (10, 2.0)])
    assert x0 == LEFT
    assert x2 == WIDTH - RIGHT
    assert x1 == pytest.approx((x0 + x2) / 2)
    assert y1 < y2 < y0, "upwards is less in SVG"
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.1)
    assert TOP <= y1 < y0 <= HEIGHT - BOTTOM


def test_what_is_not_finite_leaves_a_gap() -> None:
    assert points([(0, 1.0), (1, math.nan), (2, 2.0), (3, 1.0)])[1] == "MML"


def test_flat_data_and_none() -> None:
    assert all(math.isfinite(y) for _, y in points([(1, 0.0), (2, 0.0)])[0])
    assert training_charts(data([])) == {}
    assert list(training_charts(data([{"step": 1, "loss": 1.0, "score": None, "kl": [1], "odd": 2.0}]), ["odd"])) == [
        "odd"
    ]
