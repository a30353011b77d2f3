"""Reading recipes: YAML files that may build on others (`extends:`), changed by the command line (`ppo.beta=0.1`).

A recipe's `policies:` are training runs that share one SFT model and one reward model and differ in what they name:
`policies.rkl.regularizer`, `policies.rkl.ppo`, `policies.rkl.trainer`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wpr.config.merging import COMMAND_LINE, merge, merge_dotted
from wpr.config.recipe import POLICY_KEYS, Recipe, typed_recipe
from wpr.config.trainers import TRL_TRAINERS, check_trainer, is_shared
from wpr.config.typed import unknown
from wpr.config.yaml_file import parse_value, read_yaml
from wpr.errors import RecipeError
from wpr.regularizers.spec import RECOMMENDED, RegularizerSpec, has_setting

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
"""The shipped ones."""

OTHER_NAMES = {"reward.words": "scorer.words", "reward.preferred": "scorer.preferred"}
"""What users call settings of another section."""

LONGEST = 100
"""Characters of an override that errors quote."""


@dataclass(frozen=True)
class RecipeSource:
    """What a recipe was made from: the values with all changes in them, and where each key came from."""

    values: dict[str, Any]
    origins: dict[str, str]

    def where(self, key: str, policy: str | None = None) -> str:
        """Words for where ``key``, or the nearest one above it, was set; for a policy, there first."""
        own = f"policies.{policy}.{key}"
        if policy is not None and own in self.origins and not self.origins.get(key, "").startswith(COMMAND_LINE):
            return self.origins[own]
        if key not in self.origins and own.rpartition(".")[0] in self.origins:  # a default within the policy's section
            return self.origins[own.rpartition(".")[0]]
        while key not in self.origins:
            key = key.rpartition(".")[0]
        return self.origins[key]

    def recipe(self, policy: str | None = None, changes: Mapping[str, Any] | None = None) -> Recipe:
        """The typed recipe; for one policy, with what it and then ``changes`` (dotted, a sweep's) put in."""
        values = self.values
        if policy is not None:
            values = merge(values, values.get("policies", {}).get(policy) or {})
            values = merge_dotted(values, changes or {})
        swept = {key: f"the sweep's grid ({key}={value})" for key, value in (changes or {}).items()}

        def where(key: str) -> str:
            return swept.get(key) or self.where(key, policy)

        recipe = typed_recipe(values, where, check_policies=policy is None)
        recipe.source = self
        if policy is not None:
            check_trainer(recipe, self._said(policy, "trainer" in swept) | swept.keys(), where)
        return recipe

    def _said(self, policy: str, swept_trainer: bool) -> set[str]:
        """Dotted settings that are the policy's own, or those of them that the command line has put there, if its
        trainer is another than it was written for; of a recipe without policies, the command line's.
        """
        policies = self.values.get("policies") or {}
        typed = {key for key, origin in self.origins.items() if origin.startswith(COMMAND_LINE)}
        if policy not in policies:
            return typed
        parts = (policies.get(policy) or {}).items()
        own = {f"{section}.{name}" for section, part in parts if isinstance(part, Mapping) for name in part}
        return own & typed if swept_trainer or "trainer" in typed else own


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe file, or a shipped recipe by its name, with dotted ``key=value`` overrides."""
    file = _read(find_recipe(name))
    changes: dict[str, Any] = {}
    origins = dict(file.origins)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise RecipeError(f"{COMMAND_LINE}: {text!r} is no setting; write key=value, for instance ppo.beta=0.1")
        key = OTHER_NAMES.get(key.strip(), key.strip())
        changes[key] = parse_value(value)
        origins[key] = f"{COMMAND_LINE} ({text if len(text) <= LONGEST else text[:LONGEST] + '...'})"
    values = file.values
    if "regularizer" not in values:  # written out, so that changes find its parts
        values = values | {"regularizer": RegularizerSpec.parse(RECOMMENDED).given()}
    source = RecipeSource(with_changes(values, changes), origins)
    recipe = source.recipe()
    for policy in recipe.policy_names:  # an error in any of them is reported now, not hours later
        source.recipe(policy)
    return recipe


def with_changes(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values with the command line's changes in them. Those that a policy can change (`POLICY_KEYS`) go into every
    policy too, above what it says itself, but for settings that have no meaning for its regularizer or trainer.
    """
    specific = {key: value for key, value in changes.items() if key.partition(".")[0] == "policies"}
    general = {key: value for key, value in changes.items() if key not in specific}
    policies = values.get("policies")
    if not isinstance(policies, Mapping) or not any(isinstance(own, Mapping) for own in policies.values()):
        return merge_dotted(values, changes)
    merged = merge_dotted(values, _meaningful(general, values))
    late = {key: value for key, value in general.items() if key.partition(".")[0] in POLICY_KEYS}
    unused = {key for key in late if key.startswith("regularizer.") or not _is_for_all(key)}
    changed = dict(policies)
    for name, own in policies.items():
        if isinstance(own, Mapping):
            fitting = _meaningful(late, merge(merged, own))
            unused -= set(fitting)
            changed[name] = merge_dotted(own, fitting)
    if unused:
        key, trainers = min(unused), {str(merge(merged, own or {}).get("trainer", "ppo")) for own in changed.values()}
        other = f" (trainer: {', '.join(sorted(trainers))}); drop it, or set trainer={key.partition('.')[0]}"
        which = "" if _is_for_all(key) else other
        raise RecipeError(f"{COMMAND_LINE}: {key} has no meaning for any of the policies {', '.join(policies)}{which}")
    return merge_dotted(merged | {"policies": changed}, specific)


def _is_for_all(key: str) -> bool:
    """Whether a setting has a meaning for all trainers."""
    section, _, setting = key.partition(".")
    return section not in TRL_TRAINERS and (section != "ppo" or is_shared(setting))


def _meaningful(changes: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The changes, less settings that the regularizer or the trainer of ``values`` does not have."""
    trainer = changes.get("trainer", values.get("trainer") or "ppo")
    section = values.get("regularizer")
    name = changes.get("regularizer.name", section.get("name") if isinstance(section, Mapping) else None)
    known = RegularizerSpec.setting_types()

    def fits(key: str) -> bool:
        head, _, setting = key.partition(".")
        if not _is_for_all(key):
            return bool(head == trainer)
        return head != "regularizer" or setting not in known or has_setting(name or "wasserstein", setting)

    return {key: value for key, value in changes.items() if fits(key)}


def shipped_recipes() -> dict[str, Path]:
    """Names and files of the recipes in the package; those that others build on begin with ``_``."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml")) if not path.name.startswith("_")}


