"""Statistics of judged comparisons against closed forms, scipy, and simulation."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy.stats import binomtest

from tests.evaluation.judging.coverage import coverage
from wpr.evaluation.judging.comparison_plan import ComparisonPlan
from wpr.evaluation.judging.win_rate_statistics import agreement, bootstrap, over_draws, places


def test_the_standard_error_over_draws() -> None:
    generator = np.random.default_rng(0)
    outcomes = generator.choice([0.0, 0.5, 1.0], size=(5, 50))
    rates, error = over_draws(outcomes.ravel().tolist(), np.repeat(range(5), 50).tolist())
    assert rates == pytest.approx(outcomes.mean(1).tolist())
    assert error == pytest.approx(outcomes.mean(1).std(ddof=1) / math.sqrt(5))
    assert math.isnan(over_draws([1.0, 0.0], [0, 0])[1])


def test_the_bootstrap_of_coins_is_the_binomial_distribution() -> None:
    """Drawing 200 of 200 outcomes again gives a binomial number of wins: its quantiles are known."""
    from scipy.stats import binom

    outcomes = [1.0] * 130 + [0.0] * 70
    low, high = bootstrap(outcomes, list(range(200)), resamples=40_000)
    expected = binom.ppf([0.025, 0.975], 200, 0.65) / 200
    assert (low, high) == pytest.approx(expected.tolist(), abs=0.0051)  # one win is 0.005


def test_the_bootstrap_takes_groups_as_one() -> None:
    generator = random.Random(0)
    outcomes = [float(generator.random() < 0.6) for _ in range(100)]
    once = bootstrap(outcomes, list(range(100)))
    copies = bootstrap(outcomes * 4, list(range(100)) * 4)
    blind = bootstrap(outcomes * 4, list(range(400)))
    assert copies == pytest.approx(once)
    assert blind[1] - blind[0] < 0.6 * (once[1] - once[0])
    assert bootstrap([1.0, 1.0], [0, 1]) == (1, 1)
    with pytest.raises(ValueError, match="no outcomes"):
        bootstrap([], [])


# 93% to 97% of 1,000 repeats: 95% itself lies outside by chance in one case of 200.
@pytest.mark.parametrize(("pool", "rate", "ties"), [(100, 0.7, 0.0), (250, 0.5, 0.3), (1000, 0.7, 0.0)])
def test_coverage_under_the_papers_draws(pool: int, rate: float, ties: float) -> None:
    """The 95% interval, and the bootstrap, hold the true rate in 93% to 97% of simulated evaluations."""
    found = coverage(pool, rate, ties, repeats=1000, resamples=400)
    assert 0.93 <= found.interval <= 0.97
    assert 0.93 <= found.bootstrap <= 0.97


def test_the_error_over_draws_understates_where_draws_overlap() -> None:
    """With 100 prompts, five draws of 50 have every second prompt in common: their interval holds far too rarely."""
    assert coverage(100, 0.7, repeats=500, resamples=10).draws < 0.8
    assert coverage(50, 0.7, repeats=200, resamples=10).draws < 0.3


@pytest.mark.parametrize("protocol", [ComparisonPlan(both_orders=True), ComparisonPlan(None, 1)])
def test_coverage_with_a_judge_that_goes_by_the_place(protocol: ComparisonPlan) -> None:
    found = coverage(250, 0.7, 0.1, protocol, bias=0.3, repeats=1000, resamples=400)
    assert 0.93 <= found.interval <= 0.97


def test_places() -> None:
    found = places(["A", "B", "A", "E", "A"], [0, 1, 2, 3, 4])
    assert (found.first, found.second, found.pairs) == (3, 1, 0)
    assert found.share == found.bias == 0.75
    assert found.p_value == pytest.approx(binomtest(3, 4).pvalue)


def test_places_both_ways_round() -> None:
    # Pair 0: place A twice; 1: the same response twice; 2: place B twice; 3: a tie, undecided; 4: asked once.
    found = places(["A", "A", "A", "B", "B", "B", "E", "A", "A"], [0, 0, 1, 1, 2, 2, 3, 3, 4])
    assert (found.pairs, found.first_twice, found.second_twice) == (3, 1, 1)
    assert found.bias == pytest.approx(1 / 3)
    assert found.p_value == 1


def test_places_without_a_decision() -> None:
    assert math.isnan(places(["E", "E"], [0, 1]).bias)
    assert places([], []).p_value == 1


def test_agreement_is_cohens_kappa() -> None:
    """The table of Cohen's kind: 20 both yes, 15 both no, 5 and 10 apart; kappa 0.4."""
    one = ["y"] * 25 + ["n"] * 25
    other = ["y"] * 20 + ["n"] * 5 + ["y"] * 10 + ["n"] * 15
    found = agreement({str(i): v for i, v in enumerate(one)}, {str(i): v for i, v in enumerate(other)})
    assert (found.comparisons, found.share, found.kappa) == (50, 0.7, pytest.approx(0.4))


def test_agreement_at_its_ends() -> None:
    names = [str(i) for i in range(60)]
    verdicts = dict(zip(names, ["ours", "theirs", "tie"] * 20, strict=True))
    assert agreement(verdicts, verdicts).kappa == 1
    generator = random.Random(1)
    many = {str(i): generator.choice(["ours", "theirs", "tie"]) for i in range(20_000)}
    blind = {name: generator.choice(["ours", "theirs", "tie"]) for name in many}
    assert abs(agreement(many, blind).kappa) < 0.02
    same = dict.fromkeys(names, "ours")
    assert math.isnan(agreement(same, same).kappa)  # nothing beyond chance can be seen
    assert agreement(same, same).share == 1
    assert agreement(verdicts, {"other": "ours"}).comparisons == 0
