"""Settings from plain values: names checked against a dataclass, values against the types it declares."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union

from wpr.data.rows import shown
from wpr.errors import RecipeError

Where = Callable[[str], str]
"""From a dotted key to the words that say where it was set."""


def unknown(key: str, known: Iterable[str], where: Where, section: str = "", kind: str = "setting") -> RecipeError:
    """The error for a key that nobody knows, with the known one that is spelled most like it; ``kind``: what it is."""
    names = list(known)
    bare = key.rpartition(".")[2]
    close = difflib.get_close_matches(bare, names, 1)
    if close:
        hint = f"did you mean {section + '.' if section else ''}{close[0]}?"
    else:
        hint = f"known are {', '.join(names)}" if len(names) <= 30 else "see docs/recipes.md"
    if not names:
        hint = "there are none"
    return RecipeError(f"{where(key)}: unknown {kind} {key}; {hint}")


def check_fields(
    kind: type, values: Mapping[str, Any], section: str, where: Where, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """``values`` with names and types checked against the fields of ``kind`` (and ``extra`` names with their types)."""
    hints = field_types(kind) | dict(extra or {})
    checked = {}
    for name, value in values.items():
        key = f"{section}.{name}" if section else str(name)
        if name not in hints:
            raise unknown(key, hints, where, section)
        checked[name] = convert(value, hints[name], key, where)
    return checked


def field_types(kind: type) -> dict[str, Any]:
    """Names and types of the fields that a dataclass is made with; or of its settings, where it says what they are."""
    if hasattr(kind, "setting_types"):
        return dict(kind.setting_types())
    hints = _hints(kind)
    return {setting.name: hints.get(setting.name, Any) for setting in dataclasses.fields(kind) if setting.init}


def _hints(kind: type) -> dict[str, Any]:
    """Type hints, read one by one where a class names a type that only type checkers import."""
    try:
        return typing.get_type_hints(kind)
    except NameError:
        pass
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        space = vars(sys.modules[base.__module__])
        for name, hint in inspect.get_annotations(base).items():
            try:
                found[name] = eval(hint, space) if isinstance(hint, str) else hint
            except NameError:
                found[name] = Any
    return found


def build(kind: type, values: Any, section: str, where: Where) -> Any:
    """An instance of the dataclass ``kind``; what its own checks refuse is reported with the place."""
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where(section)}: {section} is {values!r}; it takes settings, `{section}.name: value`")
    checked = check_fields(kind, values, section, where)
    missing = [
        setting.name
        for setting in dataclasses.fields(kind)
        if setting.default is dataclasses.MISSING
        and setting.default_factory is dataclasses.MISSING
        and setting.name not in checked
    ]
    if missing:
        raise RecipeError(f"{where(section)}: {section}.{missing[0]} is missing; every recipe needs one")
    try:
        return getattr(kind, "from_settings", kind)(**checked)
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{where(section)}: {section}: {error}") from None


def _summed(kind: Any, values: list[Any], section: str, where: Where) -> Any:
    """A list of settings, where ``kind`` has sums."""
    parts = [build(kind, part, f"{section}.{number}", where) for number, part in enumerate(values)]
    try:
        return kind.sum_of(parts)
    except ValueError as error:
        raise RecipeError(f"{where(section)}: {section}: {error}") from None


def convert(value: Any, hint: Any, key: str, where: Where) -> Any:
    """``value`` as the type ``hint``, or an error that names both. Whole numbers serve as floats, no more is bent."""
    fits, result = _fit(value, hint, key, where)
    if not fits:
        raise RecipeError(f"{where(key)}: {key}={shown(value, 200)} must be {_words(hint)}")
    return result


def _fit(value: Any, hint: Any, key: str, where: Where) -> tuple[bool, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, typing.TypeVar | str):
        return True, value
    if origin in (Union, types.UnionType):
        for part in sorted(arguments, key=lambda part: part is float):  # an int stays one where both are allowed
            fits, result = _fit(value, part, key, where)
            if fits:
                return True, result
        return False, value
    if origin is Literal:
        return value in arguments, value
    if origin is typing.Annotated:
        return _fit(value, arguments[0], key, where)
    if hint is None or hint is type(None):
        return value is None, value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, list) and hasattr(hint, "sum_of"):
            return True, _summed(hint, value, key, where)
        return isinstance(value, Mapping), build(hint, value, key, where) if isinstance(value, Mapping) else value
    if hint is bool:
        return isinstance(value, bool), value
    if hint is int:
        whole = isinstance(value, float) and value.is_integer()
        return (isinstance(value, int) and not isinstance(value, bool)) or whole, int(value) if whole else value
    if hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number, float(value) if number else value
    if hint is str:
        return isinstance(value, str), value
    if origin in (list, tuple) or hint in (list, tuple):
        if not isinstance(value, list | tuple):
            return False, value
        inner = arguments[0] if arguments else Any
        return True, [convert(part, inner, f"{key}.{index}", where) for index, part in enumerate(value)]
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            return False, value
        inner = arguments[1] if len(arguments) == 2 else Any
        return True, {str(name): convert(part, inner, f"{key}.{name}", where) for name, part in value.items()}
    return True, value  # enumerations and the like: their own class checks them


def _words(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(part) for part in arguments))
    if origin is Literal:
        return " or ".join(repr(part) for part in arguments)
    if origin in (list, tuple) or hint in (list, tuple):
        return f"a list of {_words(arguments[0]).removeprefix('a ')}s" if arguments else "a list"
    if origin is dict or hint is dict or dataclasses.is_dataclass(hint):
        return "settings (`name: value`)"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))
