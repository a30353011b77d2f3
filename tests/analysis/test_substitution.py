"""What stands in a forbidden word's place: the odds under every f-divergence, a near token under transport."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.analysis.substitution_texts import STORIES
from wpr import ReverseKL, SquaredHellinger, TokenGeometry, Wasserstein, pico
from wpr.analysis.screen import geometry_scores
from wpr.analysis.substitution import (
    COLUMNS,
    GAP,
    Judge,
    analyze_model,
    compare,
    exactly,
    measure,
)
from wpr.analysis.word_positions import WordPositions, find_positions
from wpr.evaluation.encoders import SentenceEncoder
from wpr.model_geometry import RegularizerFactory

K = 24
SETTINGS: dict[str, Any] = {"k2": K, "lam": 20.0, "rho": 4.0}


@pytest.fixture(scope="module")
def words(model: Any) -> WordPositions:
    return find_positions(model, AutoTokenizer.from_pretrained(pico.path()), STORIES, 8, likeliest=K)


@pytest.fixture(scope="module")
def geometry(model: Any) -> TokenGeometry:
    return TokenGeometry.from_model(model, transform="centre/unit", progress=False)


@pytest.fixture(scope="module")
def judge(model: Any) -> Judge:
    return Judge(SentenceEncoder.from_pretrained(str(pico.path())), (model, AutoTokenizer.from_pretrained(pico.path())))


@pytest.fixture(scope="module")
def measured(words: WordPositions, geometry: TokenGeometry, judge: Judge) -> dict[str, Any]:
    transport = exactly(Wasserstein(geometry, "unbalanced", **SETTINGS))
    regularizers = {
        "reverse-kl": ReverseKL(),
        "squared-hellinger": SquaredHellinger(),
        "sum": ReverseKL() + 4 * transport,
    }
    return measure(words, regularizers, judge, reward=-0.2)[0]


def test_all_at_the_same_reward_with_a_certificate(measured: dict[str, Any]) -> None:
    for one in measured.values():
        assert float(one.optimum.reward.mean()) == pytest.approx(-0.2, abs=1e-3)
        assert float(one.optimum.gap.max()) <= GAP


def test_f_divergences_keep_the_odds(words: WordPositions, measured: dict[str, Any]) -> None:
    odds = words.replacements(words.log_reference)
    for name in ("reverse-kl", "squared-hellinger"):
        torch.testing.assert_close(measured[name].choice, odds, atol=2e-3, rtol=0)
    assert float((measured["sum"].choice - odds).abs().max()) > 0.02


def test_transport_prefers_what_is_near(
    words: WordPositions, geometry: TokenGeometry, measured: dict[str, Any]
) -> None:
    nearness = next(iter(geometry_scores(words, {"one": Wasserstein(geometry, "unbalanced", **SETTINGS)}).values()))
    near = (measured["sum"].choice * nearness).sum(-1)
    assert (near > (measured["reverse-kl"].choice * nearness).sum(-1)).double().mean() > 0.7


def test_numbers_against_a_loop(words: WordPositions, measured: dict[str, Any], judge: Judge) -> None:
    one, p = measured["sum"], 1
    top = one.choice[p].topk(12)
    texts = [words.positions[p].with_word(words.word(p, entry)) for entry in top.indices.tolist()]
    vectors = judge.encoder([words.positions[p].with_word(words.positions[p].word), *texts]).double()
    # Others' likeliest replacements are judged too, so that a little more of the choice is known.
    weights = top.values / top.values.sum()
    assert float(one.similarity[p]) == pytest.approx(float(weights @ (vectors[1:] @ vectors[0])), abs=5e-3)
    log_p, log_q = one.optimum.log_policy[p], words.log_reference[p]
    assert float(one.kl[p]) == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum()))
    # The other model is the reference: what follows a text begins with the same token.
    assert float(one.other_nll[p]) == pytest.approx(float(one.nll[p]), abs=0.05)


def test_rows(words: WordPositions, measured: dict[str, Any]) -> None:
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in compare(words, measured, "reverse-kl")]
    assert rows[0]["minus odds"] is None
    control, ours = rows[1:]
    assert abs(control["minus odds"]) < 1e-3  # type: ignore[arg-type]
    gain = (measured["sum"].similarity - measured["reverse-kl"].similarity).mean()
    assert ours["minus odds"] == pytest.approx(float(gain))
    assert ours["low"] <= ours["minus odds"] <= ours["high"]  # type: ignore[operator]


def test_the_whole_analysis(model: Any, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pico.path())
    said: list[str] = []
    finding, data = analyze_model(
        RegularizerFactory(model), model, tokenizer, STORIES, "pico", str(pico.path()),
        ["reverse-kl + 4*semantic:lam=20,rho=4,transform=centre/unit"], other=str(pico.path()), positions=4,
        geometries=["metric=cosine"], contextual=True, say=said.append,
    )  # fmt: skip
    assert finding.rows[0][0] == "reverse-kl"
    lines = list(data)
    screened = [row["screen"] for row in lines if "screen" in row]
    assert screened == [
        "odds",
        "euclidean, centre/unit",
        "metric=cosine",
        "hidden state after it",
        "next tokens after it",
    ]
    assert sum("position" in row for row in lines) == 8
    assert any("gap" in text for text in said)
    assert any("the odds, " in text and "in similarity" in text for text in finding.text)
    assert finding.settings["encoder"] == str(pico.path())


def test_what_has_no_optimum_there_and_no_interval(model: Any) -> None:
    """Total variation's reward jumps from the reference's to the best; of two texts there is no interval. Figures have
    gaps, and nothing else is lost.
    """
    tokenizer = AutoTokenizer.from_pretrained(pico.path())
    finding, _ = analyze_model(
        RegularizerFactory(model), model, tokenizer, STORIES[:2], "pico", str(pico.path()),
        ["total-variation", "squared-hellinger"], positions=4,
    )  # fmt: skip
    assert [row[0] for row in finding.rows] == ["reverse-kl", "squared-hellinger"]
    assert any("total-variation is left out: no beta between" in text for text in finding.text)
    assert any("too few texts for an interval" in text for text in finding.text)
    assert [figure.name for figure in finding.figures] == ["similarity"]  # and no geometry to screen


def test_solvers_are_made_exact_and_nothing_else_changes(geometry: TokenGeometry) -> None:
    coarse = Wasserstein(geometry, "unbalanced", **SETTINGS)
    fine = exactly(ReverseKL() + 2 * coarse).parts[1][1]
    assert fine.settings == replace(coarse.settings, tolerance=1e-10, iterations=1000)
    paper = Wasserstein(geometry, "paper", k2=K)
    assert exactly(paper) is paper
