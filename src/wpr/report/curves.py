"""Training curves of policies on shared axes: as one SVG file, and as a section of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from wpr.findings import Cell
from wpr.report.axes import HEIGHT, LEFT, WIDTH, Area, Points
from wpr.report.charts import Charts, Line, legend, policy_name
from wpr.report.markup import Markup, join, paragraph, tag
from wpr.report.plots import COLOURS, document
from wpr.report.section import ReportData, Section
from wpr.report.tables import Table
from wpr.runs.values import finite

CURVES = {
    "score": "score of responses",
    "kl": "KL to the reference, per token",
    "divergence": "own divergence, per token",
    "penalty": "penalty, per token",
    "entropy": "entropy, per token",
    "response_length": "tokens per response",
}
"""Metrics with a chart, and their titles."""

PAGE_CURVES = {"score": CURVES["score"], "gold": "gold score of responses"} | CURVES
"""Those of the page: gold is there only where a run has a gold scorer."""

DASHES = (None, "6 3", "2 2", "8 3 2 3")
"""Of the series, in order, beside the colours."""


def policy_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """An SVG document with one chart per metric; ``runs`` are the lines of each policy's metrics file, by name."""
    charts = []
    for metric, title in CURVES.items():
        series = {
            name: [
                (step, value)
                for row in rows
                if "loss" in row
                and (step := finite(row.get("step"))) is not None
                and (value := finite(row.get(metric))) is not None
            ]
            for name, rows in runs.items()
        }
        charts.append(line_chart(title, series))
    return panels(charts, list(runs))


def line_chart(title: str, series: Mapping[str, Points], x_label: str = "step") -> Markup:
    """One chart as an SVG group of `WIDTH` x `HEIGHT`. Points that are not finite leave a gap.

    Series keep their colour and dash by their place in the mapping, so that charts of one page agree.
    """
    heading = tag("text", title, x=LEFT, y=18, class_="t")
    area = Area.around([point for points in series.values() for point in points])
    if area is None:
        return tag("g", heading, tag("text", "no data", x=LEFT, y=60))
    lines = [
        tag("path", tag("title", name), d=area.path(points), **_stroke(index))
        for index, (name, points) in enumerate(series.items())
    ]
    return tag("g", heading, area.grid(x_label), *lines)


def panels(charts: Sequence[Markup], names: Sequence[str], columns: int = 3) -> str:
    """Charts side by side under one legend, as an SVG document."""
    drawn, at = [], LEFT
    for index, name in enumerate(names):
        drawn.append(tag("line", x1=at, x2=at + 24, y1=14, y2=14, **_stroke(index)))
        drawn.append(tag("text", name, x=at + 30, y=18))
        at += 44 + 7 * len(name)
    for index, chart in enumerate(charts):
        row, column = divmod(index, columns)
        drawn.append(tag("g", chart, transform=f"translate({column * WIDTH},{28 + row * HEIGHT})"))
    return document(join(*drawn), columns * WIDTH, math.ceil(len(charts) / columns) * HEIGHT + 28)


def _stroke(index: int) -> dict[str, str | None]:
    colour, dash = f"c{index % len(COLOURS)}", DASHES[index % len(DASHES)]
    return {"fill": "none", "stroke_width": "1.8", "stroke_dasharray": dash, "class_": f"stroke {colour}"}


def training_section(findings: ReportData) -> Section:
    """All policies of all runs on shared axes, one chart per metric."""
    charts, figures = Charts(), []
    policies = [policy for policy in findings.policies if policy.lines]
    for metric, title in _curves(findings).items():
        lines = [Line(policy.name, policy.series(metric), policy.colour, policy.dash) for policy in policies]
        figures.append(charts.curves(f"curve-{metric}", title, lines))
    drawn = [figure for figure in figures if figure is not None]
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


def _curves(findings: ReportData) -> dict[str, str]:
    """Metrics with a chart on the page, and their titles: monitors stand after gold."""
    first = {name: PAGE_CURVES[name] for name in ("score", "gold")}
    return first | {name: f"{name} of responses" for name in findings.monitors} | PAGE_CURVES


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
