"""Runs as a page shows them: names that tell them apart, one colour per policy, one dash per run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wpr.runs.responses import Response
from wpr.runs.tolerant import Problems, RunRecord, read_run


def read_runs(paths: Sequence[Path], problems: Problems) -> list[RunRecord]:
    """Read every folder that is one, give runs and policies their names and colours."""
    once: dict[Path, Path] = {}
    for path in paths:
        once.setdefault(path.resolve(), path)
    found = [read_run(path, problems) for path in once.values()]
    runs = [run for run in found if run is not None]
    _name(runs)
    return runs


def read_one(path: Path, problems: Problems) -> RunRecord | None:
    """A run by itself, whose policies have a dash each beside their colour."""
    found = read_runs([path], problems)
    for run in found:
        for policy in run.policies:
            policy.dash = policy.colour
    return found[0] if found else None


def _name(runs: list[RunRecord]) -> None:
    """Names that tell runs and policies apart, colours by policy, dashes by run."""
    folders = [run.name for run in runs]
    for run in runs:
        if folders.count(run.name) > 1:
            run.name = str(run.path)
    policies = [policy for run in runs for policy in run.policies]
    own_names = [policy.own_name for policy in policies]
    colours = {name: index for index, name in enumerate(dict.fromkeys(own_names))}
    for policy in policies:
        collides = own_names.count(policy.own_name) > 1
        policy.name = f"{policy.run.name}: {policy.own_name}" if collides else policy.own_name
        policy.colour = colours[policy.own_name]
        policy.dash = runs.index(policy.run)


def same_prompts(ours: Sequence[Response], theirs: Sequence[Response]) -> list[tuple[Response, Response]]:
    """Responses to the same prompt, by number; a number that stands for another prompt elsewhere makes no pair."""
    others = {(row.number, row.prompt_text): row for row in theirs}
    return [(row, others[row.number, row.prompt_text]) for row in ours if (row.number, row.prompt_text) in others]
