"""Reward against divergence: what each policy gained, and how far it went from the SFT model for it."""

from __future__ import annotations

from wpr.findings import Cell
from wpr.report.charts import Charts, Line, legend, policy_name, swatch
from wpr.report.comparisons import MEASURES, SFT
from wpr.report.markup import Markup, join, paragraph, tag
from wpr.report.section import ReportData, Section
from wpr.report.tables import Table
from wpr.runs.tolerant import Policy

DIVERGENCE = "divergence_"
"""Divergences that were measured on every policy alike are called so, and then by name."""


def frontier_section(findings: ReportData) -> Section:
    """Score and gold over KL, and over every eval_regularizer divergence; what is watched over the score."""
    ends = findings.after
    eval_regularizers = sorted({name for found in ends.values() for name in found if name.startswith(DIVERGENCE)})
    axes = {"kl": "KL from the SFT model, per token"} | {
        name: f"{name.removeprefix(DIVERGENCE)} divergence, per token" for name in eval_regularizers
    }
    charts = Charts()
    drawn: list[Markup] = []
    watched = {"gold": MEASURES["gold"]} | {name: name for name in findings.monitors}
    panels = [(axis, label, measure, title) for axis, label in axes.items() for measure, title in MEASURES.items()]
    panels += [("score", "score", measure, title) for measure, title in watched.items()]
    for axis, x_label, measure, title in panels:
        figure = charts.trails(
            f"frontier-{measure}-{len(drawn)}",
            f"{title} over {x_label.partition(',')[0]}",
            [_trail(policy, axis, measure) for policy in findings.policies],
            _ends(findings, axis, measure),
            x_label,
        )
        drawn += [] if figure is None else [figure]
    names = [policy_name(policy) for policy in findings.policies] + [swatch(SFT, "neutral")]
    body = (
        join(legend(names), tag("div", *drawn, class_="panels wide"))
        if drawn
        else paragraph("No policy has both a score and a divergence.", class_="empty")
    )
    measures = [
        name
        for name in dict.fromkeys((*MEASURES, *findings.monitors, *axes))
        if any(name in found for found in ends.values())
    ]
    known = {name: found for name, found in ends.items() if found}
    rows: list[list[Cell]] = [[name, *(found.get(column) for column in measures)] for name, found in known.items()]
    table = Table("frontier", "Where policies ended, on held-out prompts", ["policy", *measures], rows)
    tables = [table] if rows else []
    lead = (
        "The thin trail is a policy's way through training (a moving average; over KL only, since other divergences "
        "are measured at the end), the large mark its end on held-out prompts; the grey mark is the SFT model. Higher "
        "and further left is better: more reward for less change. What is watched, gold first, is also drawn over the "
        "score: there, of two policies with the same score the higher one kept more of it."
    ) + (" The shape of a mark tells its run." if len(findings.runs) > 1 else "")
    return Section("frontier", "Reward against divergence", lead, join(body, *(one.folded() for one in tables)), tables,
                   charts.data)  # fmt: skip


def _trail(policy: Policy, axis: str, measure: str) -> Line:
    """Training logs that have both."""
    across = dict(policy.series(axis))
    points = [(across[step], value) for step, value in policy.series(measure) if step in across]
    return Line(policy.name, points, policy.colour, policy.dash)


def _ends(findings: ReportData, axis: str, measure: str) -> list[Line]:
    found = []
    for policy in findings.policies:
        after = findings.after[policy.name]
        if axis in after and measure in after:
            found.append(Line(policy.name, [(after[axis], after[measure])], policy.colour, policy.dash))
    for name, before in findings.starts():
        if measure in before and found:
            # The SFT model is the reference: its divergence is zero but for rounding.
            at = before.get(axis, 0.0) if axis == "score" else max(0.0, before.get(axis, 0.0))
            found.append(Line(name, [(at, before[measure])], neutral=True))
    return found
