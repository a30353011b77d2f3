"""Reference of recipes: every setting of every section, from the typed classes that recipes are read into."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import types
import typing
from typing import Any

from docs.extension.docstrings import as_markdown, descriptions, paragraphs
from wpr.config.monitors import MonitorSettings
from wpr.config.recipe import (
    EvaluationSettings,
    LoraSettings,
    ModelSettings,
    PrepareSettings,
    Recipe,
    ScorerSettings,
    SweepSettings,
)
from wpr.config.trainers import FIXED, PPO_ONLY, REGULARIZER_SETTINGS, RENAMED, config_class
from wpr.data import DataSettings, SplitSettings
from wpr.regularizers import PRESETS, WassersteinSettings
from wpr.regularizers.registry import ALIASES, REGULARIZERS
from wpr.regularizers.spec import GeometrySpec

SECTIONS: dict[str, tuple[type, str]] = {
    "model": (ModelSettings, ""),
    "model.lora": (LoraSettings, ""),
    "data": (DataSettings, "Formats and examples: [Data](../data.md)."),
    "split": (SplitSettings, ""),
    "prepare": (PrepareSettings, ""),
    "scorer": (ScorerSettings, "Rules for wording: [Rewards](../rewards.md)."),
    "evaluation": (EvaluationSettings, ""),
    "evaluation.monitors.NAME": (MonitorSettings, "Also `evaluation.gold`: [Evaluation](../evaluation.md)."),
    "sweeps.NAME": (SweepSettings, ""),
}
"""Sections that have a class of their own."""

HEADER = ("| setting | value | what it is |", "|---|---|---|")

ELSEWHERE = {
    "model": "`model`",
    "data": "`data`",
    "split": "`split`",
    "prepare": "`prepare`",
    "scorer": "`scorer`",
    "evaluation": "`evaluation`",
    "regularizer": "`regularizer`",
    "sweeps": "`sweeps.NAME`",
    "ppo": "trainer",
    "sft": "trainer",
    "reward": "trainer",
    "grpo": "trainer",
    "rloo": "trainer",
}


def field_texts(kind: type) -> dict[str, str]:
    """What is said of each field of a dataclass: as its help, in the class's docstring, or in a string below it."""
    fields = [field.name for field in dataclasses.fields(kind)]
    texts: dict[str, str] = {}
    for paragraph in paragraphs(kind.__doc__ or ""):
        for names, text in descriptions(paragraph, fields) or []:
            texts |= dict.fromkeys(names, text)
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            texts[ast.unparse(field.target)] = str(below.value.value)
    return texts | {f.name: f.metadata["help"] for f in dataclasses.fields(kind) if f.metadata.get("help")}


