"""`wpr recipes` and `wpr doctor`: which recipes there are, and what one needs of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from wpr.commands.output import out
from wpr.commands.run_recipe import Policies, SweepArguments, complete_recipe

if TYPE_CHECKING:
    from wpr.config.recipe import Recipe
    from wpr.pipeline.run import PlannedStage

Shown = Annotated[str | None, typer.Argument(help="The recipe to show.", autocompletion=complete_recipe)]
Examined = Annotated[
    str | None, typer.Argument(help="A recipe whose needs to estimate.", autocompletion=complete_recipe)
]

LearningRates = Annotated[
    Path | None, typer.Option(help="SVG file to draw the learning rate of every step of the stages to.")
]


def recipes(name: Shown = None) -> None:
    """List the shipped recipes, or show one with its comments.

    [bold]Examples[/bold]: wpr recipes   |   wpr recipes tldr-gemma-2b > mine.yaml
    """
    from wpr.config.recipe_file import find_recipe, shipped_recipes
    from wpr.config.yaml_file import read_yaml

    if name is not None:
        typer.echo(find_recipe(name).read_text(encoding="utf-8"), nl=False)
        return
    table = Table("recipe", "what it is", box=None)
    for found, path in shipped_recipes().items():
        table.add_row(found, str(read_yaml(path).values.get("description", "")))
    out.print(table)


def doctor(
    recipe: Examined = None,
    arguments: SweepArguments = None,
    policy: Policies = None,
    learning_rates: LearningRates = None,
) -> None:
    """Say what is installed, which devices are usable, and what a recipe or one of its sweeps needs (memory, disk).

    [bold]Examples[/bold]: wpr doctor   |   wpr doctor tldr-gemma-7b   |   wpr doctor tldr-gemma-2b divergences

    [bold]Example[/bold]: wpr doctor tldr-gemma-2b --learning-rates rates.svg
    """
    from wpr.config.recipe_file import find_recipe, load_recipe
    from wpr.pipeline.machine_view import examine

    if recipe is not None:
        find_recipe(recipe)
    examine(out)
    if recipe is None:
        return
    from wpr.pipeline.doctor import examine_recipe
    from wpr.pipeline.run import plan
    from wpr.pipeline.sweep import members

    given = list(arguments or [])
    sweep = given.pop(0) if given and "=" not in given[0] else None
    loaded, stages = load_recipe(recipe, given), None
    if sweep is not None or policy:
        changes = members(loaded, sweep, policy or [], [])
        stages = plan(loaded, list(changes), changes)
    examine_recipe(loaded, out, stages)
    if learning_rates is not None:
        _draw_rates(loaded, plan(loaded) if stages is None else stages, learning_rates)


def _draw_rates(recipe: Recipe, stages: list[PlannedStage], path: Path) -> None:
    """Draw what the stages' learning rates will be."""
    from wpr.atomic_io import write_atomically
    from wpr.errors import RecipeError
    from wpr.pipeline.schedules import schedule_figure
    from wpr.report import draw_figure

    figure = schedule_figure(recipe.name, stages)
    if figure is None:
        raise RecipeError(
            f"recipe {recipe.name}: the number of its steps is known only of the hub's data, or where max_steps "
            "is set; set it, as with sft.max_steps=100"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, draw_figure(figure))
    out.print(f"learning rates: {path}", soft_wrap=True, highlight=False)
