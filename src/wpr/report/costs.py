"""Time and memory: what a step is spent on, how long the stages took, and what they held."""

from __future__ import annotations

from wpr.findings import Cell
from wpr.report.charts import Bar, bar_chart, looks, policy_name
from wpr.report.markup import Markup, duration, join, paragraph, shown, tag
from wpr.report.section import ReportData, Section
from wpr.report.tables import Table
from wpr.runs.tolerant import Policy
from wpr.runs.values import finite, mapping

PARTS = {
    "generation": "drawing responses",
    "scoring": "forward passes of policy, reference and critic",
    "penalty": "penalty and KL",
    "reward": "the reward",
    "monitors": "scores that are only watched",
    "backpropagation": "learning",
}
"""Parts of a step that the trainer times, and what they are."""


def cost_section(findings: ReportData) -> Section:
    """Seconds per step by part, then durations and memory by stage."""
    steps, stages = step_table(findings), stage_table(findings)
    parts: list[Markup] = []
    if steps.rows:
        parts += [tag("h3", "A training step"), _key(), _step_bars(findings), steps.folded()]
    if stages.rows:
        parts += [tag("h3", "Stages"), tag("div", *_stage_bars(findings), class_="halves"), stages.folded()]
    if not parts:
        parts.append(paragraph("No stage has recorded its time or memory.", class_="empty"))
    lead = (
        "Seconds per optimizer step, averaged over training and split by what they were spent on; below, how long each "
        "stage took and its peak memory (of the GPU, or of the process where there is none)."
    )
    return Section("costs", "Time and memory", lead, join(*parts), [table for table in (steps, stages) if table.rows])


def seconds_per_step(policy: Policy) -> dict[str, float]:
    """Mean seconds of each part. A log line holds the sum since the line before it."""
    steps = max((float(line["step"]) for line in policy.lines), default=0.0)
    found = {}
    for part in PARTS:
        values = [value for line in policy.lines if (value := finite(line.get(f"seconds_{part}"))) is not None]
        if values and steps > 0:
            found[part] = max(0.0, sum(values) / steps)
    return found


def step_table(findings: ReportData) -> Table:
    """Seconds per step by policy and part."""
    rows: list[list[Cell]] = []
    for policy in findings.policies:
        if found := seconds_per_step(policy):
            rows.append([policy.name, *(found.get(part) for part in PARTS), sum(found.values())])
    return Table("step_seconds", "Seconds per optimizer step", ["policy", *PARTS, "sum"], rows)


def stage_table(findings: ReportData) -> Table:
    """Duration and memory of every stage."""
    rows: list[list[Cell]] = []
    for run in findings.runs:
        for name, record in run.stages.items():
            known = mapping(record)
            status = str(known.get("status", "unknown"))
            rows.append([run.name, name, status, finite(known.get("seconds")), finite(known.get("peak_memory_gb"))])
    return Table("stages", "Stages", ["run", "stage", "status", "seconds", "peak memory (GB)"], rows)


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
    several = len(findings.runs) > 1
    colours = {(policy.run.name, f"ppo/{policy.own_name}"): policy for policy in findings.policies}
    for run in findings.runs:
        for name, record in run.stages.items():
            policy = colours.get((run.name, name))
            classes = looks(policy.colour) if policy is not None else "neutral"
            label = f"{run.name}: {name}" if several else name
            seconds, held = (finite(mapping(record).get(key)) for key in ("seconds", "peak_memory_gb"))
            if seconds is not None:
                durations.append(Bar(label, [(f"whole {classes}", max(0.0, seconds))], duration(seconds)))
            if held is not None:
                memory.append(Bar(label, [(f"whole {classes}", max(0.0, held))], f"{held:.2f} GB"))
    return [
        tag("div", tag("h4", title), bar_chart(bars), class_="half-width")
        for title, bars in (("duration", durations), ("peak memory", memory))
        if bars
    ]
