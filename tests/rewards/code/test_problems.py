"""APPS problems: what is read, what is refused, and what counts as the right answer."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wpr.rewards.code import CodeProblem, ProblemError, parse_problem
from wpr.rewards.code.comparison import same_output, same_value


def test_standard_input_as_text_or_lines() -> None:
    problem = parse_problem(json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7", "8"]]}))
    assert [test.given for test in problem.tests] == ["1 2\n", "3\n4"]
    assert [test.expected for test in problem.tests] == ["3\n", "7\n8"]
    assert problem.fn_name is None


def test_functions() -> None:
    data = {"inputs": [[[1, 2], "x"], [{"1": 2}], [{"a": 1}]], "outputs": [[3], [4], 5], "fn_name": "solve"}
    problem = parse_problem(data, difficulty="interview", problem_id="7", starter_code="def solve(a, b):")
    assert problem.fn_name == "solve"
    assert problem.difficulty == "interview"
    assert [test.given for test in problem.tests] == [[[1, 2], "x"], [{1: 2}], [{"a": 1}]]


def test_fn_name_from_a_column() -> None:
    assert parse_problem({"inputs": [[1]], "outputs": [1]}, fn_name="f").fn_name == "f"


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (None, "no tests"),
        ("", "no tests"),
        ("null", "no tests"),
        ({}, "no tests"),
        ('{"inputs": [], "outputs": []}', "no tests"),
        ('{"inputs": null, "outputs": null}', "no tests"),
        ('{"inputs": ["1"]}', "no list of inputs and outputs"),
        ('{"inputs": ["1", "2"], "outputs": ["1"]}', "2 inputs but 1 outputs"),
        ("[1, 2]", "is a list"),
        ("{broken", "is no JSON"),
        ({"inputs": [3], "outputs": ["1"]}, "input 0 is 3"),
        ({"inputs": ["3"], "outputs": ["1"], "fn_name": "f"}, "must be the list of arguments"),
        ({"inputs": [[3]], "outputs": ["1"], "fn_name": "os.system"}, "no name of a function"),
    ],
)
def test_refused_by_name(data: Any, named: str) -> None:
    with pytest.raises(ProblemError, match=named) as caught:
        parse_problem(data, problem_id="problem 4711")
    assert "problem 4711" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_no_problem_without_tests() -> None:
    with pytest.raises(ProblemError, match="has no tests"):
        CodeProblem(())


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("3\n", "3", True),
        ("3  \n4\n\n\n", "3\n4", True),
        ("3\r\n4\r\n", "3\n4\n", True),
        ("3 4", "3\n4", True),  # the same words
        ("4\n3", "3\n4", False),  # in another order
        ("", "", True),
        ("", "3", False),
        ("3 3", "3", False),
        ("0.333333333", "0.3333333334", True),
        ("0.3334", "0.3333", False),
        ("3", "3.0", True),
        ("3.0", "3", False),  # a whole number was asked for
        ("1000001", "1000000", False),  # which a tolerance on whole numbers would accept
        ("1e3", "1000.0", True),
        ("nan", "1.5", False),
        ("inf", "1.5", False),
        ("x", "1.5", False),
        ("Yes", "YES", False),
        ("1_0.5", "10.5", True),  # Python's own way to read numbers
        ("9" * 5000, "1.5", False),
        ("5", "1e999", False),  # which is infinite, and with it the tolerance
        ("-1e999", "1e999", False),
        ("inf", "1e999", True),
        ("-inf", "-1e999", True),
        ("inf", "-1e999", False),
        ("nan", "1e999", False),
        ("1e999", "1e308", False),
        ("5", "inf", False),
        ("inf", "inf", True),
        ("-inf", "inf", False),
        ("nan", "inf", False),
        ("nan", "nan", True),
        ("5", "nan", False),
        ("inf", "nan", False),
    ],
)
def test_output(given: str, expected: str, same: bool) -> None:
    assert same_output(given, expected) is same


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        (3, 3, True),
        (3, [3], True),  # wrapped, as APPS does
        ([3], 3, False),
        ([1, 2], [[1, 2]], True),
        (1, [1, 2], False),  # the first of several is not the answer
        ([[1, 2], [3]], [[1, 2], [3]], True),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        (True, 1, True),  # as Python has it
        (10**400, 0.3, False),
        (None, [None], True),
        ({"1": 2}, {"1": 2}, True),
        ({"1": 2}, {"1": 2, "3": 4}, False),
        ("a", "a", True),
        ("a", ["a"], True),
        ([], [[]], True),
        ([], [], True),
        (None, [], False),
        (5, math.inf, False),
        (1e308, math.inf, False),
        (10**400, math.inf, False),
        (math.inf, math.inf, True),
        (-math.inf, math.inf, False),
        (-math.inf, -math.inf, True),
        (math.nan, math.inf, False),
        (math.nan, math.nan, True),
        ([math.nan, 1.0], [math.nan, 1.0], True),
        (5, math.nan, False),
        (math.inf, math.nan, False),
        (math.inf, 1e308, False),
        (math.nan, 1.5, False),
    ],
)
def test_value(given: Any, expected: Any, same: bool) -> None:
    assert same_value(given, expected) is same


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_a_value_is_itself_and_itself_wrapped(value: Any) -> None:
    assert same_value(json.loads(json.dumps(value)), value)
    assert same_value(json.loads(json.dumps(value)), [value])


@given(st.lists(st.integers(-(10**12), 10**12), min_size=1, max_size=5), st.integers(1, 10**6), st.data())
def test_a_changed_whole_number_is_seen(numbers: list[int], change: int, data: Any) -> None:
    place = data.draw(st.integers(0, len(numbers) - 1))
    changed = [number + change * (i == place) for i, number in enumerate(numbers)]
    assert not same_output(" ".join(map(str, changed)), " ".join(map(str, numbers)))
