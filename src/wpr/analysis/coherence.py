"""Coherence of the likeliest candidates: do the tokens that a model hesitates between mean similar things?

At every token of a response, with the ten likeliest candidates i of the model and the distance D of the reference's
embeddings:

    distance = mean over pairs i < j of D_ij                               the paper's; every candidate counts alike
    weighted = sum_{i<j} p_i p_j D_ij / sum_{i<j} p_i p_j                  by how probable the two are

Smaller is more coherent. The first counts candidates of no probability as much as the likeliest; where a model is sure,
nine of ten are of that kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wpr.analysis.statistics import Estimate, bootstrap, interval
from wpr.findings import Cell, Figure, Finding, Series
from wpr.transport.metrics import Metric
from wpr.transport.support import working_dtype

TOP = 10
_AT_ONCE = 1 << 12
COLUMNS = [
    "model", "text", "responses", "tokens", "distance", "low", "high", "weighted", "weighted low", "weighted high",
]  # fmt: skip


@dataclass(frozen=True)
class Candidates:
    """Mean distances of each position's likeliest tokens, ``(P,)`` each on the CPU; answer: which response it is of."""

    answer: Tensor
    distance: Tensor
    weighted: Tensor


@torch.no_grad()
def candidate_distances(logits: Tensor, embeddings: Tensor, metric: Metric, top: int = TOP) -> tuple[Tensor, Tensor]:
    """Plain and weighted mean pairwise distance of the ``top`` likeliest tokens: logits ``(P, V)`` to two ``(P,)``."""
    if not 2 <= top <= logits.shape[-1]:
        raise ValueError(f"top={top} candidates; it must be from 2 to the vocabulary's {logits.shape[-1]} tokens")
    log_p = logits.float().log_softmax(-1)
    found = []
    for part in log_p.split(_AT_ONCE):
        values, ids = part.topk(top, dim=-1)
        rows = embeddings[ids].to(working_dtype(embeddings))
        distance = metric.pairwise(rows, rows)
        first, second = torch.triu_indices(top, top, 1, device=logits.device)
        pairs = distance[:, first, second]
        # Relative to the largest: the product of two small probabilities vanishes in float32, their ratios do not.
        log_weight = values[:, first] + values[:, second]
        weight = (log_weight - log_weight.amax(-1, keepdim=True)).exp()
        found.append(torch.stack([pairs.mean(-1), (weight * pairs).sum(-1) / weight.sum(-1)]))
    plain, weighted = torch.cat(found, -1)
    return plain, weighted


def coherence_finding(
    own: Mapping[str, Candidates],
    shared: Mapping[str, Candidates],
    metric: str,
    top: int,
    settings: Mapping[str, Any] | None = None,
) -> Finding:
    """The finding on models by name, the reference first. own: on each model's own responses, as the paper has it.
    shared: all models on the reference's responses, which leaves out that policies write other texts.
    """
    rows: list[list[Cell]] = []
    series = []
    for text, group in (("own responses", own), ("the reference's", shared)):
        estimates = {}
        for model, found in group.items():
            estimates[model] = plain, weighted = (
                _mean(found.answer, found.distance),
                _mean(found.answer, found.weighted),
            )
            rows.append(
                [
                    model, text, len(found.answer.unique()), len(found.answer), plain.value, plain.low, plain.high,
                    weighted.value, weighted.low, weighted.high,
                ]
            )  # fmt: skip
        plain_ones = [one[0] for one in estimates.values()]
        series.append(
            Series(
                text, list(estimates), [one.value for one in plain_ones], [one.low for one in plain_ones],
                [one.high for one in plain_ones],
            )
        )  # fmt: skip
    return Finding(
        name="coherence",
        title=f"Coherence of the {top} likeliest candidates",
        text=_told(own, metric, top),
        columns=COLUMNS,
        rows=rows,
        figures=[
            Figure(
                "scatter", f"Mean distance between the {top} likeliest tokens", "model", f"{metric} distance", series,
                name="distances", note="Smaller is more coherent. Bars are 95% intervals over responses.",
            )
        ],
        settings={"top": top, "metric": metric, **(settings or {})},
    )  # fmt: skip


def _mean(answer: Tensor, values: Tensor) -> Estimate:
    """The mean over all tokens, with its interval over responses."""
    _, of_group = answer.unique(return_inverse=True)
    count = int(of_group.max()) + 1
    sums = torch.zeros(count, 2, dtype=torch.float64)
    sums.index_add_(0, of_group, torch.stack([values.double(), torch.ones_like(values, dtype=torch.float64)], -1))
    drawn = bootstrap(lambda chosen: (total := sums[chosen].sum(1))[:, 0] / total[:, 1], count)
    ends = interval(drawn) if count > 2 else ()
    return Estimate(float(values.double().mean()), *ends)


def _told(own: Mapping[str, Candidates], metric: str, top: int) -> list[str]:
    means = {name: _mean(found.answer, found.distance) for name, found in own.items()}
    listed = "; ".join(f"{name} {estimate}" for name, estimate in means.items())
    least = min(means, key=lambda name: means[name].value)
    apart = all(means[least].high < estimate.low for name, estimate in means.items() if name != least)
    said = (
        f"{least} has the smallest, and its interval overlaps no other."
        if apart and len(means) > 1
        else "Intervals overlap, which leaves the order of the models open."
    )
    return [
        f"At every token of each model's own held-out responses, the mean {metric} distance between its {top} "
        f"likeliest candidates, in the embeddings of the model that all started from: {listed}. {said}",
        "Smaller is more coherent. Rows on the reference's responses hold the text fixed, so that they show what "
        "training did to the candidates rather than to the text.",
    ]
