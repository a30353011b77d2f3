"""What docs/judging.md says of defaults is so. (tests/docs runs its examples.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.judging.coverage import coverage
from wpr.evaluation.judging.comparison_plan import ComparisonPlan
from wpr.evaluation.judging.questions import RequestLimits
from wpr.evaluation.judging.result import NOTABLE, SURE, UNREAD_SHARE
from wpr.evaluation.judging.rubric import shipped_rubrics
from wpr.evaluation.judging.server import LARGEST_BODY, SETTINGS
from wpr.evaluation.judging.verdicts import BRACKETS
from wpr.evaluation.judging.win_rate_statistics import RESAMPLES

PAGE = (Path(__file__).parents[3] / "docs" / "judging.md").read_text(encoding="utf-8")


def test_every_shipped_rubric_is_named() -> None:
    for name in shipped_rubrics():
        assert f"--rubric {name}" in PAGE


@pytest.mark.parametrize(
    "said",
    [
        f"requests that were under way ({RequestLimits().concurrency} at most)",
        f"more than {RequestLimits().longest_wait:g} seconds end the command",
        f"{RequestLimits().give_up_after} questions in a row fail",
        "sent again after {:g}, {:g}, {:g}, ... seconds".format(
            *(RequestLimits().first_wait * times for times in (1, 2, 4))
        ),
        f"(`--prompts {ComparisonPlan().prompts} --draws {ComparisonPlan().draws} --seed {ComparisonPlan().seed}`)",
        f"`temperature` is {SETTINGS['temperature']} and `max_tokens` {SETTINGS['max_tokens']}",
        f"larger than {LARGEST_BODY / 1e6:g} MB",
        f"prompts drawn again {RESAMPLES:,} times",
        f"(p < {SURE}) and at least {0.5 + NOTABLE:.0%} of decided comparisons",
        f"more than {UNREAD_SHARE:.0%} of answers could not be read",
        f"JSON with more than {BRACKETS:,} opening brackets",
    ],
)
def test_defaults_are_as_it_says(said: str) -> None:
    assert said in " ".join(PAGE.split())


def test_a_row_of_the_table_of_coverage() -> None:
    """A quarter of its repeats; within three standard errors of such a share."""
    row = next(line for line in PAGE.splitlines() if line.startswith("| 100 | 0.3 | 0.7 |"))
    interval, again, draws = (float(cell) for cell in row.split("|")[4:7])
    found = coverage(100, 0.7, 0.3, repeats=500, resamples=400, seed=1)
    assert 100 * found.interval == pytest.approx(interval, abs=3)
    assert 100 * found.bootstrap == pytest.approx(again, abs=3)
    assert 100 * found.draws == pytest.approx(draws, abs=6.3)
