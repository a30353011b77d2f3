"""Training curves of policies on shared axes, one chart per metric."""

from __future__ import annotations

from collections.abc import Sequence

from wpr.findings import Cell
from wpr.report.charts import Chart, Charts, Line, curve_chart, legend, policy_name
from wpr.report.markup import join, paragraph, tag
from wpr.report.section import ReportData, Section
from wpr.report.tables import Table

CURVES = {
    "score": "score of responses",
    "gold": "gold score of responses",
    "kl": "KL to the reference, per token",
    "divergence": "own divergence, per token",
    "penalty": "penalty, per token",
    "entropy": "entropy, per token",
    "response_length": "tokens per response",
}
"""Metrics with a chart, and their titles; gold is there only where a run has a gold scorer."""


def training_section(findings: ReportData) -> Section:
    """All policies of all runs on shared axes, one chart per metric."""
    charts = Charts()
    policies = [policy for policy in findings.policies if policy.lines]
    drawn = [charts.panel(f"curve-{metric}", chart) for metric, chart in training_charts(findings).items()]
    table = _table(findings)
    if drawn:
        body = join(legend([policy_name(policy) for policy in policies]), tag("div", *drawn, class_="panels"))
    else:
        body = paragraph("There is no training log to draw yet.", class_="empty")
    lead = (
        "Means over the training responses of each log, by optimizer step. Long curves are a moving average over the "
        "faint raw line. Score should rise; gold, which the policy never sees, tells whether that is real."
    )
    tables = [table] if table.rows else []
    return Section("training", "Training", lead, join(body, *(one.folded() for one in tables)), tables, charts.data)


def training_charts(findings: ReportData, metrics: Sequence[str] | None = None) -> dict[str, Chart]:
    """Charts by metric, of those that have numbers. metrics: names of the logs' metrics; None: those of the page."""
    titles = _curves(findings)
    found = {}
    for metric in titles if metrics is None else metrics:
        lines = [Line(one.name, one.series(metric), one.colour, one.dash) for one in findings.policies if one.lines]
        if (chart := curve_chart(titles.get(metric, metric), lines)) is not None:
            found[metric] = chart
    return found


def _curves(findings: ReportData) -> dict[str, str]:
    """Metrics with a chart, and their titles: monitors stand after gold."""
    first = {name: CURVES[name] for name in ("score", "gold")}
    return first | {name: f"{name} of responses" for name in findings.monitors} | CURVES


def _table(findings: ReportData) -> Table:
    metrics = [
        metric
        for metric in _curves(findings)
        if any(metric in line for policy in findings.policies for line in policy.lines)
    ]
    rows: list[list[Cell]] = []
    for policy in findings.policies:
        values = {metric: dict(policy.series(metric)) for metric in metrics}
        steps = [float(line["step"]) for line in policy.lines]
        rows += [[policy.name, step, *(values[metric].get(step) for metric in metrics)] for step in steps]
    return Table("training", "Training logs", ["policy", "step", *metrics], rows)
