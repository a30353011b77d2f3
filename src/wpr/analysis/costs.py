"""What training cost: seconds of a PPO step by part, hours of 1,000 steps, seconds and memory of each stage.

The paper's hours are of 1,000 micro-batches: its code counts those as steps (docs/recipes.md). An optimizer step has
``gradient_accumulation_steps`` of them, so that

    hours of 1,000 micro-batches = 1,000 * seconds of an optimizer step / gradient_accumulation_steps / 3,600
"""

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
HOUR_COLUMNS = [
    "h per 1,000 optimizer steps",
    *(f"{part}, h per 1,000 micro-batches" for part in ("generation", "penalty", "all else", "sum")),
]
"""The last four are the rows of the paper's table of times; its backpropagation is here all that is left."""


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
    finding = cost_finding(stages, steps, {"run": context.run.path.resolve().name}, accumulation_of(run))
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


def accumulation_of(run: RunRecord) -> dict[str, int]:
    """Micro-batches of an optimizer step, by policy, where the manifest has the trainer's settings."""
    found = {}
    for stage, record in run.stages.items():
        steps = mapping(mapping(record).get("settings")).get("gradient_accumulation_steps")
        if stage.startswith("ppo/") and isinstance(steps, int) and steps > 0:
            found[stage.removeprefix("ppo/")] = steps
    return found


def hours_per_thousand(parts: Mapping[str, float], accumulation: int | None) -> list[float | None]:
    """Hours of 1,000 optimizer steps; then of 1,000 micro-batches: generation, penalty, the rest, and all. parts: in
    seconds per optimizer step. accumulation: micro-batches of a step; None where that is not known.
    """
    if not parts:
        return [None] * 5
    total, thousand = sum(parts.values()), 1000 / 3600
    drawn, penalty = parts.get("generation"), parts.get("penalty")
    rest = total - (drawn or 0.0) - (penalty or 0.0)
    micro = [
        None if one is None or accumulation is None else thousand * one / accumulation
        for one in (drawn, penalty, rest, total)
    ]
    return [thousand * total, *micro]


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
    stages: Sequence[StageCost],
    steps: Mapping[str, Mapping[str, float]],
    settings: Mapping[str, Any] | None = None,
    accumulation: Mapping[str, int] | None = None,
) -> Finding:
    """The finding on stages and on the parts of a step, in seconds, by policy. accumulation: its micro-batches."""
    parts = list(dict.fromkeys(part for found in steps.values() for part in found))
    if not stages and not parts:
        raise UnavailableError(
            "the run has recorded neither the time of a stage nor of a PPO step; finish a stage first"
        )
    rows: list[list[Cell]] = []
    for stage in stages:
        found = steps.get(stage.name.removeprefix("ppo/"), {}) if stage.name.startswith("ppo/") else {}
        total = sum(found.values()) if found else None
        hours = hours_per_thousand(found, (accumulation or {}).get(stage.name.removeprefix("ppo/")))
        rows.append([*stage, *(found.get(part) for part in parts), total, *hours])
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
        columns=[*STAGE_COLUMNS, *(f"{part}, s per step" for part in parts), "sum, s per step", *HOUR_COLUMNS],
        rows=rows,
        figures=figures,
        settings=dict(settings or {}),
    )


def _summary(steps: Mapping[str, Mapping[str, float]]) -> list[str]:
    sentences = [
        "Seconds and peak memory (of one GPU, that of the main process; of that process where there is none) as the "
        "run recorded them. The paper's steps are micro-batches."
    ]
    for policy, found in steps.items():
        total = sum(found.values())
        if "penalty" in found and total > 0:
            share = found["penalty"] / total
            sentences.append(f"{policy}: {total:.3g} seconds per PPO step, {share:.1%} of them for penalty and KL.")
    return sentences
