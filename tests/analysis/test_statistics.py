"""Correlations against numpy, ranks by hand, intervals by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from wpr.analysis.statistics import (
    Estimate,
    bootstrap,
    correlation,
    fit_line,
    grouped_mean,
    interval,
    partial,
    pearson,
    quantiles,
    ranks,
    series,
    spearman,
)


@pytest.fixture
def two() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, generator=generator, dtype=torch.float64)
    return x, 0.5 * x + torch.randn(200, generator=generator, dtype=torch.float64)


def test_pearson_is_numpys(two: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert float(pearson(*two)) == pytest.approx(np.corrcoef(*two)[0, 1], abs=1e-12)
    rows = torch.stack(two)
    assert pearson(rows, rows.flip(0)).shape == (2,)
    assert float(pearson(two[0], -3 * two[0] + 1)) == pytest.approx(-1)


def test_what_does_not_vary_has_no_correlation() -> None:
    assert math.isnan(float(pearson(torch.ones(5), torch.arange(5.0))))
    found = correlation(torch.ones(5), torch.arange(5.0))
    assert math.isnan(found.value)
    assert math.isnan(found.low)
    assert math.isnan(correlation(torch.arange(2.0), torch.arange(2.0)).value), "two points always lie on a line"


def test_equal_values_share_their_ranks() -> None:
    assert ranks(torch.tensor([3.0, 1.0, 3.0, 0.0, 3.0])).tolist() == [4, 2, 4, 1, 4]
    assert ranks(torch.tensor([[1.0, 2.0], [2.0, 1.0]])).tolist() == [[1, 2], [2, 1]]


def test_spearman_sees_order_alone(two: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = two
    assert float(spearman(x, x.exp())) == pytest.approx(1)
    assert float(spearman(x, y)) == pytest.approx(float(spearman(x.exp(), y**3)), abs=1e-12)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    """Of 300 samples of two normal variables with correlation 0.4, the 95% interval holds 0.4 in 91 to 98%."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(300, 80, generator=generator, dtype=torch.float64)
    y = 0.4 * x + math.sqrt(1 - 0.16) * torch.randn(300, 80, generator=generator, dtype=torch.float64)
    held = 0
    for one, other in zip(x, y, strict=True):
        low, high = interval(bootstrap(lambda drawn, a=one, b=other: pearson(a[drawn], b[drawn]), 80, resamples=400))
        held += low <= 0.4 <= high
    assert 0.91 * 300 <= held <= 0.98 * 300


def test_a_bootstrap_in_parts_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def mean(drawn: torch.Tensor) -> torch.Tensor:
        sizes.append(len(drawn))
        return drawn.double().mean(-1)

    whole = bootstrap(mean, 10, resamples=50, seed=1)
    monkeypatch.setattr("wpr.analysis.statistics._CHUNK", 70)  # indices at a time: seven resamples
    parts = bootstrap(mean, 10, resamples=50, seed=1)
    assert sizes == [50, *[7] * 7, 1]
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, bootstrap(mean, 10, resamples=50, seed=2))


def test_a_line_is_numpys(two: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = two
    found = fit_line(x + 1e4, y, torch.arange(200))  # far from the origin, where sums of squares lose digits
    slope, _ = np.polyfit(x.numpy(), y.numpy(), 1)
    assert found.slope.value == pytest.approx(slope, rel=1e-9)
    assert found.intercept == pytest.approx(float(y.mean() - slope * (x.mean() + 1e4)), rel=1e-9)
    assert found.pearson.value == pytest.approx(float(pearson(x, y)), abs=1e-9)
    assert found.pearson.low < found.pearson.value < found.pearson.high


def test_tokens_of_one_response_are_no_new_evidence(two: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = (values[:40] for values in two)
    alone = fit_line(x, y, torch.arange(40))
    ten_times = [values.repeat_interleave(10) for values in (x, y)]
    grouped = fit_line(*ten_times, torch.arange(40).repeat_interleave(10))
    assert grouped.pearson.value == pytest.approx(alone.pearson.value)
    assert grouped.pearson.high - grouped.pearson.low == pytest.approx(alone.pearson.high - alone.pearson.low)
    careless = fit_line(*ten_times, torch.arange(400))
    assert careless.slope.high - careless.slope.low < 0.6 * (grouped.slope.high - grouped.slope.low)


def test_estimates_as_cells_and_as_a_series() -> None:
    one, other = Estimate(0.5, 0.4, 0.6), Estimate(0.1)
    assert one.cells == (0.5, 0.4, 0.6)
    found = series("mean", ["a", "b"], [one, other])
    assert (found.name, found.x, found.y) == ("mean", ["a", "b"], [0.5, 0.1])
    assert found.low is not None
    assert found.low[0] == 0.4
    assert math.isnan(found.low[1])


def test_quantiles_are_numpys(two: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert quantiles(two[0].float(), (0.1, 0.5)) == pytest.approx(np.quantile(two[0].float().numpy(), [0.1, 0.5]))


def test_partial_is_the_correlation_of_residuals() -> None:
    generator = torch.Generator().manual_seed(7)
    x, y, z = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    x, y = x + z, y - 2 * z

    def residual(values: torch.Tensor) -> torch.Tensor:
        ones = torch.stack([torch.ones_like(z), z], -1)
        return values - ones @ torch.linalg.lstsq(ones, values.unsqueeze(-1)).solution.squeeze(-1)

    assert float(partial(x, y, z, pearson)) == pytest.approx(float(pearson(residual(x), residual(y))))
    assert torch.isnan(partial(z, y, z, pearson))


def test_mean_over_groups() -> None:
    """Two values of a group that are alike count as one: the interval is that of the groups."""
    generator = torch.Generator().manual_seed(8)
    values = torch.randn(40, generator=generator, dtype=torch.float64)
    groups = torch.arange(40)
    alone = grouped_mean(values, groups)
    twice = grouped_mean(values.repeat_interleave(2), groups.repeat_interleave(2))
    assert twice.cells == pytest.approx(alone.cells)
    assert alone.low < alone.value < alone.high
    with_gap = grouped_mean(torch.cat([values, values.new_tensor([torch.nan])]), torch.arange(41))
    assert with_gap.value == alone.value
    assert math.isnan(grouped_mean(values[:1] * torch.nan, groups[:1]).value)
    assert math.isnan(grouped_mean(values, groups % 2).low)  # of two groups nothing is known of a third
