"""What training cost: seconds of a PPO step by part, seconds and memory of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wpr.findings import Cell, Figure, Finding, Series

STAGE_COLUMNS = ["stage", "status", "seconds", "peak memory (GB)"]


def cost_finding(
    stages: Sequence[tuple[str, str, float | None, float | None]],
    steps: Mapping[str, Mapping[str, float]],
    settings: Mapping[str, Any] | None = None,
) -> Finding:
    """The finding on stages (name, status, seconds, peak gigabytes) and on the parts of a step, in seconds, by
    policy.
    """
    parts = list(dict.fromkeys(part for found in steps.values() for part in found))
    if not stages and not parts:
        raise ValueError("the run has recorded neither the time of a stage nor of a PPO step; finish a stage first")
    rows: list[list[Cell]] = []
    for name, status, seconds, memory in stages:
        found = steps.get(name.removeprefix("ppo/"), {}) if name.startswith("ppo/") else {}
        total = sum(found.values()) if found else None
        rows.append([name, status, seconds, memory, *(found.get(part) for part in parts), total])
    figures = []
    if parts:
        series = [Series(part, list(steps), [found.get(part, 0.0) for found in steps.values()]) for part in parts]
        figures.append(Figure("bars", "Seconds per PPO step, by part", "policy", "seconds", series, name="step"))
    for index, (title, label, name) in enumerate(
        [("Duration of the stages", "seconds", "seconds"), ("Peak memory of the stages", "GB", "memory")], 2
    ):
        known = [(stage[0], float(value)) for stage in stages if (value := stage[index]) is not None]
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
            sentences.append(
                f"{policy}: {total:.3g} seconds per PPO step, "
                f"{found['penalty'] / total:.1%} of them for penalty and KL."
            )
    return sentences
