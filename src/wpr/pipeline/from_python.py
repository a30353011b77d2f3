"""Running a recipe from Python: ``wpr.run("tiny", ppo={"beta": 0.1})`` does what ``wpr run tiny ppo.beta=0.1`` does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from wpr.config.merging import COMMAND_LINE
from wpr.config.recipe import Recipe
from wpr.config.recipe_file import load_recipe
from wpr.errors import OptionError, RecipeError
from wpr.pipeline.doctor import space_note
from wpr.pipeline.log import no_bars_in_files
from wpr.pipeline.results import show_results
from wpr.pipeline.run import OnChange, PlannedStage, Run, plan
from wpr.report.loaded_run import LoadedRun, load_run


def run(
    recipe: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    policies: str | Sequence[str] | None = None,
    output: str | Path | None = None,
    on_change: OnChange = "refuse",
    quiet: bool = False,
    **sections: Any,
) -> LoadedRun:
    """Run all stages of a recipe and return the run. Stages that are done are skipped; an interrupted one resumes.

    Args:
        recipe: A shipped recipe's name, or a recipe file.
        overrides: Settings to change by their dotted names: ``{"ppo.beta": 0.1}``.
        policies: Which policies are trained; None: those that the recipe trains.
        output: The run's folder; None: the recipe's, ``runs/NAME``.
        on_change: What to do with a stage in the folder that was made by other settings: ``"refuse"``, ``"restart"`` it
            (the old one is moved to ``old/``) or ``"keep"`` it.
        quiet: Print nothing.
        **sections: Settings to change by section: ``ppo={"beta": 0.1}, seed=1``.
    """
    if on_change not in get_args(OnChange):
        raise OptionError(f"on_change={on_change!r} must be one of {', '.join(get_args(OnChange))}")
    changes = dict(_dotted(sections)) | dict(overrides or {}) | ({} if output is None else {"output": str(output)})
    try:
        loaded = load_recipe(str(recipe), [f"{key}={_as_yaml(key, value)}" for key, value in changes.items()])
        chosen = [policies] if isinstance(policies, str) else None if policies is None else list(policies)
        for policy in chosen or []:
            loaded.check_policy(policy)
    except RecipeError as error:
        raise RecipeError(str(error).replace(COMMAND_LINE, "wpr.run")) from None
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # functions that a recipe names may lie here, as for the command
    no_bars_in_files()
    with contextlib.ExitStack() as silence:
        if quiet:  # what libraries print, too
            silence.enter_context(contextlib.redirect_stdout(io.StringIO()))
            silence.enter_context(contextlib.redirect_stderr(io.StringIO()))
        carry_out(loaded, plan(loaded, chosen), on_change, print, Console(width=160, force_jupyter=False))
    return load_run(loaded.folder)


def carry_out(
    recipe: Recipe,
    stages: list[PlannedStage],
    on_change: OnChange,
    say: Callable[[str], None],
    console: Console,
    only: set[str] | None = None,
) -> Path | None:
    """Bring the stages to done, ``only`` these kinds if given, and print what came out; the run's folder on the process
    that wrote it.
    """
    work = Run(recipe, on_change, say)
    if (warning := space_note(recipe, stages)) is not None:
        work.say(warning)
    results = work.execute(stages, only)
    show_results(results, work.folder.path, console)
    return work.folder.path if work.folder.writes else None


def _dotted(sections: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their dotted names."""
    for key, value in sections.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _as_yaml(key: str, value: Any) -> str:
    """A value as the command line would have it: JSON is YAML."""
    try:
        return json.dumps(value, allow_nan=False, default=_plain)
    except (TypeError, ValueError):
        raise RecipeError(
            f"wpr.run: {key}={value!r} cannot stand in a recipe; give numbers, texts, lists and dicts"
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        return list(value)
    raise TypeError
