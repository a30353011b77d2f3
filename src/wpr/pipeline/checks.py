"""What can be found wrong before anything starts, so that it is not found hours later, when a stage begins."""

from __future__ import annotations

from collections.abc import Iterator

from wpr.pipeline.arguments import make_config, trainer_arguments
from wpr.pipeline.errors import RecipeError
from wpr.pipeline.folder import RunFolder
from wpr.pipeline.functions import import_function
from wpr.pipeline.models import check_model
from wpr.pipeline.ppo import make_scorer
from wpr.pipeline.recipe import Recipe
from wpr.pipeline.stage import device_arguments, has_bf16, process_count
from wpr.rewards import RewardError


def check_stage(name: str, recipe: Recipe, folder: RunFolder) -> None:
    """Make the stage's config, look for the models and functions that it names, try the sandbox if it needs one."""
    kind = name.partition("/")[0]
    if kind == "prepare":
        assert recipe.prepare is not None
        import_function(recipe.prepare.function, "prepare.function")
        return
    arguments = trainer_arguments(recipe, kind, folder.stage(name), process_count(), has_bf16())
    make_config(kind, device_arguments() | arguments)
    for setting, model in _models(recipe, kind):
        if "{prepare}" not in model:
            check_model(model, setting)
    if kind == "ppo" and recipe.evaluation.gold is not None:
        import_function(recipe.evaluation.gold, "evaluation.gold")
    if kind == "ppo" and recipe.scorer.kind != "model":
        try:
            make_scorer(recipe.scorer, None)
        except RewardError as error:
            raise RecipeError(f"scorer.kind={recipe.scorer.kind}: {error}") from None


def _models(recipe: Recipe, kind: str) -> Iterator[tuple[str, str]]:
    """Settings of the stage that name a model, and the name."""
    yield "model.name", recipe.model.name
    if kind == "ppo":
        if recipe.scorer.kind == "model" and recipe.scorer.name is not None:
            yield "scorer.name", recipe.scorer.name
        if recipe.critic != "auto":
            yield "critic", recipe.critic
        if recipe.regularizer.embeddings is not None:
            yield "regularizer.embeddings", recipe.regularizer.embeddings
