"""Settings over settings: what a recipe, a policy or the command line changes in what is below it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from wpr.errors import RecipeError
from wpr.regularizers.spec import RegularizerSpec, has_setting

COMMAND_LINE = "command line"
"""How errors call it."""

_FILES = ("revision", "files", "validation", "validation_files")
RESETS: dict[str, dict[str, tuple[str, ...] | None]] = {
    "regularizer": {"name": None, "preset": None},
    "data": {"format": ("source", *_FILES, "columns"), "source": _FILES},
    "model": {"name": ("revision",)},
    "scorer": {"kind": ("function", "words", "preferred", "grade", "spelling", "placement")},
}
"""Settings that say what a thing is, by section, and those that belonged to the old one and go with it (None: all)."""


def without_old(section: str, below: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """A section as it was, less what has no meaning for what ``top`` makes of it."""
    kept = dict(below)
    for key, gone in RESETS.get(section, {}).items():
        if key in top and top[key] != below.get(key):
            kept = {} if gone is None else {name: value for name, value in kept.items() if name not in gone}
    return kept


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """``top`` over ``base``, section by section. Another regularizer, dataset or model takes nothing of the old one's
    own settings with it: see `RESETS`.
    """
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = merge(without_old(key, below, value), value)
        elif key == "regularizer" and isinstance(below, list) and isinstance(value, Mapping) and _changes_parts(value):
            merged[key] = _merge_sum(below, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _merge_sum(parts: list[Any], settings: Mapping[str, Any]) -> list[Any]:
    """The parts of a sum, each setting in the one that has it."""
    merged = [dict(part) for part in parts if isinstance(part, Mapping)]
    for name, value in settings.items():
        having = [part for part in merged if has_setting(part.get("name", "wasserstein"), name)]
        if len(having) != 1:
            raise RecipeError(
                f"regularizer.{name} is set, but regularizer is a list (a sum), of which {len(having)} parts have it: "
                "which one is meant? Write the whole list, or name another regularizer with regularizer.name"
            )
        having[0][name] = copy.deepcopy(value)
    return merged


def _changes_parts(settings: Mapping[str, Any]) -> bool:
    """Whether they change a regularizer, and name none. A setting that there is not is no change: the error is told by
    who reads it.
    """
    known = RegularizerSpec.setting_types().keys()
    return bool(settings) and settings.keys() <= known and not RESETS["regularizer"].keys() & settings.keys()


def merge_dotted(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted changes, taken together, over nested settings."""
    top: dict[str, Any] = {}
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = top
        for section in sections:
            below = place.setdefault(section, {})
            if not isinstance(below, dict):
                raise _set_twice(key, section)
            place = below
        if value is not None and isinstance(place.get(last), dict):  # null takes the section out, parts and all
            raise _set_twice(f"{key}.{next(iter(place[last]))}", last)
        place[last] = value
    return merge(values, top)


def _set_twice(key: str, section: str) -> RecipeError:
    return RecipeError(f"{COMMAND_LINE}: {key} is set, and so is the whole of {section}; keep one of them")