def find_recipe(name: str, beside: Path | None = None) -> Path:
    """The file of a recipe: a path, relative to ``beside`` or the working folder, or a shipped recipe's name."""
    candidates = [*([beside / name] if beside is not None else []), Path(name).expanduser()]
    for path in candidates:
        if path.is_file():
            return path
        if path.suffix in (".yaml", ".yml") and path.is_dir():
            raise RecipeError(f"{path} is a folder; name a recipe file")
    shipped = RECIPES / f"{name}.yaml"
    if re.fullmatch(r"[\w.-]+", name) and shipped.is_file():
        return shipped
    if name.endswith((".yaml", ".yml")) or "/" in name:
        meant = Path(name).stem in shipped_recipes()
        hint = f"the shipped recipe is {Path(name).stem}" if meant else "`wpr recipes` lists the shipped ones"
        raise RecipeError(f"there is no recipe file {name}; {hint}")
    if Path(name).is_dir():
        raise RecipeError(f"{name} is a folder; name a recipe file, or a shipped recipe (`wpr recipes` lists them)")
    raise unknown(name, shipped_recipes(), lambda _: f"{name} is not a file here", kind="recipe")


def _read(path: Path, chain: tuple[Path, ...] = ()) -> RecipeSource:
    """A file's values over those of the files that it extends."""
    if path.resolve() in [seen.resolve() for seen in chain]:
        raise RecipeError(f"{path} extends itself, through {' -> '.join(map(str, chain))}; break the circle")
    shown = path.stem if path.resolve().parent == RECIPES else str(path)
    file = read_yaml(path, shown)
    origins = {"": shown} | {key: file.where(key) for key in file.lines}
    values = dict(file.values)
    _use_own_names(values, origins)
    parent = values.pop("extends", None)
    if parent is None:
        return RecipeSource(values, origins)
    if not isinstance(parent, str):
        raise RecipeError(f"{file.where('extends')}: extends={parent!r} must be the name of a recipe")
    base = _read(find_recipe(parent, path.parent), (*chain, path))
    return RecipeSource(merge(base.values, values), base.origins | origins)


def _use_own_names(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Put settings that have another name (`OTHER_NAMES`) where they belong, with their lines."""
    for other, name in OTHER_NAMES.items():
        (section, setting), (own, _) = other.split("."), name.split(".")
        there, here = values.get(section), values.get(own)
        if not isinstance(there, Mapping) or setting not in there or not isinstance(here, Mapping | None):
            continue
        if setting in (here or {}):
            raise RecipeError(f"{origins[other]}: {other} is another name of {name}, which is set too; keep one")
        values[own] = {**(here or {}), setting: there[setting]}
        values[section] = {key: value for key, value in there.items() if key != setting}
        origins[name] = origins.pop(other)
        origins.setdefault(own, origins[name])
        if not values[section]:  # it had nothing to do with the stage
            del values[section]
