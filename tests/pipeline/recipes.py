"""Recipes for tests, written where the test runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from wpr.config.recipe_file import load_recipe
from wpr.errors import RecipeError

SMALL = "name: small\nmodel: {name: m}\ndata: {format: hh}\nreward: {}\n"
"""Four lines: what every recipe needs, and a reward."""


def write(text: str, name: str = "mine.yaml") -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return name


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(text), list(overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message
