"""Time and memory: of stages, and of a step by part."""

from __future__ import annotations

import pytest

from tests.analysis.columns import column
from wpr.analysis.costs import StageCost, cost_finding


def test_costs() -> None:
    stages = [StageCost("sft", "done", 10.0, 1.5), StageCost("ppo/a", "done", 20.0, None),
              StageCost("ppo/b", "failed", None, None)]  # fmt: skip
    finding = cost_finding(stages, {"a": {"generation": 3.0, "penalty": 1.0}})
    assert column(finding, "stage") == ["sft", "ppo/a", "ppo/b"]
    assert column(finding, "sum, s per step") == [None, 4.0, None]
    assert [figure.name for figure in finding.figures] == ["step", "seconds", "memory"]
    assert any("25.0% of them" in sentence for sentence in finding.text)
    assert column(finding, "h per 1,000 optimizer steps") == [None, pytest.approx(4000 / 3600), None]
    assert column(finding, "sum, h per 1,000 micro-batches") == [None, None, None]  # nobody knows how many a step has
    with pytest.raises(ValueError, match="recorded neither"):
        cost_finding([], {})


def test_hours_of_the_paper_s_steps() -> None:
    """Its table for Wasserstein: 8 micro-batches per step, 0.769 + 0.117 + 3.707 hours per 1,000 of them."""
    seconds = {"generation": 22.1472, "penalty": 3.3696, "scoring": 6.7616, "backpropagation": 100.0}
    finding = cost_finding([StageCost("ppo/w", "done", 1.0, 78.98)], {"w": seconds}, None, {"w": 8})
    row = dict(zip(finding.columns, finding.rows[0], strict=True))
    hours = [row[f"{part}, h per 1,000 micro-batches"] for part in ("generation", "penalty", "all else", "sum")]
    assert hours == pytest.approx([0.769, 0.117, 3.707, 4.593], abs=1e-3)
    assert row["h per 1,000 optimizer steps"] == pytest.approx(8 * 4.593, abs=1e-2)
