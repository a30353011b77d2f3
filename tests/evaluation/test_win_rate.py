"""Win rates: counts, Wilson's interval as a special case, measured coverage, the sign test against scipy."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from tests.evaluation.coverage import coverage
from wpr.evaluation.win_rate import sign_test, win_rate


def test_counts_and_rate() -> None:
    found = win_rate([3.0, 1.0, 2.0, 5.0, 0.0], [1.0, 2.0, 2.0, 4.0, -1.0])
    assert (found.comparisons, found.wins, found.ties, found.losses) == (5, 3, 1, 1)
    assert found.rate == pytest.approx(0.7)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(("wins", "losses"), [(0, 5), (1, 0), (7, 3), (40, 60), (64, 0), (250, 6)])
def test_without_ties_and_groups_it_is_wilsons_interval(wins: int, losses: int, confidence: float) -> None:
    found = win_rate([1.0] * wins + [0.0] * losses, [0.5] * (wins + losses), confidence=confidence)
    expected = binomtest(wins, wins + losses).proportion_ci(confidence, "wilson")
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (0, 3), (5, 5), (9, 2), (130, 100), (2000, 1900)])
def test_sign_test_is_the_exact_binomial_test(wins: int, losses: int) -> None:
    expected = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert sign_test(wins, losses) == pytest.approx(expected, rel=1e-9)


def test_ties_take_no_part_in_the_sign_test() -> None:
    with_ties = win_rate([1.0] * 9 + [0.0] * 2 + [5.0] * 30, [0.5] * 11 + [5.0] * 30)
    assert with_ties.p_value == pytest.approx(binomtest(9, 11).pvalue)


def test_a_group_counts_once_in_the_sign_test() -> None:
    """Three prompts of three responses: two won by majority, one even."""
    ours = [1, 1, 0, 1, 1, 1, 1, 0, 0.5]
    found = win_rate(ours, [0.5] * 9, groups=[0, 0, 0, 1, 1, 1, 2, 2, 2])
    assert found.p_value == pytest.approx(binomtest(2, 2).pvalue)


def test_copies_of_a_comparison_in_its_group_change_nothing() -> None:
    """Drawing the same response four times is no new evidence, which a comparison without groups takes it for."""
    generator = random.Random(0)
    ours = [generator.choice([0.0, 0.5, 1.0, 1.0]) for _ in range(40)]
    once = win_rate(ours, [0.5] * 40)
    four = win_rate(ours * 4, [0.5] * 160, groups=list(range(40)) * 4)
    blind = win_rate(ours * 4, [0.5] * 160)
    for name in ("rate", "low", "high", "standard_error", "p_value"):
        assert getattr(four, name) == pytest.approx(getattr(once, name), abs=1e-12), name
    assert blind.high - blind.low < 0.55 * (once.high - once.low)


def test_standard_error_is_that_of_the_group_means() -> None:
    ours = np.array([1, 1, 0, 1, 0.5, 0.5, 0, 0, 1, 1, 1, 1], dtype=float)
    found = win_rate(list(ours), [0.5] * 12, groups=["a"] * 3 + ["b"] * 3 + ["c"] * 3 + ["d"] * 3)
    outcomes = np.where(ours > 0.5, 1, np.where(ours < 0.5, 0, 0.5)).reshape(4, 3).mean(1)
    assert found.standard_error == pytest.approx(outcomes.std(ddof=1) / 2)


@pytest.mark.parametrize("tie_share", [0.0, 0.6])
@pytest.mark.parametrize(
    ("prompts", "responses", "alike"), [(64, 1, 0.0), (64, 4, 0.3), (64, 4, 1.0), (256, 1, 0.0), (256, 4, 0.3)]
)
@pytest.mark.parametrize("rate", [0.5, 0.7])
def test_coverage(rate: float, prompts: int, responses: int, alike: float, tie_share: float) -> None:
    """The 95% interval holds the true rate in 93% to 97.5% of repeated experiments. ``alike`` is the correlation of the
    responses of a prompt. (docs/evaluation.md has more of this table.)
    """
    share, _ = coverage(prompts, rate, tie_share, responses, alike, repeats=2000 if prompts == 64 else 1000)
    assert 0.93 <= share <= 0.975


def test_coverage_with_groups_of_different_sizes() -> None:
    share, _ = coverage(64, 0.6, 0.2, alike=0.3, sizes=[1] * 40 + [3] * 12 + [8] * 12, repeats=2000)
    assert 0.93 <= share <= 0.975


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 6)), min_size=1, max_size=40),
    st.sampled_from([0.5, 0.95, 0.999]),
)
def test_interval_is_within_0_and_1_around_the_rate_and_mirrors(
    rows: list[tuple[float, int]], confidence: float
) -> None:
    ours, groups = [row[0] for row in rows], [row[1] for row in rows]
    found = win_rate(ours, [0.5] * len(rows), groups, confidence)
    assert 0 <= found.low <= found.rate <= found.high <= 1
    assert found.high - found.low > 1e-4
    assert 0 < found.p_value <= 1
    mirrored = win_rate([0.5] * len(rows), ours, groups, confidence)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - found.high, 1 - found.low), abs=1e-12)
    assert mirrored.p_value == pytest.approx(found.p_value)


def test_all_wins_and_all_ties_keep_a_width() -> None:
    wins = win_rate([1.0] * 64, [0.0] * 64)
    assert wins.high == 1
    assert wins.low == pytest.approx(0.9434, abs=1e-3)
    ties = win_rate([1.0] * 64, [1.0] * 64)
    assert (ties.rate, ties.p_value) == (0.5, 1.0)
    assert 0.01 < ties.high - ties.low < 0.05


def test_a_single_group_says_little() -> None:
    found = win_rate([1.0] * 50, [0.0] * 50, groups=["one prompt"] * 50)
    assert found.low < 0.25
    assert math.isnan(found.standard_error)
    assert found.p_value == 1


def test_one_large_group_weighs_like_one() -> None:
    """50 wins at one prompt and one at each of five others are worth little more than a single group."""
    lopsided = win_rate([1.0] * 55, [0.0] * 55, groups=[0] * 50 + [1, 2, 3, 4, 5])
    even = win_rate([1.0] * 6, [0.0] * 6)
    assert lopsided.low < 0.3 < 0.6 < even.low


def test_infinite_scores_compare_like_others() -> None:
    found = win_rate([math.inf, -math.inf, math.inf], [1.0, 1.0, math.inf])
    assert (found.wins, found.losses, found.ties) == (1, 1, 1)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="3 scores against 2;.*drop what one side did not answer"):
        win_rate([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match="with 1 group labels"):
        win_rate([1, 2], [1, 2], groups=["a"])
    with pytest.raises(ValueError, match="no scores to compare"):
        win_rate([], [])
    with pytest.raises(ValueError, match="pair 1 are 2.0 and nan"):
        win_rate([1.0, 2.0], [1.0, math.nan])
    with pytest.raises(ValueError, match="confidence=95 must be between 0 and 1"):
        win_rate([1.0], [2.0], confidence=95)
