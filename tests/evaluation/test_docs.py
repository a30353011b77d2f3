"""The intervals that docs/evaluation.md quotes are those of the code. (tests/docs runs its examples.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from wpr.evaluation import win_rate

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("wins", "losses", "ties", "quoted"),
    [(64, 0, 0, "[94.3%, 100%]"), (0, 0, 64, "[48.5%, 51.5%]"), (40, 24, 0, "[50.3%, 73.3%]")],
)
def test_quoted_intervals(wins: int, losses: int, ties: int, quoted: str) -> None:
    found = win_rate([1.0] * wins + [0.0] * losses + [0.5] * ties, [0.5] * (wins + losses + ties))
    assert f"[{100 * found.low:.3g}%, {100 * found.high:.3g}%]" == quoted
    assert quoted in PAGE
