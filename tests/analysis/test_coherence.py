"""Coherence: distances of candidates against loops, and a model that is more coherent than another."""

from __future__ import annotations

import itertools

import pytest
import torch

from wpr.analysis.coherence import Candidates, candidate_distances, coherence_finding
from wpr.transport.metrics import COSINE, EUCLIDEAN, Metric


@pytest.mark.parametrize("metric", [EUCLIDEAN, COSINE])
def test_distances_against_loops(metric: Metric) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, embeddings = torch.randn(5, 30, generator=generator) * 3, torch.randn(30, 4, generator=generator)
    plain, weighted = candidate_distances(logits, embeddings, metric, top=6)
    for row in range(5):
        p = logits[row].double().softmax(-1)
        pairs = list(itertools.combinations(p.topk(6).indices.tolist(), 2))
        costs = [float(metric.pairwise(embeddings[[i]], embeddings[[j]])) for i, j in pairs]
        weights = [float(p[i] * p[j]) for i, j in pairs]
        assert float(plain[row]) == pytest.approx(sum(costs) / len(costs), rel=1e-5)
        assert float(weighted[row]) == pytest.approx(
            sum(w * c for w, c in zip(weights, costs, strict=True)) / sum(weights), rel=1e-4
        )


def test_candidates_of_no_probability_do_not_break_the_weights() -> None:
    logits = torch.full((1, 12), -300.0)
    logits[0, 0] = 300.0
    _, weighted = candidate_distances(logits, torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), EUCLIDEAN)
    assert weighted.isfinite().all()


def test_too_many_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match="top=31 candidates"):
        candidate_distances(torch.zeros(1, 30), torch.zeros(30, 2), EUCLIDEAN, top=31)


def candidates(mean: float, spread: float) -> Candidates:
    values = mean + spread * torch.randn(300, generator=torch.Generator().manual_seed(0))
    return Candidates(torch.arange(300) // 10, values, values)


def test_a_clear_difference_is_told_and_an_unclear_one_is_not() -> None:
    clear = {"sft": candidates(2.0, 0.1), "a": candidates(1.0, 0.1)}
    assert "a has the smallest" in coherence_finding(clear, clear, "euclidean", 10).text[0]
    unclear = {"sft": candidates(2.0, 3.0), "a": candidates(1.9, 3.0)}
    finding = coherence_finding(unclear, unclear, "euclidean", 10)
    assert "leaves the order of the models open" in finding.text[0]
    row = dict(zip(finding.columns, finding.rows[0], strict=True))
    assert (row["responses"], row["tokens"]) == (30, 300)
    assert row["low"] < row["distance"] < row["high"]  # type: ignore[operator]
