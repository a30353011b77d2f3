"""Functions that a recipe names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from wpr.errors import RecipeError


def import_function(name: str, setting: str) -> Callable[..., Any]:
    """``package.module:function``, imported."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise RecipeError(f"{setting}={name!r} must be package.module:function")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RecipeError(
            f"{setting}={name!r} cannot be imported: {error}; install the package, or run where it can be found"
        ) from None
    if not callable(found):
        raise RecipeError(f"{setting}={name!r} is no function; name one, or a class with __call__")
    return found  # type: ignore[no-any-return]
