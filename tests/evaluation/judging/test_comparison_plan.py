"""Draws and orders."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wpr.evaluation.judging.comparison_plan import ComparisonPlan
from wpr.evaluation.judging.questions import JudgingSettingsError

NAMES = [f"p{i}" for i in range(200)]


def test_the_papers() -> None:
    comparisons = ComparisonPlan().comparisons(NAMES)
    assert len(comparisons) == 250
    for draw in range(5):
        mine = [one for one in comparisons if one.draw == draw]
        assert len({one.prompt_id for one in mine}) == len(mine) == 50
        assert sum(one.ours_first for one in mine) == 25
    assert len({one.id for one in comparisons}) == 250


def test_the_same_seed_is_the_same_whatever_the_order_of_the_files() -> None:
    assert ComparisonPlan(seed=3).comparisons(NAMES) == ComparisonPlan(seed=3).comparisons(NAMES[::-1])
    assert ComparisonPlan(seed=3).comparisons(NAMES) != ComparisonPlan(seed=4).comparisons(NAMES)


def test_draws_and_orders_are_random() -> None:
    """Over many seeds each prompt is drawn a quarter of the time, and stands first half of the time."""
    drawn: Counter[str] = Counter()
    first: Counter[str] = Counter()
    for seed in range(400):
        for one in ComparisonPlan(draws=1, seed=seed).comparisons(NAMES):
            drawn[one.prompt_id] += 1
            first[one.prompt_id] += one.ours_first
    # 400 draws with chance 1/4: mean 100, deviation 8.7; 5 deviations either way.
    assert min(drawn.values()) > 56
    assert max(drawn.values()) < 144
    shares = [first[name] / drawn[name] for name in NAMES]
    assert min(shares) > 0.25
    assert max(shares) < 0.75


@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 9))
def test_both_orders_are_the_same_comparisons_twice(size: int, draws: int, seed: int) -> None:
    one = ComparisonPlan(size, draws, seed=seed).comparisons(NAMES[:30])
    both = ComparisonPlan(size, draws, both_orders=True, seed=seed).comparisons(NAMES[:30])
    assert len(both) == 2 * len(one)
    assert set(one) < set(both)
    assert sum(each.ours_first for each in both) == len(one)
    assert abs(sum(each.ours_first for each in one) - len(one) / 2) <= draws / 2


def test_all() -> None:
    comparisons = ComparisonPlan(prompts=None).comparisons(NAMES)
    assert sorted(one.prompt_id for one in comparisons) == sorted(NAMES)
    assert {one.draw for one in comparisons} == {0}


def test_refusals() -> None:
    with pytest.raises(JudgingSettingsError, match="a draw of 50 prompts is more than the 20 that both files answer"):
        ComparisonPlan().comparisons(NAMES[:20])
    with pytest.raises(JudgingSettingsError, match="0 prompts"):
        ComparisonPlan(prompts=0)
    with pytest.raises(JudgingSettingsError, match="0 draws"):
        ComparisonPlan(draws=0)
