"""How far each token's nearest others are, over a whole vocabulary, and the unit of cost that follows from it.

Notation for shapes: ``V`` vocabulary, ``d`` embedding size.

All pairs are looked at, in blocks of rows: ``V^2 d`` products, of which nothing is kept but a few numbers per token.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from wpr.transport.distances import Metric, gram_squared_distances
from wpr.transport.progress import progress_bar
from wpr.transport.support import working_dtype

Scale = Literal["median-nn"] | float | None

ALIVE = 0.05
"""A token is alive if its nearest other token is farther than this share of its typical distance to the vocabulary."""

BLOCK_BYTES = 128 << 20
"""Size of one block of the V x V cost matrix while radii are built; about four such blocks exist at a time."""


def measure_neighbours(
    weight: Tensor, metric: Metric, neighbours: int | None, progress: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Radius, nearest and typical cost of every token, in blocks of rows: three ``(V,)``.

    The typical cost of a token is the 0.99 quantile of its costs to a sample of the vocabulary: it looks past a huddle
    of dead tokens, be they most of the vocabulary, and past a few outliers.
    """
    vocabulary = weight.shape[0]
    rows = metric.rows(weight.to(working_dtype(weight)))
    if metric.function is not None:
        _check_symmetry(metric, rows)
    step = max(1, BLOCK_BYTES // (vocabulary * rows.element_size()))
    measure = _nearest_in_block if metric.function is None else _nearest_in_block_custom
    sample = torch.linspace(0, vocabulary - 1, min(vocabulary, 1024), device=rows.device).long()
    rank = max(1, math.ceil(0.99 * len(sample)))
    results = []
    with progress_bar("token geometry", vocabulary, enabled=progress) as bar:
        for start in range(0, vocabulary, step):
            values, costs = measure(rows, start, min(start + step, vocabulary), metric, neighbours or 1, sample)
            results.append((values.amax(-1), values.amin(-1), costs.kthvalue(rank, dim=-1).values))
            bar.advance(min(step, vocabulary - start))
    radius, nearest, typical = (metric.finish(torch.cat(parts)) for parts in zip(*results, strict=True))
    return (torch.full_like(radius, torch.inf) if neighbours is None else radius), nearest, typical


def _nearest_in_block(
    rows: Tensor, start: int, stop: int, metric: Metric, k: int, sample: Tensor
) -> tuple[Tensor, Tensor]:
    """Squared distances of rows ``start..stop`` to the k nearest others and to the sample.

    The k nearest are chosen by the matrix product; where that lost digits, their distances come from the differences.
    """
    block = rows[start:stop]
    squared, near = gram_squared_distances(block, rows)
    to_sample = squared[:, sample]
    squared.diagonal(offset=start).fill_(torch.inf)
    values, ids = squared.topk(k, dim=-1, largest=False, sorted=False)
    for pairs in near.gather(-1, ids).nonzero().split(1 << 16):
        i, slot = pairs.unbind(-1)
        values[i, slot] = (block[i] - rows[ids[i, slot]]).square().sum(-1)
    return values, to_sample


def _nearest_in_block_custom(
    rows: Tensor, start: int, stop: int, metric: Metric, k: int, sample: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for costs of a user's function."""
    cost = metric.pairwise(rows[start:stop], rows)
    to_sample = cost[:, sample]
    cost.diagonal(offset=start).fill_(torch.inf)
    return cost.topk(k, dim=-1, largest=False, sorted=False).values, to_sample


def _check_symmetry(metric: Metric, rows: Tensor) -> None:
    """Refuse a user's function whose cost from i to j is not the cost from j to i, on a few tokens."""
    cost = metric.pairwise(rows[:64], rows[:64])
    difference = (cost - cost.mT).abs().triu(1)
    if difference.max() > 1e-3 * cost.max():
        i, j = divmod(int(difference.argmax()), len(cost))
        raise ValueError(
            f"metric {metric.name} is not symmetric: the cost from token {i} to token {j} is {cost[i, j]:.6g}, back "
            f"it is "
            f"{cost[j, i]:.6g}; return for instance the mean of both directions"
        )


def resolve_scale(scale: Scale, nearest: Tensor, alive: Tensor, weights: Tensor | None) -> tuple[float, str]:
    """The number that costs are divided by, and where it came from, of ``(V,)`` costs to the nearest token."""
    if scale is None:
        return 1.0, "none"
    if not isinstance(scale, str):
        value, rule = float(scale), "given"
    elif scale != "median-nn":
        raise ValueError(f"scale={scale!r} is unknown; use 'median-nn', a number, or None")
    else:
        if not alive.any():
            raise ValueError(
                f"scale='median-nn' is degenerate: all {len(alive)} tokens are near-duplicates of others (nearest "
                f"distance at most {ALIVE} of the typical one); "
                "pass a number as scale, or check that these are a trained model's embeddings"
            )
        value = _weighted_median(nearest[alive], None if weights is None else _checked_weights(weights, alive))
        rule = "median-nn" if weights is None else "median-nn, weighted"
    if not (math.isfinite(value) and value > 0):
        raise ValueError(
            f"scale {value} ({rule}) is degenerate; it must be a finite positive number: pass one as scale"
        )
    return value, rule


def _checked_weights(weights: Tensor, alive: Tensor) -> Tensor:
    live = weights[alive]
    if not (live >= 0).all() or not live.sum() > 0 or not live.isfinite().all():
        raise ValueError(
            f"token_weights from {live.min():g} to {live.max():g} over live tokens; they must be finite, not negative, "
            "and positive for at least one"
        )
    return live


def _weighted_median(values: Tensor, weights: Tensor | None) -> float:
    """The middle value, or the value at which half of the weight is reached."""
    if weights is None:
        return float(values.median())
    order = values.argsort()
    reached = weights[order].double().cumsum(0)
    return float(values[order][torch.searchsorted(reached, reached[-1:] / 2)][0])
