"""Sensitivity: what policies of a sweep reached, against the one setting in which they differ.

Policies that are alike in every setting but one make a line over that setting. Nothing is fitted: every point is a
trained policy, measured on held-out prompts. Where judges compared a run's policies with a baseline (`wpr judge`),
their win rates are lines too, one per judge, baseline and temperature.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wpr.analysis.context import AnalysisContext, Found
from wpr.errors import UnavailableError
from wpr.evaluation.judging.run_result import JudgedPair, judged_pairs
from wpr.findings import Cell, Figure, Finding, Mark, Series, found_in, slug
from wpr.runs.finished_run import FinishedRun

SETTINGS = {
    "ppo.beta": "beta",
    "ppo.target_divergence": "target",
    "regularizer.lam": "lam",
    "regularizer.neighbours": "k1",
    "regularizer.k2": "k2",
    "regularizer.iterations": "iterations",
    "regularizer.rho": "rho",
}
"""Settings that are looked at, and what tables call them."""

METRICS = {
    "score": "score",
    "win_rate": "win rate over SFT",
    "gold_win_rate": "gold win rate over SFT",
    "kl": "KL to the reference, per token",
    "divergence": "own divergence, per token",
}
DRAWN = ("score", "win_rate", "gold_win_rate", "kl")
"""Divergences of different settings have different units: they are in the table only."""

JUDGED = "judged win rate over "


@dataclass(frozen=True)
class Member:
    """A trained policy of a sweep.

    settings: dotted, all that decide its training. results: of `METRICS`, those that are known; and win rates by
        judges, under names that begin with `JUDGED`.
    intervals: ends of 95% intervals of results, where known.
    """

    policy: str
    settings: Mapping[str, Any]
    results: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepLine:
    """Members alike but for one setting, by its value."""

    name: str
    setting: str
    members: tuple[Member, ...]


def analyze(context: AnalysisContext, others: Sequence[FinishedRun] = ()) -> Found:
    """What policies reached against the setting in which they differ, of this run and of others like it."""
    runs = [context.run, *others]
    members = []
    for run in runs:
        judged = judged_pairs(found_in(run.path))
        for policy in run.finished:
            name = f"{run.path.resolve().name}: {policy}" if len(runs) > 1 else policy
            members.append(_member(run, policy, name, judged))
    finding = sensitivity_finding(members, {"runs": [str(run.path.resolve().name) for run in runs]})
    return finding, (dict(vars(member)) for member in members)


def _member(run: FinishedRun, policy: str, name: str, judged: Sequence[JudgedPair]) -> Member:
    record = run.manifest["stages"][f"ppo/{policy}"]
    inputs, results = record["inputs"], record["results"]
    settings = {f"ppo.{key}": value for key, value in inputs["ppo"].items()}
    settings |= regularizer_settings(inputs["regularizer"])
    settings |= {key: value for key, value in inputs.items() if key not in ("ppo", "regularizer")}
    after = results.get("after") or {}
    known: dict[str, Any] = {metric: after.get(metric) for metric in METRICS}
    intervals = {}
    for metric in ("win_rate", "gold_win_rate"):
        known[metric] = results.get(f"{metric}_before")
        if ends := results.get(f"{metric}_before_interval"):
            intervals[metric] = (float(ends["low"]), float(ends["high"]))
    for pair in judged:
        for seen in (pair, pair.turned()):
            if seen.ours == policy:
                metric = f"{JUDGED}{seen.theirs} ({seen.judge}, temperature {seen.temperature:g})"
                known[metric], intervals[metric] = seen.win_rate, (seen.low, seen.high)
    return Member(name, settings, {key: float(value) for key, value in known.items() if value is not None}, intervals)


def regularizer_settings(record: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By the names that recipes and grids have for them. In a sum that is the name of a setting that one part has; what
    several have is named by part.
    """
    parts = [record] if isinstance(record, Mapping) else record
    keys = [key for part in parts for key in part]
    return {
        f"regularizer.{key}" if keys.count(key) == 1 else f"regularizer.{number}.{key}": value
        for number, part in enumerate(parts)
        for key, value in part.items()
    }


def sweep_lines(members: Sequence[Member]) -> list[SweepLine]:
    """Every group of members that differ in one setting of `SETTINGS` alone, of two values or more."""
    lines = []
    for setting in SETTINGS:
        groups: dict[str, list[Member]] = {}
        for member in members:
            if member.settings.get(setting) is not None:
                rest = {key: value for key, value in member.settings.items() if key != setting}
                groups.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append(member)
        found = [
            sorted(group, key=lambda member: _order(member.settings[setting]))
            for group in groups.values()
            if len({str(member.settings[setting]) for member in group}) > 1
        ]
        names = _numbered([group[0].policy.split("+")[0] for group in found])
        lines += [SweepLine(name, setting, tuple(group)) for name, group in zip(names, found, strict=True)]
    return lines


