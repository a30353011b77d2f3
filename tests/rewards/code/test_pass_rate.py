"""pass@1 by difficulty."""

from __future__ import annotations

import pytest

from wpr.rewards.code import Outcome, pass_at_1

GOOD, HALF, BROKEN = Outcome(True, ("pass", "pass")), Outcome(True, ("pass", "fail")), Outcome(False)


def test_by_difficulty() -> None:
    scores = pass_at_1([GOOD, HALF, BROKEN, GOOD], ["interview", "introductory", "interview", "introductory"])
    assert list(scores) == ["interview", "introductory", "all"]
    assert (scores["interview"].problems, scores["interview"].passed, scores["interview"].rate) == (2, 1, 0.5)
    assert scores["interview"].mean_reward == pytest.approx((1.0 - 1.0) / 2)
    assert scores["introductory"].mean_reward == pytest.approx((0.35 + 1.0) / 2)
    assert (scores["all"].problems, scores["all"].passed, scores["all"].rate) == (4, 2, 0.5)


@pytest.mark.parametrize(
    ("outcomes", "difficulties", "named"),
    [
        ([GOOD], [], "1 outcomes but 0 difficulties"),
        ([], [], "no outcomes"),
        ([GOOD], ["all"], "name of the total"),
    ],
)
def test_refused(outcomes: list[Outcome], difficulties: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        pass_at_1(outcomes, difficulties)
