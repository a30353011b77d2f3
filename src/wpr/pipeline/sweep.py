"""Sweeps: policies trained after each other on one SFT and one reward model, and the table that compares them."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wpr.config.recipe import Recipe, check_grid
from wpr.config.typed import unknown
from wpr.config.yaml_file import parse_value
from wpr.errors import RecipeError
from wpr.pipeline.model_card import flatten

COLUMNS = {
    "before.score": "score before",
    "after.score": "score",
    "win_rate_before": "win rate",
    "after.gold": "gold",
    "gold_win_rate_before": "gold win rate",
    "after.kl": "KL",
    "after.divergence": "divergence",
    "after.entropy": "entropy",
    "after.response_length": "length",
    "after.distinct_2": "distinct-2",
    "after.self_bleu": "self-BLEU",
}
"""Results that a comparison shows, all on held-out prompts."""


def members(
    recipe: Recipe, sweep: str | None, policies: Sequence[str], grid: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Policies of a sweep with their dotted changes, by name. A combination of a grid is called ``policy+key=value``.

    sweep: of the recipe's `sweeps`. policies: instead of the sweep's own. grid: ``key=value,value,...``, added to it.
    """
    values: dict[str, list[Any]] = {}
    names = list(policies)
    if sweep is not None:
        if sweep not in recipe.sweeps:
            raise unknown(sweep, recipe.sweeps, lambda _: f"recipe {recipe.name}", kind="sweep")
        values |= recipe.sweeps[sweep].grid
        names = names or recipe.sweeps[sweep].policies
    for text in grid:
        key, equals, listed = text.partition("=")
        if not equals or not listed:
            raise RecipeError(f"--grid {text!r} must be key=value,value,..., for instance ppo.beta=0.1,0.01")
        values[key] = [parse_value(part) for part in listed.split(",")]
    check_grid(values, "the sweep's grid")
    names = names or recipe.trained_policies
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        recipe.check_policy(name)
        for combination in itertools.product(*values.values()):
            changes = dict(zip(values, combination, strict=True))
            parts = (f"{key.rpartition('.')[2]}={value}" for key, value in changes.items())
            label = re.sub(r"[^\w.=+-]", "-", "+".join([name, *parts]))  # it names a folder
            found[label] = changes
    return found


def comparison(results: Mapping[str, Mapping[str, Any]], monitors: Iterable[str] = ()) -> list[dict[str, Any]]:
    """One row per policy of a run's results, with the columns that any of them has; ``monitors``: names of more."""
    rows = []
    watched = {f"after.{name}" for name in monitors}
    for stage, found in results.items():
        if stage.startswith("ppo/"):
            flat = flatten(dict(found))
            chosen = {title: flat[name] for name, title in COLUMNS.items() if name in flat}
            others = {
                name.removeprefix("after.").replace("divergence_", "divergence, "): flat[name]
                for name in flat
                if name in watched or name.startswith(("after.pass_at_1", "after.divergence_"))
            }
            rows.append({"policy": stage.removeprefix("ppo/"), **chosen, **others})
    return rows


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A comparison as comma-separated text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dict(row) for row in rows)
    return text.getvalue()
