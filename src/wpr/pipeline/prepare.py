"""The prepare stage: a function that makes files which the recipe then uses as ``{prepare}/...``."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from wpr.config.functions import import_function
from wpr.errors import RecipeError
from wpr.pipeline.stage import Stage, is_main_process, wait_for_everyone


def prepare(stage: Stage) -> dict[str, Any]:
    """Call the recipe's function with a new folder, which takes its place once the function is through."""
    settings = stage.recipe.prepare
    assert settings is not None
    function = import_function(settings.function, "prepare.function")
    if not is_main_process():
        wait_for_everyone()
        return {}
    partial = stage.folder.with_name("prepare.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    source = {} if settings.data is None else {"source": stage.recipe.data.source}
    given = {"seed": stage.recipe.seed} | source
    check_options(function, settings.options, given)
    found = function(partial, **given, **settings.options)
    if settings.data is not None and not (partial / settings.data).is_file():
        raise RecipeError(
            f"prepare.data={settings.data}: {settings.function} made no such file; name one that it makes"
        )
    if stage.folder.exists():
        shutil.rmtree(stage.folder)
    partial.rename(stage.folder)
    wait_for_everyone()
    return dict(found or {})


def check_options(function: Callable[..., Any], options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse options that the function does not take, or that it is ``given`` anyway."""
    parameters = inspect.signature(function).parameters.values()
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [one.name for one in list(parameters)[1:] if one.kind in by_name and one.name not in given]
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    for name in options:
        if name in given or not (takes_all or name in known):
            raise RecipeError(
                f"prepare.options.{name} is no option of {function.__module__}:{function.__name__}; it has "
                f"{', '.join(known) or 'none'}"
            )