def sensitivity_finding(members: Sequence[Member], settings: Mapping[str, Any] | None = None) -> Finding:
    """The finding on a sweep's policies; refused where no two differ in one setting alone."""
    lines = sweep_lines(members)
    if not lines:
        raise UnavailableError(
            f"none of the {len(members)} finished policies differ in one of {', '.join(SETTINGS.values())} alone; "
            "train some, as with `wpr sweep RECIPE --grid ppo.beta=0.1,0.01`"
        )
    titles = titles_of([member for line in lines for member in line.members])
    judged = [metric for metric in titles if metric.startswith(JUDGED)]
    shown = [metric for metric in titles if metric not in judged]
    rows: list[list[Cell]] = []
    for line in lines:
        for member in line.members:
            low, high = member.intervals.get("win_rate", (None, None))
            values = [member.results.get(metric) for metric in shown]
            by_judges: list[Cell] = []
            for metric in judged:
                by_judges += [member.results.get(metric), *member.intervals.get(metric, (None, None))]
            setting = member.settings[line.setting]
            value = setting if isinstance(setting, int | float | str) else str(setting)
            rows.append([line.name, SETTINGS[line.setting], value, member.policy, *values, low, high, *by_judges])
    figures = [
        figure
        for setting in SETTINGS
        for metric in (*DRAWN, *judged)
        if (figure := _figure([line for line in lines if line.setting == setting], setting, metric)) is not None
    ]
    return Finding(
        name="sensitivity",
        title="Sensitivity to settings",
        text=_summary(lines, judged),
        columns=[
            "line", "setting", "value", "policy", *(titles[one] for one in shown), "win rate low", "high",
            *(f"{metric}{end}" for metric in judged for end in ("", ", low", ", high")),
        ],
        rows=rows,
        figures=figures,
        settings=dict(settings or {}),
    )  # fmt: skip


def titles_of(members: Sequence[Member]) -> dict[str, str]:
    """What tables call the results that members have: those of `METRICS`, and win rates by judges."""
    found = {metric for member in members for metric in member.results}
    judged = sorted(metric for metric in found if metric.startswith(JUDGED))
    return {metric: title for metric, title in METRICS.items() if metric in found} | {one: one for one in judged}


def _figure(lines: Sequence[SweepLine], setting: str, metric: str) -> Figure | None:
    series = [_series(line, setting, metric) for line in lines if any(metric in m.results for m in line.members)]
    if not series:
        return None
    values = [x for one in series for x in one.x]
    numbers = [x for x in values if not isinstance(x, str)]
    if len(numbers) < len(values):  # one of them is called all
        series = [Series(one.name, [f"{x:g}" if not isinstance(x, str) else x for x in one.x], one.y, one.low, one.high)
                  for one in series]  # fmt: skip
    log = len(numbers) == len(values) and min(numbers) > 0 and max(numbers) / min(numbers) >= 8
    name = SETTINGS[setting]
    judged = metric.startswith(JUDGED)
    marks = [Mark(0.5, "no difference")] if judged or "win_rate" in metric else []
    title = f"{METRICS.get(metric, metric)} by {name}"
    label = "win rate" if judged else METRICS[metric]
    return Figure("lines", title, name, label, series, log_x=log, marks=marks, name=slug(f"{metric}-by-{name}"))


def _series(line: SweepLine, setting: str, metric: str) -> Series:
    x: list[Any] = [member.settings[setting] for member in line.members]
    y = [member.results.get(metric, math.nan) for member in line.members]
    ends = [member.intervals.get(metric, (math.nan, math.nan)) for member in line.members]
    known = any(not math.isnan(low) for low, _ in ends)
    low, high = ([end[side] for end in ends] for side in (0, 1))
    return Series(line.name, x, y, low if known else None, high if known else None)


def _summary(lines: Sequence[SweepLine], judged: Sequence[str]) -> list[str]:
    sentences = ["Each point is a policy trained with that value and otherwise the same settings, on held-out prompts."]
    for line in lines:
        name, values = SETTINGS[line.setting], [member.settings[line.setting] for member in line.members]
        said = f"{line.name} over {name} = {', '.join(f'{value}' for value in values)}"
        found = _range(line, "win_rate", "the win rate over SFT")
        sentences.append(f"{said}: {found}." if found else f"{said}.")
        sentences += [
            f"{line.name} over {name}: {found}."
            for metric in judged
            if (found := _range(line, metric, f"the {metric}"))
        ]
    sentences.append("Intervals are over prompts; another seed of training may move a point by more.")
    return sentences


def _range(line: SweepLine, metric: str, title: str) -> str:
    """From the worst to the best value of the line's setting; nothing where no member was measured."""
    name = SETTINGS[line.setting]
    rates = [(m.results[metric], m) for m in line.members if metric in m.results]
    if not rates:
        return ""
    best, worst = max(rates, key=lambda pair: pair[0]), min(rates, key=lambda pair: pair[0])
    said = (
        f"{title} goes from {worst[0]:.3f} ({name} = {worst[1].settings[line.setting]}) to {best[0]:.3f} ({name} = "
        f"{best[1].settings[line.setting]})"
    )
    ends = [m.intervals[metric] for _, m in rates if metric in m.intervals]
    if ends and max(low for low, _ in ends) <= min(high for _, high in ends):
        # Two win rates over SFT are not compared by their intervals: both are on the same prompts.
        said += (
            "; all their intervals overlap, which leaves open which value is better: look at the win rates of these "
            "policies over one another"
        )
    return said


def _order(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, int | float)
    return (not number, float(value) if number else 0.0, str(value))


def _numbered(names: Sequence[str]) -> list[str]:
    return [
        name if names.count(name) == 1 else f"{name} {names[: at + 1].count(name)}" for at, name in enumerate(names)
    ]
