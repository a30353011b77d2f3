"""Axes: ticks that cover the data, numbers and names that can be read, room around what is shown."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wpr.report.axes import BOTTOM, CHARACTER, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Area, Axis, number, ticks


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_and_inside(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 1 <= len(found) <= 6
    assert all(low - 1e-6 * span <= tick <= low + span + 1e-6 * span for tick in found)
    assert found == sorted(set(found))


def test_ticks_by_hand() -> None:
    assert ticks(0, 40) == [0, 10, 20, 30, 40]
    assert ticks(1.72, 2.45) == [1.8, 2.0, 2.2, 2.4]
    assert ticks(3, 3) == [3]


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0"), (0.25, "0.25"), (1e-5, "1e-5"), (2e6, "2e6"), (1200.0, "1200")]
)
def test_numbers(value: float, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("axis", "written"),
    [
        (Axis(1, 1000, True), ["1", "10", "100", "1000"]),
        (Axis(2, 9, True), ["2", "4", "6", "8"]),
        (Axis(1e-16, 1, True), ["1e-16", "1e-12", "1e-8", "1e-4", "1"]),
        (Axis(0, 1), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (Axis.of_names(["a", "b"]), ["a", "b"]),
    ],
)
def test_ticks(axis: Axis, written: list[str]) -> None:
    assert [text for _, text in axis.ticks()] == written


def test_an_axis_around_one_value_and_around_none() -> None:
    assert Axis.around([math.nan, math.inf]) is None
    assert Axis.around([-1.0, 0.0], log=True) is None
    one = Axis.around([3.0, 3.0])
    assert one is not None
    assert one.low < 3 < one.high


def test_slanted_names_stay_in_the_drawing() -> None:
    names = ["a name much longer than any drawing is wide", *(f"another long name {i}" for i in range(30))]
    area = Area(Axis.of_names(names), Axis(0, 1), LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM)
    root = ElementTree.fromstring(f'<svg xmlns="http://www.w3.org/2000/svg">{area.grid("x", "y")}</svg>')
    turned = [text for text in root.findall(".//{*}text") if "rotate" in text.get("transform", "")]
    places = [float(text.get("transform", "").split("(")[1].split(",")[0]) for text in turned]
    assert 5 < len(turned) < len(names)
    assert min(later - earlier for earlier, later in itertools.pairwise(places)) >= 20
    for x, text in zip(places, turned, strict=True):
        assert x - len(text.text or "") * CHARACTER * 0.82 > 0
    assert next(title.text for title in root.findall(".//{*}title")) == names[0]


def test_a_single_long_name_stays_in_the_drawing() -> None:
    area = Area(Axis.of_names(["a policy " * 9]), Axis(0, 1), LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM)
    assert area.slanted
    (text,) = (one for one in re.findall(r">([^<]*)</text>", area.grid("x", "y")) if one.startswith("a p"))
    assert len(text) * CHARACTER * 0.82 < (LEFT + WIDTH - RIGHT) / 2


def test_numbers_are_never_slanted() -> None:
    assert Area(Axis(0, 1), Axis(0, 1), LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM).lower == 0


def test_an_area_around_points_leaves_room_above_and_below() -> None:
    area = Area.around([(0.0, 1.0), (5.0, 2.0), (9.0, math.nan), (math.inf, 7.0)])
    assert area is not None
    assert (area.x.low, area.x.high) == (0.0, 5.0), "a point that cannot be drawn has no say"
    assert area.y.low == pytest.approx(0.95)
    assert area.y.high == pytest.approx(2.05)
    assert area.place(0.0, 1.5) == (LEFT, pytest.approx((TOP + HEIGHT - BOTTOM) / 2))
    assert Area.around([(1.0, math.nan)]) is None
