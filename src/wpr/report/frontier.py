"""Reward against divergence: what each policy gained, and how far it went from the SFT model for it."""

from __future__ import annotations

from wpr.findings import Cell
from wpr.report.charts import Chart, Charts, Line, legend, policy_name, swatch, trail_chart
from wpr.report.comparisons import MEASURES, SFT
from wpr.report.markup import join, paragraph, tag
from wpr.report.section import ReportData, Section
from wpr.report.tables import Table
from wpr.runs.tolerant import Policy

DIVERGENCE = "divergence_"
"""Divergences that were measured on every policy alike are called so, and then by name."""


def frontier_section(findings: ReportData) -> Section:
    """Score and gold over KL, and over every eval_regularizer divergence; what is watched over the score."""
    charts = Charts()
    drawn = [
        charts.panel(f"frontier-{measure}-{number}", chart)
        for number, ((_, measure), chart) in enumerate(frontier_charts(findings).items())
    ]
    names = [policy_name(policy) for policy in findings.policies] + [swatch(SFT, "neutral")]
    body = (
        join(legend(names), tag("div", *drawn, class_="panels wide"))
        if drawn
        else paragraph("No policy has both a score and a divergence.", class_="empty")
    )
    ends = findings.after
    measures = [
        name
        for name in dict.fromkeys((*MEASURES, *findings.monitors, *_divergences(findings)))
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


def frontier_charts(findings: ReportData) -> dict[tuple[str, str], Chart]:
    """Charts by what lies across and what upwards, of those that have numbers."""
    watched = {"gold": findings.measures["gold"]} | {name: name for name in findings.monitors}
    wanted = {
        (axis, measure): (label, title)
        for axis, label in _divergences(findings).items()
        for measure, title in findings.measures.items()
    } | {("score", measure): ("score", title) for measure, title in watched.items()}
    found = {}
    for (axis, measure), (x_label, title) in wanted.items():
        trails = [_trail(policy, axis, measure) for policy in findings.policies]
        over = f"{title} over {x_label.partition(',')[0]}"
        if (chart := trail_chart(over, trails, _ends(findings, axis, measure), x_label)) is not None:
            found[axis, measure] = chart
    return found


def _divergences(findings: ReportData) -> dict[str, str]:
    """Divergences that policies have in common, and what an axis calls them."""
    measured = sorted({name for found in findings.after.values() for name in found if name.startswith(DIVERGENCE)})
    named = {name: f"{name.removeprefix(DIVERGENCE)} divergence, per token" for name in measured}
    return {"kl": "KL from the SFT model, per token"} | named


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
