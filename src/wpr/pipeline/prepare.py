"""The prepare stage: a function that makes files which the recipe then uses as ``{prepare}/...``."""

from __future__ import annotations

import shutil
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
    found = function(partial, seed=stage.recipe.seed, **source, **settings.options)
    if settings.data is not None and not (partial / settings.data).is_file():
        raise RecipeError(
            f"prepare.data={settings.data}: {settings.function} made no such file; name one that it makes"
        )
    if stage.folder.exists():
        shutil.rmtree(stage.folder)
    partial.rename(stage.folder)
    wait_for_everyone()
    return dict(found or {})
