"""`--dry-run`: the resolved recipe and the plan, as they would be carried out on this machine."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from wpr.config.recipe import Recipe
from wpr.config.yaml_file import to_yaml
from wpr.pipeline.arguments import make_config, make_trl_config, regularizer_settings, trainer_arguments, trl_arguments
from wpr.pipeline.checks import not_ready
from wpr.pipeline.run import PlannedStage
from wpr.pipeline.stage import has_bf16, process_count
from wpr.runs.folder import RunFolder


def resolved(recipe: Recipe, stages: list[PlannedStage]) -> dict[str, Any]:
    """Every setting of the recipe, and for each stage the arguments of its trainer and its regularizer written out."""
    folder = RunFolder(recipe.folder)
    shown: dict[str, Any] = {"recipe": recipe.as_dict(), "stages": {}}
    for stage in stages:
        kind = stage.name.partition("/")[0]
        if kind == "prepare":
            shown["stages"]["prepare"] = recipe.as_dict()["prepare"]
            continue
        arguments = trainer_arguments(stage.recipe, kind, folder.stage(stage.name), process_count(), has_bf16())
        checked = arguments | _for_checking(arguments)
        config = make_config(kind, checked)  # what the trainer would refuse is reported now
        if kind == "ppo" and stage.recipe.trainer != "ppo":
            make_trl_config(stage.recipe, config, checked)
            own = regularizer_settings(stage.recipe) | {"regularizer_beta": config.beta}
            arguments = {"trainer": stage.recipe.trainer} | trl_arguments(stage.recipe, config, arguments) | own
        entry: dict[str, Any] = {"arguments": arguments}
        if kind == "ppo":
            entry["regularizer"] = stage.recipe.regularizer.resolved()
        shown["stages"][stage.name] = entry
    return shown


def _for_checking(arguments: dict[str, Any]) -> dict[str, Any]:
    """The machine that plans need not be the one that trains: half precision is not checked against its devices."""
    return {"bf16": False, "fp16": False, "report_to": "none"} if arguments.get("bf16") or arguments.get("fp16") else {}


def show_plan(recipe: Recipe, stages: list[PlannedStage], console: Console) -> None:
    """Print both, and what this machine lacks for them."""
    print(to_yaml(resolved(recipe, stages)), end="")
    folder = RunFolder(recipe.folder)
    table = Table("stage", "status", "needs", title=f"plan, in {recipe.folder}")
    for stage in stages:
        record = folder.record(stage.name)
        table.add_row(stage.name, "to do" if record is None else record.status, ", ".join(stage.needs))
    console.print(table)
    for problem in not_ready(stage.recipe for stage in stages if stage.name.startswith("ppo/")):
        console.print(f"NOT ready: {problem}", soft_wrap=True, markup=False)
