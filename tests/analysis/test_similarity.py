"""Penalties against similarity: a penalty that follows meaning is told from one that does not, and only then."""

from __future__ import annotations

import math

import pytest
import torch

from wpr.analysis.bert_score import BertScore
from wpr.analysis.similarity import MEAN, Pair, similarity_finding
from wpr.findings import Finding


def pairs(count: int, seed: int, noise: dict[str, float], gone: int = 0) -> list[Pair]:
    """Penalties that fall with similarity, each with noise of its own."""
    generator = torch.Generator().manual_seed(seed)
    alike = 0.6 + 0.1 * torch.randn(count, generator=generator)
    values = {name: -alike + 0.1 * spread * torch.randn(count, generator=generator) for name, spread in noise.items()}
    lengths = torch.randint(5, 50, (count,), generator=generator)
    return [
        Pair(
            i, BertScore(0.5, 0.5, float(alike[i])), int(lengths[i]),
            {name: float(each[i]) for name, each in values.items()},
            {name: float(each[i]) for name, each in values.items()},
        )
        for i in range(gone, count)
    ]  # fmt: skip


def cell(finding: Finding, policy: str, regularizer: str, of: str, column: str) -> float:
    for row in finding.rows:
        found = dict(zip(finding.columns, row, strict=True))
        if (found["policy"], found["regularizer"], found["of"]) == (policy, regularizer, of):
            return float("nan") if found[column] is None else float(found[column])  # type: ignore[arg-type]
    raise AssertionError((policy, regularizer, of))


def test_a_better_penalty_is_called_better() -> None:
    noise = {"kl": 3.0, "w": 0.3}
    found = similarity_finding({"a": pairs(120, 0, noise), "b": pairs(120, 1, noise)}, ["kl", "w"], "an encoder")
    assert cell(found, "a", "w", "penalty", "Pearson") == pytest.approx(1 / math.hypot(1, 0.3), abs=0.04)
    assert cell(found, "a", "kl", "penalty", "Pearson") == pytest.approx(1 / math.hypot(1, 3), abs=0.15)
    assert cell(found, MEAN, "w", "penalty", "Pearson over kl") == pytest.approx(
        cell(found, MEAN, "w", "penalty", "Pearson") - cell(found, MEAN, "kl", "penalty", "Pearson")
    )
    assert cell(found, MEAN, "w", "penalty", "over low") > 0.3
    assert any("w correlates higher than kl" in sentence for sentence in found.text)
    assert math.isnan(cell(found, "a", "kl", "penalty", "Pearson over kl"))
    assert abs(cell(found, "a", "response length", "control", "Pearson")) < 0.25


def test_two_alike_are_not_told_apart() -> None:
    found = similarity_finding({"a": pairs(60, 0, {"kl": 2.0, "w": 2.0})}, ["kl", "w"], "an encoder")
    assert any("w cannot be told apart from kl" in sentence for sentence in found.text)
    assert not any("only" in sentence for sentence in found.text)
    assert all(row[0] == "a" for row in found.rows), "of one policy there is no mean"


def test_one_odd_response_does_not_hide_what_ranks_see() -> None:
    """A penalty that follows similarity but for one response, whose penalty is huge: Pearson's correlation is lost."""
    good = pairs(80, 0, {"kl": 3.0, "w": 0.2})
    odd = [
        Pair(p.number, p.score, p.length, p.penalty | ({"w": 500.0} if p.number == 3 else {}), p.divergence)
        for p in good
    ]
    found = similarity_finding({"a": odd}, ["kl", "w"], "an encoder")
    assert cell(found, "a", "w", "penalty", "Spearman over kl") > 0.3
    assert cell(found, "a", "w", "penalty", "ranks over low") > 0
    assert any("w cannot be told apart from kl" in message and "By ranks" in message for message in found.text)


def test_a_policy_with_too_few_pairs_is_named() -> None:
    noise = {"kl": 1.0}
    found = similarity_finding({"a": pairs(30, 0, noise), "b": pairs(2, 1, noise)}, ["kl"], "an encoder")
    assert "b is left out: 2 of its responses have a similarity, 3 are needed." in found.text


def test_a_penalty_that_does_not_vary_is_said_to_be_none() -> None:
    same = [
        Pair(p.number, p.score, p.length, p.penalty | {"w": 0.0}, p.divergence)
        for p in pairs(20, 0, {"kl": 1.0, "w": 1})
    ]
    found = similarity_finding({"a": same}, ["kl", "w"], "an encoder")
    assert math.isnan(cell(found, "a", "w", "penalty", "Pearson"))
    assert any("cannot be compared" in sentence for sentence in found.text)
    assert any("only 20 responses" in sentence for sentence in found.text)


def test_policies_that_answered_different_prompts() -> None:
    noise = {"kl": 1.0, "w": 1.0}
    found = similarity_finding({"a": pairs(30, 0, noise), "b": pairs(30, 1, noise, gone=8)}, ["kl", "w"], "an encoder")
    assert cell(found, "b", "w", "penalty", "responses") == 22
    assert cell(found, MEAN, "w", "penalty", "low") < cell(found, MEAN, "w", "penalty", "Pearson")


def test_too_few_responses_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 3 responses"):
        similarity_finding({"a": pairs(2, 0, {"kl": 1.0})}, ["kl"], "an encoder")
