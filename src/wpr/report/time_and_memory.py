"""Time and memory on the page: what a step is spent on, how long the stages took, and what they held."""

from __future__ import annotations

from wpr.analysis.costs import PARTS, STAGE_COLUMNS, seconds_per_step, stage_costs
from wpr.findings import Cell
from wpr.report.charts import Bar, bar_chart, looks, policy_name
from wpr.report.markup import Markup, duration, join, paragraph, shown, tag
from wpr.report.section import ReportData, Section
from wpr.report.tables import Table


def cost_section(findings: ReportData) -> Section:
    """Seconds per step by part, then durations and memory by stage."""
    found = {policy.name: seconds_per_step(policy) for policy in findings.policies}
    steps: list[list[Cell]] = [
        [name, *(parts.get(part) for part in PARTS), sum(parts.values())] for name, parts in found.items() if parts
    ]
    stages: list[list[Cell]] = [[run.name, *stage] for run in findings.runs for stage in stage_costs(run)]
    step_table = Table("step_seconds", "Seconds per optimizer step", ["policy", *PARTS, "sum"], steps)
    stage_table = Table("stages", "Stages", ["run", *STAGE_COLUMNS], stages)
    parts: list[Markup] = []
    if steps:
        parts += [tag("h3", "A training step"), _key(), _step_bars(findings), step_table.folded()]
    if stages:
        parts += [tag("h3", "Stages"), tag("div", *_stage_bars(findings), class_="halves"), stage_table.folded()]
    if not parts:
        parts.append(paragraph("No stage has recorded its time or memory.", class_="empty"))
    lead = (
        "Seconds per optimizer step, averaged over training and split by what they were spent on; below, how long each "
        "stage took and its peak memory (of the GPU, or of the process where there is none)."
    )
    tables = [table for table in (step_table, stage_table) if table.rows]
    return Section("costs", "Time and memory", lead, join(*parts), tables)


def _key() -> Markup:
    named = []
    for index, (name, what) in enumerate(PARTS.items()):
        square = tag("rect", width="12", height="12", class_=f"part{index}")
        sample = tag("svg", square, width="12", height="12", aria_hidden="true")
        named.append(tag("span", sample, f"{name}: {what}", class_="named"))
    return tag("p", *named, class_="legend")


def _step_bars(findings: ReportData) -> Markup:
    bars = []
    for policy in findings.policies:
        if found := seconds_per_step(policy):
            pieces = [(f"part{index}", found.get(part, 0.0)) for index, part in enumerate(PARTS)]
            bars.append(Bar(policy_name(policy), pieces, f"{shown(float(f'{sum(found.values()):.3g}'))} s"))
    return bar_chart(bars)


def _stage_bars(findings: ReportData) -> list[Markup]:
    durations, memory = [], []
    colours = {(policy.run.name, f"ppo/{policy.own_name}"): looks(policy.colour) for policy in findings.policies}
    for run in findings.runs:
        for stage in stage_costs(run):
            classes = f"whole {colours.get((run.name, stage.name), 'neutral')}"
            label = f"{run.name}: {stage.name}" if len(findings.runs) > 1 else stage.name
            if stage.seconds is not None:
                durations.append(Bar(label, [(classes, max(0.0, stage.seconds))], duration(stage.seconds)))
            if stage.gigabytes is not None:
                memory.append(Bar(label, [(classes, max(0.0, stage.gigabytes))], f"{stage.gigabytes:.2f} GB"))
    return [
        tag("div", tag("h4", title), bar_chart(bars), class_="half-width")
        for title, bars in (("duration", durations), ("peak memory", memory))
        if bars
    ]
