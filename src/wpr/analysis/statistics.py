"""Correlations with bootstrap intervals, in plain torch.

Notation for shapes: ``n`` observations, ``R`` resamples, ``G`` groups (responses, prompts) of observations.

    pearson(x, y)  = cov(x, y) / sqrt(var(x) var(y))
    spearman(x, y) = pearson(ranks of x, ranks of y)          equal values share the mean of their ranks
    partial(x, y)  = (xy - xz yz) / sqrt((1 - xz^2) (1 - yz^2))     of correlations xy, xz, yz: beyond what z explains
    slope(x, y)    = cov(x, y) / var(x)                       of the least-squares line through y over x

Intervals are percentile bootstraps: observations (or whole groups of them, where they are not independent) are drawn
again with replacement, and the interval holds the middle 95% of what comes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wpr.findings import Series

RESAMPLES = 2000
_CHUNK = 1 << 22
"""Numbers drawn at a time, which bounds the memory of a bootstrap."""


@dataclass(frozen=True)
class Estimate:
    """A number with the ends of its 95% interval; all NaN where it is not defined."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        return f"{self.value:.3f} (95% interval {self.low:.3f} to {self.high:.3f})"

    @property
    def cells(self) -> tuple[float, float, float]:
        """The value and the ends of its interval, for a table."""
        return self.value, self.low, self.high

    @property
    def leaves_out_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.low > 0 or self.high < 0


def series(name: str, x: list[str], estimates: Sequence[Estimate]) -> Series:
    """Estimates over names with their intervals, for a figure."""
    values, low, high = (list(column) for column in zip(*(one.cells for one in estimates), strict=True))
    return Series(name, x, values, low, high)


def quantiles(values: Tensor, shares: Sequence[float]) -> list[float]:
    """Quantiles of ``(n,)`` values, in float64."""
    found: list[float] = torch.quantile(values.double(), torch.tensor(shares, dtype=torch.float64)).tolist()
    return found


Statistic = Callable[[Tensor, Tensor], Tensor]
"""From two ``(..., n)`` to ``(...)``."""


def pearson(x: Tensor, y: Tensor) -> Tensor:
    """``(..., n)`` twice to ``(...)``; NaN where one of both does not vary."""
    x, y = (v - v.mean(-1, keepdim=True) for v in (x.double(), y.double()))
    spread = x.square().sum(-1) * y.square().sum(-1)
    return torch.where(spread > 0, (x * y).sum(-1) / spread.sqrt(), torch.nan).clamp(-1, 1)


def ranks(x: Tensor) -> Tensor:
    """Ranks ``(..., n)`` from 1 on; equal values share the mean of theirs."""
    x = x.double().contiguous()
    ordered = x.sort(-1).values
    first = torch.searchsorted(ordered, x)
    last = torch.searchsorted(ordered, x, right=True)
    return (first + last + 1).double() / 2


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """``(..., n)`` twice to ``(...)``."""
    return pearson(ranks(x), ranks(y))


def partial(x: Tensor, y: Tensor, given: Tensor, of: Statistic = spearman) -> Tensor:
    """The correlation of ``(..., n)`` and ``(..., n)`` that is left when what both share with ``given`` is taken out:
    ``(...)``, NaN where one of both is nothing but ``given``.
    """
    xy, xz, yz = of(x, y), of(x, given), of(y, given)
    left = (1 - xz.square()) * (1 - yz.square())
    return torch.where(left > 1e-12, (xy - xz * yz) / left.clamp_min(1e-12).sqrt(), torch.nan).clamp(-1, 1)


