"""What training cost: seconds of a PPO step by part, seconds and memory of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from wpr.errors import UnavailableError
from wpr.findings import Cell, Figure, Finding, Series
from wpr.runs.tolerant import Policy, Problems, RunRecord, read_run
from wpr.runs.values import finite, mapping

if TYPE_CHECKING:  # the report needs this file, and no torch
    from wpr.analysis.context import AnalysisContext, Found

PARTS = {
    "generation": "drawing responses",
    "scoring": "forward passes of policy, reference and critic",
    "penalty": "penalty and KL",
    "reward": "the reward",
    "monitors": "scores that are only watched",
    "backpropagation": "learning",
}
"""Parts of a step that the trainer times, and what they are."""

STAGE_COLUMNS = ["stage", "status", "seconds", "peak memory (GB)"]


class StageCost(NamedTuple):
    """What a stage took, as far as the run recorded it."""

    name: str
    status: str
    seconds: float | None
    gigabytes: float | None


def analyze(context: AnalysisContext) -> Found:
    """Time and memory of the stages and of PPO's parts."""
    problems = Problems()
    run = read_run(context.run.path, problems)
    assert run is not None  # a finished run has a folder and a manifest
    for problem in problems.of("metrics.jsonl"):
        context.say(f"Note: {problem}")
    stages = stage_costs(run)
    steps = {policy.own_name: found for policy in run.policies if (found := seconds_per_step(policy))}
    finding = cost_finding(stages, steps, {"run": context.run.path.resolve().name})
    data = [{"stage": one.name, "seconds": one.seconds, "peak_memory_gb": one.gigabytes} for one in stages]
    return finding, [*data, *({"policy": policy} | found for policy, found in steps.items())]


def stage_costs(run: RunRecord) -> list[StageCost]:
    """Of every stage that the manifest has."""
    records = {name: mapping(record) for name, record in run.stages.items()}
    return [
        StageCost(
            name, str(record.get("status", "unknown")), finite(record.get("seconds")),
            finite(record.get("peak_memory_gb")),
        )
        for name, record in records.items()
    ]  # fmt: skip


def seconds_per_step(policy: Policy) -> dict[str, float]:
    """Mean seconds of each part. A log line holds the sum since the line before it."""
    steps = max((float(line["step"]) for line in policy.lines), default=0.0)
    found = {}
    for part in PARTS:
        values = [value for line in policy.lines if (value := finite(line.get(f"seconds_{part}"))) is not None]
        if values and steps > 0:
            found[part] = max(0.0, sum(values) / steps)
    return found


def cost_finding(
    stages: Sequence[StageCost], steps: Mapping[str, Mapping[str, float]], settings: Mapping[str, Any] | None = None
) -> Finding:
    """The finding on stages and on the parts of a step, in seconds, by policy."""
    parts = list(dict.fromkeys(part for found in steps.values() for part in found))
    if not stages and not parts:
        raise UnavailableError(
            "the run has recorded neither the time of a stage nor of a PPO step; finish a stage first"
        )
    rows: list[list[Cell]] = []
    for stage in stages:
        found = steps.get(stage.name.removeprefix("ppo/"), {}) if stage.name.startswith("ppo/") else {}
        total = sum(found.values()) if found else None
        rows.append([*stage, *(found.get(part) for part in parts), total])
    figures = []
    if parts:
        series = [Series(part, list(steps), [found.get(part, 0.0) for found in steps.values()]) for part in parts]
        figures.append(Figure("bars", "Seconds per PPO step, by part", "policy", "seconds", series, name="step"))
    for index, (title, label, name) in enumerate(
        [("Duration of the stages", "seconds", "seconds"), ("Peak memory of the stages", "GB", "memory")], 2
    ):
        known = [(stage.name, float(value)) for stage in stages if (value := stage[index]) is not None]
        if known:
            names, values = (list(column) for column in zip(*known, strict=True))
            figures.append(Figure("bars", title, "stage", label, [Series(label, names, values)], name=name))
    return Finding(
        name="costs",
        title="Time and memory",
        text=_summary(steps),
        columns=[*STAGE_COLUMNS, *(f"{part}, s per step" for part in parts), "sum, s per step"],
        rows=rows,
        figures=figures,
        settings=dict(settings or {}),
    )


def _summary(steps: Mapping[str, Mapping[str, float]]) -> list[str]:
    sentences = [
        "Seconds and peak memory (of the GPU, or of the process where there is none) as the run recorded them."
    ]
    for policy, found in steps.items():
        total = sum(found.values())
        if "penalty" in found and total > 0:
            share = found["penalty"] / total
            sentences.append(f"{policy}: {total:.3g} seconds per PPO step, {share:.1%} of them for penalty and KL.")
    return sentences
