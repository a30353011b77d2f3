"""Win rates: each policy against the SFT model and against each other, with intervals."""

from __future__ import annotations

from wpr.findings import Cell
from wpr.report.charts import Interval, interval_chart, looks, policy_name
from wpr.report.comparisons import MEASURES, PolicyComparison, against_each_other, against_sft
from wpr.report.markup import DASH, Markup, join, paragraph, percent, tag
from wpr.report.section import ReportData, Section
from wpr.report.tables import Table

PAIRS = 15
"""Pairs of policies that are drawn; more are in the table only."""

COLUMNS = [
    "policy", "against", "judged by", "win rate", "low", "high", "wins", "ties", "losses", "comparisons", "prompts",
    "p",
]  # fmt: skip


def win_rate_section(findings: ReportData) -> Section:
    """By gold where there is gold, and by the score."""
    parts: list[Markup] = []
    table = win_rate_table(findings)
    for measure, title in findings.measures.items():
        sft = against_sft(findings.policies, measure)
        others = against_each_other(findings.policies, measure)
        drawn = [
            tag("div", tag("h4", caption), interval_chart([_interval(one) for one in found]), class_="half-width")
            for caption, found in (("against the SFT model", sft), ("against each other", others[:PAIRS]))
            if found
        ]
        if drawn:
            parts += [tag("h3", f"By the {title}"), tag("div", *drawn, class_="halves")]
        if len(others) > PAIRS:
            parts.append(paragraph(f"{PAIRS} of {len(others)} pairs are drawn; the table has all.", class_="note"))
    if table.rows and not findings.gold:
        parts.append(
            paragraph("These runs have no gold scores: only the score that was trained on can judge.", class_="note")
        )
    if not table.rows:
        text = "No two models answered the same held-out prompts with scores; there is nothing to compare."
        parts.append(paragraph(text, class_="empty"))
    tables = [table] if table.rows else []
    lead = (
        "The share of held-out prompts on which the first model's response is scored higher, ties counting half. The "
        "bar is the 95% interval; where it crosses the line at 50%, the two cannot be told apart."
    )
    return Section("wins", "Win rates", lead, join(*parts, *(one.folded() for one in tables)), tables)


def win_rate_table(findings: ReportData) -> Table:
    """All comparisons, those against the SFT model first, by each measure."""
    rows = [
        _row(comparison)
        for measure in MEASURES
        for compare in (against_sft, against_each_other)
        for comparison in compare(findings.policies, measure)
    ]
    return Table("win_rates", "Win rates", COLUMNS, rows)


def _interval(comparison: PolicyComparison) -> Interval:
    result, ours, theirs = comparison.result, comparison.ours, comparison.theirs
    label = policy_name(ours)
    if theirs is not None:
        label = join(label, tag("span", f" over {theirs.name}", class_="muted"))
    note = f"{percent(result.rate)} ({100 * result.low:.0f}{DASH}{100 * result.high:.0f})"
    return Interval(label, result.rate, result.low, result.high, looks(ours.colour, ours.dash), note)


def _row(comparison: PolicyComparison) -> list[Cell]:
    result = comparison.result
    return [
        comparison.ours.name, comparison.opponent, comparison.measure, result.rate, result.low, result.high,
        result.wins, result.ties, result.losses, result.comparisons, comparison.prompts, result.p_value,
    ]  # fmt: skip
