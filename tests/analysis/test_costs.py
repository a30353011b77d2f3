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
    with pytest.raises(ValueError, match="recorded neither"):
        cost_finding([], {})
