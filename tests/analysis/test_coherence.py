"""Coherence: distances of candidates against loops, and a model that is more coherent than another."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from wpr.analysis.coherence import Candidates, candidate_distances, coherence_finding
from wpr.transport.distances import COSINE, EUCLIDEAN, Metric


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


def candidates(mean: float, spread: float, seed: int = 0, prompts: int = 30, common: float = 0.0) -> Candidates:
    """Ten tokens a prompt. common: spread of what a prompt does to all models alike."""
    own, shared = (torch.Generator().manual_seed(one) for one in (seed, 99))
    values = mean + spread * torch.randn(10 * prompts, generator=own)
    values += common * torch.randn(prompts, generator=shared).repeat_interleave(10)
    return Candidates(torch.arange(10 * prompts) // 10, values, values)


def test_a_clear_difference_is_told_and_an_unclear_one_is_not() -> None:
    clear = {"sft": candidates(2.0, 0.1), "a": candidates(1.0, 0.1, 1), "b": candidates(3.0, 0.1, 2)}
    finding = coherence_finding(clear, clear, "euclidean", 10)
    message = next(message for message in finding.text if message.startswith("Prompt by prompt, on own responses: "))
    assert re.search(r"smaller than sft: a -(1\.0|0\.9)\d+ \(.*\. larger than sft: b (1\.0|0\.9)", message), message
    unclear = {"sft": candidates(2.0, 3.0), "a": candidates(1.9, 3.0, 1)}
    finding = coherence_finding(unclear, unclear, "euclidean", 10)
    assert sum("none can be told from sft" in message for message in finding.text) == 4
    row = dict(zip(finding.columns, finding.rows[0], strict=True))
    assert (row["responses"], row["tokens"], row["over sft"]) == (30, 300, None)
    assert row["low"] < row["distance"] < row["high"]  # type: ignore[operator]


def test_models_are_compared_prompt_by_prompt() -> None:
    """What a prompt does to both is no noise: intervals of the means overlap, that of the difference leaves out 0."""
    both = {"sft": candidates(2.0, 0.1, 1, common=1.0), "a": candidates(1.9, 0.1, 2, common=1.0)}
    finding = coherence_finding(both, both, "euclidean", 10)
    first, second = (dict(zip(finding.columns, row, strict=True)) for row in finding.rows[:2])
    assert second["high"] > first["low"]  # type: ignore[operator]
    assert second["over sft"] == pytest.approx(second["distance"] - first["distance"])  # type: ignore[operator]
    assert -0.2 < second["over low"] < second["over sft"] < second["over high"] < 0  # type: ignore[operator]


def test_models_that_answered_different_prompts() -> None:
    some = {"sft": candidates(2.0, 0.1), "a": candidates(1.0, 0.1, prompts=20)}
    finding = coherence_finding(some, some, "euclidean", 10)
    assert "Not all models answered the same prompts" in finding.text[-1]
    row = dict(zip(finding.columns, finding.rows[1], strict=True))
    same = candidates(2.0, 0.1)
    expected = float(some["a"].distance.mean() - same.distance[:200].mean())
    assert row["over sft"] == pytest.approx(expected, abs=1e-6)
