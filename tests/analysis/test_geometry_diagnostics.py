"""The verdict on a setting: blind on wpr-pico as the paper has it, seeing where costs are small."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from wpr import TokenGeometry, Wasserstein, pico
from wpr.analysis.geometry_diagnostics import (
    DISTANCES,
    UNTOLD,
    GeometryDiagnostics,
    diagnose,
    geometry_finding,
    pair_costs,
    reach_of,
)
from wpr.analysis.semantic_contrast import continuations, plain_prompts
from wpr.analysis.statistics import Estimate
from wpr.transport.geometry import input_embeddings

OPENINGS = ["Once upon a time, there was a small boat that", "One day, a boy named Tom found a box in the"]


@pytest.fixture(scope="module")
def reference(model: Any) -> torch.Tensor:
    from transformers import AutoTokenizer

    return continuations(model, plain_prompts(AutoTokenizer.from_pretrained(pico.path()), OPENINGS), 24)


@pytest.fixture(scope="module")
def geometry(model: Any) -> TokenGeometry:
    return TokenGeometry.from_model(model, progress=False)


def test_the_papers_setting_is_blind_on_a_trained_model(geometry: TokenGeometry, reference: torch.Tensor) -> None:
    solver = Wasserstein(geometry, "paper")
    seen = diagnose(solver, reference, 32)
    assert seen.verdict == "blind"
    assert seen.contrast is not None
    assert seen.contrast[0] == pytest.approx(1.0, abs=1e-4)
    assert seen.move_share < 1e-3
    assert seen.near_share < 0.01
    assert float(seen.neighbours.median()) == pytest.approx(100 * float(geometry.nearest[geometry.alive].median()))
    text = " ".join(geometry_finding({"paper": (solver, seen)}, "pico").text)
    assert "paper is BLIND" in text
    assert "rescaled KL" in text


def test_the_same_setting_sees_where_costs_are_small(model: Any, reference: torch.Tensor) -> None:
    """The same model with embeddings of a fiftieth of the size: nothing else is different."""
    small = TokenGeometry.from_embeddings(input_embeddings(model) / 50, neighbours=512, progress=False)
    seen = diagnose(Wasserstein(small, "paper"), reference, 32)
    assert seen.verdict == "sees meaning"
    assert seen.contrast is not None
    assert seen.contrast[2] < 0.9
    assert seen.move_share == pytest.approx(1 - seen.cut_share)


def test_the_semantic_setting_sees_on_a_trained_model(geometry: TokenGeometry, reference: torch.Tensor) -> None:
    solver = Wasserstein(geometry, "unbalanced")
    seen = diagnose(solver, reference, 32)
    assert seen.verdict == "sees meaning"
    finding = geometry_finding({"semantic": (solver, seen)}, "pico")
    assert "SEES MEANING" in finding.text[0]
    for series in finding.figures[0].series:
        assert sum(series.y) == pytest.approx(1.0)


def test_moves_beyond_the_nearest_cannot_be_made(model: Any, reference: torch.Tensor) -> None:
    few = TokenGeometry.from_model(model, neighbours=4, progress=False)
    seen = diagnose(Wasserstein(few, "unbalanced"), reference, 8)
    everything = TokenGeometry.from_model(model, neighbours=None, progress=False)
    assert diagnose(Wasserstein(everything, "unbalanced"), reference, 8).cut_share == 0
    assert seen.cut_share > 0.5
    assert seen.move_share <= 1 - seen.cut_share + 1e-9
    ids = reference.topk(2).indices[0]
    connected = bool(few.cost(ids.unsqueeze(0), scaled=False)[0, 0, 1].isfinite())
    assert bool(seen.moves[0].isfinite()) == connected, "as the regularizer's own costs have it"
    text = " ".join(geometry_finding({"few": (Wasserstein(few, "unbalanced"), seen)}, "pico").text)
    assert "not among each other's 4 nearest" in text


def test_reach(geometry: TokenGeometry) -> None:
    assert reach_of(Wasserstein(geometry, "paper")) == pytest.approx(-math.log(1e-16))
    assert reach_of(Wasserstein(geometry, "paper", iterations=5)) == 20
    assert reach_of(Wasserstein(geometry, "paper", floor=0.0)) == 40
    assert reach_of(Wasserstein(geometry, "unbalanced", lam=10.0, rho=4.0)) == 80


def test_costs_of_pairs(geometry: TokenGeometry) -> None:
    first, second = torch.tensor([300, 400]), torch.tensor([301, 300])
    expected = (geometry.embeddings[first] - geometry.embeddings[second]).norm(dim=-1)
    torch.testing.assert_close(pair_costs(geometry, first, second), expected)


def seen(contrast: float | None, moves: float, reach: float = 10.0) -> GeometryDiagnostics:
    """One probable move of weight ``moves`` within reach, the rest beyond it."""
    measured = None if contrast is None else (contrast, contrast, contrast)
    ones = torch.ones(2)
    return GeometryDiagnostics(
        ones, ones, ones, torch.tensor([1.0, 99.0]), torch.tensor([moves, 1 - moves]), reach, measured
    )


@pytest.mark.parametrize(
    ("contrast", "moves", "verdict"),
    [
        (1.0, 0.0, "blind"),
        (0.98, 0.09, "blind"),
        (1.0, 0.5, "partly blind"),
        (0.95, 0.0, "partly blind"),
        (0.89, 0.0, "sees meaning"),
        (None, 0.005, "blind"),
        (None, 0.5, "not measured"),
        (math.nan, 0.5, "not measured"),
    ],
)
def test_what_decides_the_verdict(contrast: float | None, moves: float, verdict: str) -> None:
    assert seen(contrast, moves).verdict == verdict


def test_a_model_that_is_sure_of_nothing(geometry: TokenGeometry) -> None:
    flat = torch.full((4, geometry.vocabulary), -math.log(geometry.vocabulary))
    solver = Wasserstein(geometry, "unbalanced")
    found = diagnose(solver, flat)
    assert found.contrast is None
    text = " ".join(geometry_finding({"semantic": (solver, found)}, "pico").text)
    assert "NOT MEASURED" in text
    assert "--text" in text


@pytest.mark.parametrize(
    ("beyond", "verdict"),
    [
        (None, "sees meaning"),
        (Estimate(0.2, 0.1, 0.3), "sees meaning"),
        (Estimate(0.0, -0.05, 0.05), DISTANCES),
        (Estimate(-0.2, -0.3, -0.1), DISTANCES),
        (Estimate(0.1, -0.3, 0.5), UNTOLD),
        (Estimate(math.nan), UNTOLD),
    ],
)
def test_a_verdict_on_distances_by_meaning_in_context(beyond: Estimate | None, verdict: str) -> None:
    one = torch.ones(1)
    assert GeometryDiagnostics(one, one, one, one, one, 2.0, (0.2, 0.1, 0.3), beyond).verdict == verdict
    assert GeometryDiagnostics(one, one, one, 9 * one, one, 2.0, (0.99, 0.9, 1.1), beyond).verdict == "blind"
