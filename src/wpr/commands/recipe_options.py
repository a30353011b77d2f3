"""Arguments of the commands that take a recipe."""

from __future__ import annotations

from typing import Annotated

import typer


def complete_recipe(incomplete: str) -> list[str]:
    """Names of shipped recipes that begin so, for the shell."""
    from wpr.config.recipe_file import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


RecipeArgument = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe file, or a shipped recipe's name.", autocompletion=complete_recipe),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change, as ppo.beta=0.1.")
]
