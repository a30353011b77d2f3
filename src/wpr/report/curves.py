"""Training curves of policies on shared axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wpr.report.charts import line_chart, panels

CURVES = {
    "score": "score of responses",
    "kl": "KL to the reference, a token",
    "divergence": "own divergence, a token",
    "penalty": "penalty, a token",
    "entropy": "entropy, a token",
    "response_length": "tokens a response",
}
"""Metrics with a chart, and their titles."""


def policy_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """An SVG document with one chart a metric; ``runs`` are the lines of each policy's metrics file, by name."""
    charts = []
    for metric, title in CURVES.items():
        series = {
            name: [(float(row["step"]), float(row[metric])) for row in rows if "loss" in row and metric in row]
            for name, rows in runs.items()
        }
        charts.append(line_chart(title, series))
    return panels(charts, list(runs))
