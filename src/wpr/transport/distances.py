"""Costs between token embeddings: Euclidean, cosine, or a user's function; exact where distances vanish.

Notation for shapes: ``n, m`` rows, ``d`` embedding size, ``...`` batch dimensions.

Euclidean and cosine costs are both functions of a squared distance,

    euclidean(x, y) = |x - y|                    cosine(x, y) = 1 - <x, y> / (|x| |y|) = |x/|x| - y/|y||^2 / 2

so one matrix product, ``|x - y|^2 = |x|^2 + |y|^2 - 2 <x, y>``, serves both. That form loses the digits of small
distances (it subtracts numbers of size ``|x|^2``), so every pair that comes out small is recomputed from the difference
of its two rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PairwiseCost = Callable[[Tensor, Tensor], Tensor]
"""A user's metric: rows ``(..., n, d)`` and ``(..., m, d)`` to costs ``(..., n, m)``, symmetric, finite and not
negative.
"""

NEAR = 0.03
"""Pairs with ``|x-y|^2 < NEAR * (|x|^2 + |y|^2)`` are recomputed: above it, float32 rounding costs at most about 1e-5
of the distance.
"""

_PAIRS_AT_ONCE = 1 << 16
"""Pairs recomputed in one go, which bounds the memory of the gathered rows."""


@dataclass(frozen=True)
class Metric:
    """A cost that is ``finish(|rows(x) - rows(y)|^2)``, or any function of two row sets when ``function`` is given.

    degree: the cost grows like this power of the distance, which tells what share of a typical cost is small.
    """

    name: str
    rows: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor], Tensor]
    degree: int = 1
    function: PairwiseCost | None = None

    def pairwise(self, x: Tensor, y: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Costs between all rows of ``x`` ``(..., n, d)`` and of ``y`` ``(..., m, d)``: ``(..., n, m)``.

        wanted: a mask of the pairs whose small distances matter; the others may come out inaccurate. Default: all.
        """
        if self.function is not None:
            return _checked(self, self.function(x, y), x, y)
        x, y = self.rows(x), self.rows(y)
        return self.finish(squared_distances(x, y, wanted))


def squared_distances(x: Tensor, y: Tensor, wanted: Tensor | None = None) -> Tensor:
    """``|x_i - y_j|^2`` for ``x`` ``(..., n, d)`` and ``y`` ``(..., m, d)``, accurate also where it is close to zero:
    ``(..., n, m)``.
    """
    squared, near = gram_squared_distances(x, y)
    where = (near if wanted is None else near & wanted).nonzero()
    for pairs in where.split(_PAIRS_AT_ONCE):
        *batch, i, j = pairs.unbind(-1)
        squared[(*batch, i, j)] = (x[(*batch, i)] - y[(*batch, j)]).square().sum(-1)
    return squared


def gram_squared_distances(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix-product form of the squared distances, and a mask of the pairs whose digits it lost: two ``(..., n,
    m)``.
    """
    size = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
    squared = (size - 2 * (x @ y.mT)).clamp_min_(0)
    return squared, squared < NEAR * size


def unit_rows(x: Tensor) -> Tensor:
    """Rows of length one ``(..., d)``. A row of zeros has no direction and stays as it is: at cosine cost 1/2 from
    every other token.
    """
    return torch.nn.functional.normalize(x, dim=-1, eps=torch.finfo(x.dtype).tiny)


EUCLIDEAN = Metric("euclidean", rows=lambda x: x, finish=torch.sqrt)
COSINE = Metric("cosine", rows=unit_rows, finish=lambda squared: squared / 2, degree=2)
METRICS = {metric.name: metric for metric in (EUCLIDEAN, COSINE)}


def resolve_metric(metric: str | PairwiseCost | Metric) -> Metric:
    """The metric of that name, or a user's function ``(..., n, d), (..., m, d) -> (..., n, m)`` under its own name."""
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        if metric not in METRICS:
            raise ValueError(
                f"metric={metric!r} is unknown; use one of {', '.join(METRICS)}, or a function of two row sets"
            )
        return METRICS[metric]
    name = "custom:" + getattr(metric, "__qualname__", type(metric).__qualname__)
    return Metric(name, rows=lambda x: x, finish=lambda cost: cost, function=metric)


def _checked(metric: Metric, cost: Tensor, x: Tensor, y: Tensor) -> Tensor:
    expected = (*x.shape[:-1], y.shape[-2])
    if cost.shape != expected:
        raise ValueError(
            f"metric {metric.name} returned costs of shape {tuple(cost.shape)} for rows {tuple(x.shape)} and "
            f"{tuple(y.shape)}; it must return {tuple(expected)}"
        )
    cost = cost.to(x.dtype)
    bad = ~(cost >= -1e-5 * cost.abs().amax()) | cost.isinf()
    if bad.any():
        value = cost[bad][0].item()
        raise ValueError(
            f"metric {metric.name} returned the cost {value}; costs must be finite and not negative: "
            "shift the function, or clamp it with .clamp_min(0)"
        )
    return cost.clamp_min(0)  # rounding may put a vanishing cost a little below zero
