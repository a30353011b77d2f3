"""Running mean and variance, against those of everything at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wpr.rewards import RunningMoments, ScoreShaping


@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=6), min_size=1, max_size=6))
def test_batches_are_the_whole(batches: list[list[float]]) -> None:
    moments = RunningMoments()
    for batch in batches:
        moments.update(torch.tensor(batch, dtype=torch.float64))
    everything = torch.tensor([value for batch in batches for value in batch], dtype=torch.float64)
    assert moments.mean == pytest.approx(float(everything.mean()), abs=1e-9)
    assert moments.squares == pytest.approx(float((everything - everything.mean()).square().sum()), abs=1e-6)


def test_constant_scores_stay_finite() -> None:
    moments = RunningMoments()
    moments.update(torch.full((4,), 3.0))
    assert moments.normalise(torch.full((4,), 3.0)).tolist() == [0.0] * 4


def test_huge_offsets_do_not_cancel() -> None:
    moments = RunningMoments()
    for values in ([1e9, 1e9 + 2], [1e9 + 1, 1e9 + 3]):
        moments.update(torch.tensor(values, dtype=torch.float64))
    assert moments.deviation == pytest.approx(1.118034, rel=1e-6)


def test_scores_are_shaped_in_order() -> None:
    """The penalty of those that did not end, then moments over it, then the clip."""
    scores, finished = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True])
    nothing = ScoreShaping(None, False, None)
    assert nothing(scores, finished, lambda total: total) is scores
    torch.testing.assert_close(
        ScoreShaping(4.0, False, None)(scores, finished, lambda total: total), scores - 4 * ~finished
    )
    shaping = ScoreShaping(4.0, True, 1.1)
    shaped = shaping(scores, finished, lambda total: total)
    assert (shaping.moments.count, shaping.moments.mean) == (3, pytest.approx(2 / 3))
    torch.testing.assert_close(shaped, ((scores - 4 * ~finished - 2 / 3) / shaping.moments.deviation).clamp(-1.1, 1.1))
    assert shaped.min() == -1.1