def type_text(hint: Any) -> str:
    """A type as a reader of recipes says it."""
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(type_text(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) in (list, tuple):
        inner = typing.get_args(hint)
        return f"list of {type_text(inner[0])}" if inner else "list"
    if typing.get_origin(hint) is dict or hint is dict:
        return "settings"
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(hint, "settings" if dataclasses.is_dataclass(hint) else getattr(hint, "__name__", str(hint)))


def default_text(field: dataclasses.Field[Any]) -> str:
    """A default as YAML has it."""
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "required"
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if value == "":
        return ""
    if dataclasses.is_dataclass(value):
        return ""
    return f"`{getattr(value, 'value', value)}`"  # of an enumeration, its value


def value_text(field: dataclasses.Field[Any], hint: Any) -> str:
    """What a setting may be, and what it is where it is left out."""
    default = default_text(field)
    text = type_text(hint)
    return f"{text}; required" if default == "required" else f"{text}; default {default}" if default else text


def table(kind: type, section: str, names: list[str] | None = None, first_sentence: bool = False) -> str:
    """The settings of a class, or those of them that are named."""
    texts, hints = field_texts(kind), typing.get_type_hints(kind)
    lines = [*HEADER]
    for field in dataclasses.fields(kind):
        if not field.init or (names is not None and field.name not in names):
            continue
        text = texts.get(field.name, "")
        if first_sentence:
            text = re.split(r"(?<=[a-z)`]\.)\s", " ".join(text.split()))[0]
        shown = f"{section}.{field.name}" if section else field.name
        lines.append(f"| `{shown}` | {value_text(field, hints[field.name])} | {as_markdown(text)} |")
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """Settings of recipes, and those of the trainers within them."""
    return {"reference/settings.md": _settings(), "reference/trainer-settings.md": _trainer_settings()}


def _settings() -> str:
    parts = [
        "# Recipe settings",
        "Every setting of a recipe, by section, made of the classes that recipes are read into. "
        "[Recipes](../recipes.md) says how they work together; `wpr run RECIPE --dry-run` prints all of them as a"
        " run would use them. The settings of `sft`, `reward`, `ppo`, `grpo` and `rloo` have [a page of their "
        "own](trainer-settings.md).",
        "## Top level",
        _top_level(),
    ]
    for section, (kind, more) in SECTIONS.items():
        lead = as_markdown(paragraphs(kind.__doc__ or "")[0])
        parts += [f"## `{section}`", f"{lead} {more}".strip(), table(kind, section)]
    return "\n\n".join([*parts, *_regularizer()]) + "\n"


def _top_level() -> str:
    """The recipe's own settings; sections point to theirs."""
    texts = field_texts(Recipe)
    lines = [*HEADER]
    hints = typing.get_type_hints(Recipe, localns={"RecipeSource": object})
    extra = {"extends": "A recipe that this one builds on: a file, or a shipped recipe's name."}
    lines += [f"| `{name}` | text | {text} |" for name, text in extra.items()]
    for field in dataclasses.fields(Recipe):
        if not field.init:
            continue
        text = as_markdown(texts.get(field.name, ""))
        if field.name in ELSEWHERE:
            where = ELSEWHERE[field.name]
            heading = where.strip("`").lower().replace(".", "")
            link = "[there](trainer-settings.md)" if where == "trainer" else f"[below](#{heading})"
            text = f"{text} Its settings are {link}.".strip()
        lines.append(f"| `{field.name}` | {value_text(field, hints[field.name])} | {text} |")
    return "\n".join(lines)


def _regularizer() -> list[str]:
    names = ", ".join(f"`{name}`" for name in REGULARIZERS)
    presets = ", ".join(f"`{name}`" for name in PRESETS)
    aliases = ", ".join(f"`{alias}` for `{name}`" for alias, name in ALIASES.items())
    solver = ["| setting | value | " + " | ".join(f"`{name}`" for name in PRESETS) + " | |"]
    solver.append("|---" * (len(PRESETS) + 3) + "|")
    texts, hints = field_texts(WassersteinSettings), typing.get_type_hints(WassersteinSettings)
    for field in dataclasses.fields(WassersteinSettings):
        values = " | ".join(f"`{getattr(preset, field.name)}`" for preset in PRESETS.values())
        text = as_markdown(texts[field.name])
        solver.append(f"| `regularizer.{field.name}` | {type_text(hints[field.name])} | {values} | {text} |")
    return [
        "## `regularizer`",
        f"`name` is one of {names}, a preset of `wasserstein` ({presets}), or another name ({aliases}). A list is "
        "a sum, whose parts have a `weight`. f-divergences take `estimator` (`gradient`, or `paper`) and `gauge`;"
        " `alpha` takes `alpha`. [Numerics](../numerics.md) has the formulas.",
        "The costs between tokens:",
        table(GeometrySpec, "regularizer"),
        "The transport penalty, with what each preset sets:",
        "\n".join(solver),
    ]


def _trainer_settings() -> str:
    from transformers import TrainingArguments

    ppo = config_class("ppo")
    own = list(inspect.get_annotations(ppo))
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    parts = [
        "# Trainer settings",
        "Sections `sft`, `reward` and `ppo` of a recipe hold the fields of `trl.SFTConfig`, `trl.RewardConfig` "
        "and `wpr.PPOConfig`, and `batch_size`, the rows of an optimizer step over all devices. `grpo` and `rloo`"
        " hold what `trl.GRPOConfig` and `trl.RLOOConfig` have beside those. What comes from TRL and transformers"
        " stands here as the installed versions have it, each with its first sentence.",
        "## `ppo`",
        "Settings that GRPO and RLOO do not take: " + ", ".join(f"`{name}`" for name in PPO_ONLY) + ".",
        table(ppo, "ppo", own),
    ]
    left_out = {*RENAMED, *FIXED, *own, *inherited}
    for section in ("grpo", "rloo"):
        kind = config_class(section)
        names = [field.name for field in dataclasses.fields(kind) if field.name not in left_out]
        more = " ".join(
            f"`{section}.{name}` is {' or '.join(f'`{value}`' for value in values)}."
            for name, values in REGULARIZER_SETTINGS.items()
        )
        parts += [f"## `{section}`", f"{more} The rest is TRL's.", table(kind, section, names, first_sentence=True)]
    for section in ("sft", "reward"):
        kind = config_class(section)
        names = [field.name for field in dataclasses.fields(kind) if field.name not in inherited]
        parts += [f"## `{section}`", table(kind, section, names, first_sentence=True)]
    parts += [
        "## In all of them",
        "What transformers' `TrainingArguments` have, in `sft`, `reward` and `ppo`.",
        table(TrainingArguments, "", None, first_sentence=True),
    ]
    return "\n\n".join(parts) + "\n"
