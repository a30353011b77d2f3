"""One penalty against another: what is counted, and what is said of it."""

from __future__ import annotations

import pytest
import torch

from wpr.analysis.answers import TokenPenalties
from wpr.analysis.penalties import compare_penalties


def measured(slope: float, seed: int = 0, tokens: int = 400) -> TokenPenalties:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, generator=generator)
    y = slope * x + 0.1 * torch.randn(tokens, generator=generator)
    return TokenPenalties(torch.arange(tokens) // 10, {"kl": x, "w": y}, {"kl": x, "w": y})


def test_slopes_and_correlations_are_found() -> None:
    finding = compare_penalties(
        {"a": measured(0.5), "b": measured(0.5, 1)}, "kl", "w", {"a": range(40), "b": range(40, 80)}
    )
    rows = {row[0]: dict(zip(finding.columns, row, strict=True)) for row in finding.rows}
    assert list(rows) == ["a", "b", "all"]
    assert rows["a"]["slope"] == pytest.approx(0.5, abs=0.02)
    assert rows["all"]["tokens"] == 800
    assert rows["all"]["responses"] == 80, "responses of two policies are told apart"
    assert rows["a"]["slope low"] < 0.5 < rows["a"]["slope high"]
    assert rows["a"]["Pearson"] > 0.97
    assert any("charges less" in sentence for sentence in finding.text)


def test_the_same_responses_twice_are_no_more_evidence() -> None:
    """Two policies that answer alike: over prompts the interval stays as wide as that of one."""
    twice = compare_penalties({"a": measured(0.5), "b": measured(0.5)}, "kl", "w", {"a": range(40), "b": range(40)})
    one, _, both = (dict(zip(twice.columns, row, strict=True)) for row in twice.rows)
    assert both["responses"] == 2 * one["responses"]
    widths = [row["slope high"] - row["slope low"] for row in (one, both)]
    assert widths[1] == pytest.approx(widths[0], rel=1e-6)


def test_betas_scale_the_penalties() -> None:
    finding = compare_penalties({"a": measured(0.5)}, "kl", "w", {"a": range(40)}, betas=(0.1, 0.4))
    assert finding.rows[0][6] == pytest.approx(2.0, abs=0.1)
    assert not any("charges less" in sentence for sentence in finding.text)
    assert finding.figures[0].x_label == "0.1 * kl, per token"


def test_many_tokens_are_thinned_in_the_figure_alone() -> None:
    finding = compare_penalties({"a": measured(1.0, tokens=5000)}, "kl", "w", {"a": range(500)})
    assert finding.rows[0][2] == 5000
    assert len(finding.figures[0].series[0].x) == 1500
    assert "1500 of 5000 tokens" in finding.figures[0].note
