"""Figures of findings: places of points, text that stays text, and odd numbers that break nothing."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.report.some_findings import HARMLESS, figures
from wpr.findings import Figure, Mark, Series
from wpr.report.axes import BOTTOM, CHARACTER, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from wpr.report.plots import draw, draw_figure

NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-10, 10)


def texts(document: str) -> list[str]:
    return [
        "".join(element.itertext())
        for element in ElementTree.fromstring(document).iter()
        if element.tag.endswith("text")
    ]


def dots(figure: Figure) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([^"]+)" cy="([^"]+)"', draw(figure).body)]


@pytest.mark.parametrize("figure", figures(), ids=lambda figure: figure.title)
def test_every_kind_is_a_document(figure: Figure) -> None:
    document = draw_figure(figure)
    root = ElementTree.fromstring(document)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = texts(document)
    assert figure.title in words
    assert figure.y_label in words
    if len(figure.series) > 1:
        assert {one.name for one in figure.series} <= set(words)
    for mark in figure.marks:
        assert mark.label in words
    assert "style=" not in document, "the page's policy forbids styles of elements"


def test_points_lie_where_they_should() -> None:
    (x0, y0), (x1, y1), (x2, y2) = dots(
        Figure("scatter", "t", "x", "y", [Series("a", [0.0, 5.0, 10.0], [1.0, 3.0, 2.0])])
    )
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.1)
    assert y1 < y2 < y0, "upwards is less in SVG"
    assert LEFT <= x0 < x2 <= WIDTH - RIGHT
    assert TOP <= y1 < y0 <= HEIGHT - BOTTOM


def test_a_logarithmic_axis_has_equal_steps_for_equal_ratios() -> None:
    series = Series("a", [1.0, 10.0, 100.0, 0.0, -3.0], [1e-4, 1e-2, 1.0, 1.0, 1.0])
    placed = dots(Figure("lines", "t", "x", "y", [series], log_x=True, log_y=True))
    assert len(placed) == 3, "what is not positive has no place"
    (x0, y0), (x1, y1), (x2, y2) = placed
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.11)


@pytest.mark.parametrize("names", [["sft", "rkl", "paper", "hellinger", "semantic"], [f"name {i}" for i in range(13)]])
def test_every_name_is_written_slanted_where_they_do_not_fit_side_by_side(names: list[str]) -> None:
    figure = Figure("scatter", "t", "model", "y", [Series("a", names, [float(i) for i in range(len(names))])])
    drawing = draw(figure)
    root = ElementTree.fromstring(f'<svg xmlns="http://www.w3.org/2000/svg">{drawing.body}</svg>')
    texts = root.findall(".//{*}text")
    turned = [text for text in texts if "rotate" in text.get("transform", "")]
    assert [text.text for text in turned] == names
    assert HEIGHT < drawing.height < HEIGHT + 40
    label = next(text for text in texts if text.text == "model")
    lowest = max(len(name) for name in names) * CHARACTER * 0.6 + HEIGHT - BOTTOM + 12
    assert lowest < float(label.get("y", "0")) < drawing.height


@pytest.mark.parametrize(
    "names",
    [
        ["sft", *(f"semantic+beta={beta}" for beta in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2))],
        ["sft", *(f"Qwen/Qwen1.5-1.8B-Chat run {i}" for i in range(3))],
        [f"{name}+beta={beta}" for name in ("rkl", "semantic") for beta in (0.01, 0.02, 0.05, 0.1, 0.2)],
        [f"semantic+beta={beta}+regularizer.lam={lam}" for beta in (0.05, 0.1) for lam in (5, 10)],
        [f"run-seed{seed}: semantic+beta=0.1" for seed in range(6)],
    ],
)
def test_names_of_a_sweep_stay_different(names: list[str]) -> None:
    figure = Figure("scatter", "t", "model", "y", [Series("a", names, [1.0] * len(names))])
    root = ElementTree.fromstring(f'<svg xmlns="http://www.w3.org/2000/svg">{draw(figure).body}</svg>')
    turned = [text.text for text in root.findall(".//{*}text") if "rotate" in text.get("transform", "")]
    assert len(set(turned)) == len(turned) == len(names)


def test_bars_are_as_long_as_their_values() -> None:
    figure = Figure("bars", "t", "x", "y", [Series("a", ["one", "two", "less"], [1.0, 2.0, -1.0])])
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="10"', draw(figure).body)]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.02)
    assert widths[2] == pytest.approx(widths[0], rel=0.02)
    assert "one" in draw(figure).body


def test_a_radar_of_two_spokes_is_drawn_as_bars() -> None:
    body = draw(Figure("radar", "t", "x", "y", [Series("a", ["one", "two"], [1.0, 2.0])])).body
    assert "polygon" not in body
    assert "rect" in body


def test_a_radar_shows_which_categories_have_a_value() -> None:
    names = ["one", "two", "three", "four"]
    lone = Series("b", names, [math.nan, 2.0, math.nan, math.nan])
    figure = Figure("radar", "t", "x", "y", [Series("a", names, [1.0, math.nan, 2.0, 2.0]), lone])
    assert len(dots(figure)) == 4


def test_a_matrix_has_a_cell_per_number_the_darker_the_larger() -> None:
    rows = [Series("a", ["x", "y"], [0.0, 2.0]), Series("b", ["x", "y"], [1.0, math.nan])]
    drawing = draw(Figure("matrix", "M", "", "cost", rows)).body
    assert re.findall(r'fill-opacity="([^"]+)"', drawing) == ["0.06", "0.56", "0.31"]
    assert [text for text in texts(f"<svg>{drawing}</svg>") if text in ("0", "2", "1")] == ["0", "2", "1"]
    assert "a, y: 2" in drawing


def test_many_points_are_thinned() -> None:
    values = [float(i) for i in range(20_000)]
    assert len(dots(Figure("scatter", "t", "x", "y", [Series("a", values, values)]))) == 4000


def test_nothing_to_draw_is_said() -> None:
    for kind in ("scatter", "lines", "bars", "histogram", "radar"):
        empty: list[Any] = [0.0] if kind == "histogram" else []
        document = draw_figure(Figure(kind, "t", "x", "y", [Series("a", empty, [])]))  # type: ignore[arg-type]
        assert "no numbers to draw" in document


def test_text_stays_text() -> None:
    figure = Figure(
        "bars", HARMLESS, HARMLESS, HARMLESS, [Series(HARMLESS, [HARMLESS], [1.0]), Series("b", ["c"], [1.0])]
    )
    document = draw_figure(figure)
    assert "<script" not in document
    assert HARMLESS in " ".join(texts(document)).replace("…", HARMLESS)


@given(
    st.sampled_from(["scatter", "lines", "bars", "radar", "histogram"]),
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=6),
    st.booleans(),
    NUMBERS,
)
@example(kind="scatter", points=[(5e-324, 0.0, 0.0)], log=False, mark=1.0000000000000002e100)
@example(kind="scatter", points=[(0.0, 0.0, 0.0)], log=False, mark=5e-324)
def test_whatever_the_numbers_are_there_is_a_drawing(
    kind: str, points: list[tuple[float, float, float]], log: bool, mark: float
) -> None:
    x: list[Any] = [str(i) for i in range(len(points))] if kind in ("bars", "radar") else [one[0] for one in points]
    if kind == "histogram":
        x = [*sorted(one for one in x), 1.0]
    ends = [one[2] for one in points]
    series = Series("a", x, [one[1] for one in points], ends, ends)
    figure = Figure(kind, "t", "x", "y", [series], log, log, [Mark(mark, "m"), Mark(mark, "m", "x")], name="n")  # type: ignore[arg-type]
    document = draw_figure(figure)
    ElementTree.fromstring(document)
    assert not re.search(r'="-?(nan|inf)', document)


def test_a_radar_reaches_what_it_includes() -> None:
    """Scores of 3 out of 10 do not fill the figure."""
    names = ["one", "two", "three"]
    low, high = (
        draw(Figure("radar", "t", "x", "y", [Series("a", names, [3.0, 3.0, 3.0])], includes=includes)).body
        for includes in ([], [10.0])
    )
    assert ">10<" not in low
    assert ">10<" in high
