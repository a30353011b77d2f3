"""Training curves: paths that go through the points, text that cannot break the page."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from wpr.report.axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from wpr.report.curves import CURVES, line_chart, panels, policy_curves


def points(chart: str) -> list[tuple[float, float]]:
    path = re.search(r'<path d="([^"]*)"', chart)
    assert path is not None
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path[1])]


def test_a_line_goes_through_its_points() -> None:
    (x0, y0), (x1, y1), (x2, y2) = points(line_chart("score", {"a": [(0, 1.0), (5, 3.0), (10, 2.0)]}))
    assert x0 == LEFT
    assert x2 == WIDTH - RIGHT
    assert x1 == pytest.approx((x0 + x2) / 2)
    assert y1 < y2 < y0, "upwards is less in SVG"
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.1)
    assert TOP <= y1 < y0 <= HEIGHT - BOTTOM


def test_what_is_not_finite_leaves_a_gap() -> None:
    chart = line_chart("score", {"a": [(0, 1.0), (1, math.nan), (2, 2.0), (3, 1.0)]})
    assert len(points(chart)) == 3
    assert re.findall(r"[ML]", re.search(r'd="([^"]*)"', chart)[1]) == ["M", "M", "L"]  # type: ignore[index]


def test_no_data_and_flat_data() -> None:
    assert "no data" in line_chart("score", {"a": []})
    assert all(math.isfinite(y) for _, y in points(line_chart("score", {"a": [(1, 0.0), (2, 0.0)]})))


def test_names_cannot_break_the_document() -> None:
    name = '<script>"&'
    document = panels([line_chart(name, {name: [(0, 1), (1, 2)]})], [name])
    root = ElementTree.fromstring(document)
    assert root.tag.endswith("svg")
    assert "<script>" not in document


def test_curves_of_policies() -> None:
    rows = [{"step": step, "loss": 0.1, "score": step / 10, "kl": 0.01} for step in range(1, 6)]
    document = policy_curves({"rkl": rows, "semantic": [*rows[:3], {"step": 3, "eval_score": 1.0}]})
    root = ElementTree.fromstring(document)
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"rkl", "semantic", *CURVES.values()} <= set(texts)
    assert texts.count("no data") == len(CURVES) - 2
    odd = [{"loss": 1}, {"loss": "x", "step": "y"}, {"loss": 1, "step": 2, "score": None, "kl": [1]}]
    assert policy_curves({"rkl": [*rows, *odd], "semantic": [*rows[:3], *odd]}) == document
