"""Settings against declared types: what fits, what is bent, and what errors say."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wpr.config.typed import build, check_fields, convert, field_types, unknown
from wpr.errors import RecipeError

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForCheckers


@dataclass
class Inner:
    size: int = 1
    rate: float = 0.5

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size={self.size} must be 0 or more")


@dataclass
class Outer:
    name: str
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    parts: dict[str, Inner] = field(default_factory=dict)
    sides: list[float] = field(default_factory=list)
    kind: Literal["a", "b"] = "a"
    made: int = field(default=3, init=False)


def where(key: str) -> str:
    return f"file ({key})"


@pytest.mark.parametrize(
    ("value", "hint", "result"),
    [
        (3, int, 3), (3.0, int, 3), (1e5, int, 100_000), (3, float, 3.0), (1e-5, float, 1e-5), ("no", str, "no"),
        (True, bool, True), (None, None, None), (3, int | None, 3), (None, int | None, None), (3, float | int, 3),
        (3, float | None, 3.0), (0.1, int | float, 0.1), ("all", int | Literal["all"], "all"),
        ("a", Literal["a", "b"], "a"), ([1, 2], list[float], [1.0, 2.0]), ((1,), list[int], [1]),
        ([1, "x"], list, [1, "x"]),
        ({"x": 1}, dict[str, float], {"x": 1.0}), ({"x": [1]}, dict, {"x": [1]}), (object, Any, object),
        (["x"], str | list[str], ["x"]), (2, Annotated[float, "unit"], 2.0),
    ],
)  # fmt: skip
def test_values_that_fit(value: Any, hint: Any, result: Any) -> None:
    found = convert(value, hint, "key", where)
    assert found == result
    assert type(found) is type(result)


@pytest.mark.parametrize(
    ("value", "hint", "words"),
    [
        (3.5, int, "a whole number"), (True, int, "a whole number"), ("3", int, "a whole number"),
        (float("inf"), int, "a whole number"), (float("nan"), int, "a whole number"), ("1e-5", float, "a number"),
        (False, float, "a number"), (1, bool, "true or false"), ("no", bool, "true or false"), (1, str, "text"),
        (None, str, "text"), (None, int, "a whole number"), ("c", Literal["a", "b"], "'a' or 'b'"),
        ("x", int | None, "a whole number or null"), (0.5, int | Literal["all"], "a whole number or 'all'"),
        ("x", list[float], "a list of numbers"), ("x", list, "a list"), (3, dict[str, int], "settings (`name: value`)"),
        (3, Inner | None, "settings (`name: value`) or null"), ([], Inner, "settings (`name: value`)"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit(value: Any, hint: Any, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        convert(value, hint, "a.key", where)
    assert str(caught.value) == f"file (a.key): a.key={value!r} must be {words}"


def test_a_part_that_does_not_fit_is_named() -> None:
    with pytest.raises(RecipeError, match=r"file \(sides\.1\): sides\.1='x' must be a number"):
        convert([1, "x"], list[float], "sides", where)
    with pytest.raises(RecipeError, match=r"parts\.b='x' must be a number"):
        convert({"a": 1, "b": "x"}, dict[str, float], "parts", where)


@given(st.floats() | st.integers() | st.booleans() | st.text(max_size=5) | st.none())
def test_whole_numbers_are_all_that_is_bent(value: Any) -> None:
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value and value % 1 == 0
    try:
        found = convert(value, int, "key", where)
    except RecipeError:
        assert not whole
    else:
        assert whole
        assert found == value
        assert type(found) is int


def test_a_tree_of_settings_is_built() -> None:
    found = build(Outer, {"name": "x", "inner": {"size": 2.0}, "maybe": {}, "parts": {"p": {"rate": 1}}}, "", where)
    assert found == Outer("x", Inner(2), Inner(), {"p": Inner(rate=1.0)})
    assert isinstance(found.parts["p"].rate, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "x", "iner": {}}, "file (iner): unknown setting iner; did you mean inner?"),
        (
            {"name": "x", "inner": {"sise": 1}},
            "file (inner.sise): unknown setting inner.sise; did you mean inner.size?",
        ),
        (
            {"name": "x", "parts": {"p": {"rat": 1}}},
            "file (parts.p.rat): unknown setting parts.p.rat; did you mean parts.p.rate?",
        ),
        ({"name": "x", "maybe": {"rat": 1}}, "file (maybe.rat): unknown setting maybe.rat; did you mean maybe.rate?"),
        ({"name": "x", "inner": {"zzz": 1}}, "file (inner.zzz): unknown setting inner.zzz; known are size, rate"),
        ({"name": "x", "made": 4}, "file (made): unknown setting made; did you mean maybe?"),
        ({"name": "x", "inner": {"size": -1}}, "file (inner): inner: size=-1 must be 0 or more"),
        ({"name": "x", "inner": None}, "file (inner): inner=None must be settings (`name: value`)"),
    ],
)
def test_faults_at_every_level(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build(Outer, values, "", where)
    assert str(caught.value) == message


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(RecipeError, match=r"outer\.name is missing"):
        build(Outer, {}, "outer", where)


def test_what_is_not_settings_at_all() -> None:
    with pytest.raises(RecipeError, match=r"file \(outer\): outer is 3; it takes settings"):
        build(Outer, 3, "outer", where)


def test_long_lists_of_names_are_not_shown() -> None:
    many = [f"setting{number}" for number in range(31)]
    assert "see docs/recipes.md" in str(unknown("zzz", many, where))
    assert "setting30" in str(unknown("zzz", many[1:], where))


def test_extra_names_have_types_too() -> None:
    assert check_fields(Inner, {"batch": 2.0}, "s", where, extra={"batch": int}) == {"batch": 2}
    with pytest.raises(RecipeError, match=r"s\.batch='x' must be a whole number"):
        check_fields(Inner, {"batch": "x"}, "s", where, extra={"batch": int})


def test_types_that_only_checkers_import_are_taken_as_they_are() -> None:
    @dataclass
    class Base:
        size: int = 1

    @dataclass
    class Made(Base):
        exact: OnlyForCheckers | None = None
        rate: float = 1.0

    found = field_types(Made)
    assert found == {"size": int, "exact": Any, "rate": float}


def test_fields_that_a_class_makes_itself_are_not_settings() -> None:
    assert list(field_types(Outer)) == [f.name for f in dataclasses.fields(Outer) if f.name != "made"]