def bootstrap(statistic: Callable[[Tensor], Tensor], count: int, resamples: int = RESAMPLES, seed: int = 0) -> Tensor:
    """``statistic`` of ``resamples`` draws of ``count`` of ``count`` things: it maps the indices ``(r, count)`` that
    were drawn to its values ``(r, ...)``. Returns ``(R, ...)``.
    """
    generator = torch.Generator().manual_seed(seed)
    step = max(1, _CHUNK // max(1, count))
    parts = []
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        parts.append(statistic(torch.randint(count, (rows, count), generator=generator)))
    return torch.cat(parts)


def interval(drawn: Tensor) -> tuple[float, float]:
    """The middle 95% of ``(R,)``, of those that are defined."""
    known = drawn[~drawn.isnan()]
    if not len(known):
        return math.nan, math.nan
    low, high = torch.quantile(known, known.new_tensor([0.025, 0.975])).tolist()
    return low, high


def grouped_mean(values: Tensor, groups: Tensor, seed: int = 0) -> Estimate:
    """The mean of ``(n,)`` values, NaN left out, with an interval over groups ``(n,)``; none for less than three."""
    known = ~values.isnan()
    if not known.any():
        return Estimate(math.nan)
    _, of_group = groups[known].unique(return_inverse=True)
    count = int(of_group.max()) + 1
    terms = torch.stack([values[known].double(), torch.ones(int(known.sum()), dtype=torch.float64)], -1)
    sums = torch.zeros(count, 2, dtype=torch.float64).index_add_(0, of_group, terms)

    def mean(chosen: Tensor) -> Tensor:
        total = sums[chosen].sum(1)
        return total[:, 0] / total[:, 1]

    ends = interval(bootstrap(mean, count, seed=seed)) if count > 2 else (math.nan, math.nan)
    return Estimate(float(terms[:, 0].mean()), *ends)


def correlation(x: Tensor, y: Tensor, statistic: Statistic = pearson, seed: int = 0) -> Estimate:
    """A correlation of ``(n,)`` and ``(n,)`` with its interval; NaN for fewer than three observations."""
    if len(x) < 3:
        return Estimate(math.nan)
    low, high = interval(bootstrap(lambda drawn: statistic(x[drawn], y[drawn]), len(x), seed=seed))
    return Estimate(float(statistic(x, y)), low, high)


@dataclass(frozen=True)
class LineFit:
    """Pearson's correlation and the least-squares line ``y = intercept + slope x``."""

    pearson: Estimate
    slope: Estimate
    intercept: float


def fit_line(x: Tensor, y: Tensor, groups: Tensor, seed: int = 0) -> LineFit:
    """The fit of ``(n,)`` and ``(n,)``, with intervals over groups ``(n,)``: tokens of one response hang together.

    Each group is a row of sums, so that a resample is one matrix product whatever the number of observations.
    """
    x, y = x.double(), y.double()
    centre = x.mean(), y.mean()  # sums of squares keep their digits around it
    dx, dy = x - centre[0], y - centre[1]
    _, of_group = groups.unique(return_inverse=True)
    count = int(of_group.max()) + 1
    terms = torch.stack([torch.ones_like(dx), dx, dy, dx * dx, dy * dy, dx * dy], -1)
    sums = torch.zeros(count, 6, dtype=torch.float64).index_add_(0, of_group.cpu(), terms.cpu())
    whole = _line(sums.sum(0))
    drawn = bootstrap(lambda chosen: _line(sums[chosen].sum(1)), count, seed=seed)
    ends = [interval(drawn[:, column]) for column in (0, 1)] if count > 2 else [(math.nan, math.nan)] * 2
    slope = float(whole[1])
    return LineFit(Estimate(float(whole[0]), *ends[0]), Estimate(slope, *ends[1]), float(centre[1] - slope * centre[0]))


def _line(sums: Tensor) -> Tensor:
    """Correlation and slope ``(..., 2)`` from the sums ``(..., 6)`` of 1, x, y, xx, yy, xy."""
    n, x, y, xx, yy, xy = sums.unbind(-1)
    cov, var_x, var_y = xy - x * y / n, xx - x * x / n, yy - y * y / n
    known = (var_x > 0) & (var_y > 0)
    r = torch.where(known, cov / (var_x * var_y).clamp_min(1e-300).sqrt(), torch.nan)
    return torch.stack([r, torch.where(known, cov / var_x.clamp_min(1e-300), torch.nan)], -1)
