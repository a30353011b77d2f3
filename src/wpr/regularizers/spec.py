"""Regularizers by name and settings: one grammar for recipes, command lines and Python.

    reverse-kl                         a name of `registry`, or an alias (rkl)
    semantic, unbalanced, paper        the presets of the Wasserstein penalty are names too
    semantic:lam=20,neighbours=all     a name with settings, on a command line
    {name: semantic, lam: 20}          the same in a recipe
    reverse-kl + 4*semantic:lam=20     a sum, see `sums`
    [{name: reverse-kl}, {name: semantic, weight: 4}]    the same in a recipe

A setting that is not given is left at its preset's or class's default; the transform of embeddings is the preset's
too. The paper's k1 and k2 are lowered to a smaller vocabulary, and a note says so, unless they were asked for by
number: then the vocabulary is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from wpr.regularizers.f_divergences import Alpha, Estimator
from wpr.regularizers.registry import ALIASES, REGULARIZERS, make_regularizer
from wpr.regularizers.regularizer import Regularizer
from wpr.regularizers.sums import Sum, check_weight
from wpr.regularizers.wasserstein import Wasserstein
from wpr.regularizers.wasserstein_settings import (
    PRESETS,
    TRANSFORMS,
    Preset,
    WassersteinSettings,
    refuse_unknown_settings,
)
from wpr.transport.geometry import NEIGHBOURS, TokenGeometry, check_power
from wpr.transport.transforms import NONE, steps_of

_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?"
_PLUS = re.compile(rf"\s*\+\s*(?=[A-Za-z]|{_NUMBER}\s*\*)")
_WEIGHTED = re.compile(rf"({_NUMBER})\s*\*\s*(.*)")

OUTPUT = "output"
"""What `GeometrySpec.embeddings` calls the reference's output embeddings; a folder of that name is ``./output``."""

RECOMMENDED = "reverse-kl + 4*semantic"
"""The regularizer where none is named: KL knows how likely a token is, transport what it means. docs/numerics.md,
section 11, has the measurements.
"""

SIDE_BY_SIDE = ("reverse-kl", "squared-hellinger", "paper", "unbalanced", "semantic")
"""What is compared where nothing else is asked for: the usual regularizer, the control without geometry, the paper's
form, the same made well-posed, and ours.
"""


@dataclass(frozen=True)
class GeometrySpec:
    """How costs between tokens come about.

    metric: cost of two tokens, ``euclidean`` or ``cosine``, of their embeddings.
    transform: what is done to embeddings first, such as ``centre/unit``: see `wpr.transport.transforms`. In a spec the
        default is the preset's, ``centre/unit`` for ``semantic``.
    power: costs are the metric to this power, from 0.1 to 4.
    neighbours: the paper's k1, or ``all``.
    scale: unit of cost: ``median-nn``, ``none``, or a number.
    embeddings: whose embeddings give the costs. None: the reference's input embeddings; ``output``: its output
        embeddings; or a model (folder or hub name), a language model or an encoder: see `wpr.other_embeddings` for one
        of another tokenizer.
    """

    metric: Literal["euclidean", "cosine"] = "euclidean"
    transform: str = NONE
    power: float = 1.0
    neighbours: int | Literal["all"] = NEIGHBOURS
    scale: float | Literal["median-nn", "none"] = "median-nn"
    embeddings: str | None = None

    def __post_init__(self) -> None:
        steps_of(self.transform)
        check_power(self.power)
        if isinstance(self.neighbours, int) and self.neighbours < 1:
            raise ValueError(f"neighbours={self.neighbours} must be 1 or more, or all")
        if isinstance(self.scale, str) and self.scale not in ("median-nn", "none"):
            raise ValueError(f"scale={self.scale!r} must be median-nn, none or a number")
        if not isinstance(self.scale, str) and not self.scale > 0:
            raise ValueError(f"scale={self.scale} must be a positive number, median-nn or none")

    @property
    def other_model(self) -> str | None:
        """The model whose embeddings are used, where it is not the reference."""
        return None if self.embeddings == OUTPUT else self.embeddings

    def options(self) -> dict[str, Any]:
        """Those of `TokenGeometry.from_embeddings`."""
        return {
            "metric": self.metric,
            "transform": self.transform,
            "power": self.power,
            "neighbours": None if self.neighbours == "all" else self.neighbours,
            "scale": None if self.scale == "none" else self.scale,
        }


def _types(kind: type) -> dict[str, Any]:
    return {name: hint | None for name, hint in typing.get_type_hints(kind).items()}


GEOMETRY = _types(GeometrySpec)
SOLVER = _types(WassersteinSettings)
F_DIVERGENCE: dict[str, Any] = {"estimator": Estimator | None, "alpha": float | None, "gauge": SOLVER["gauge"]}


@dataclass(frozen=True)
class RegularizerSpec:
    """Which regularizer, and what of it was set.

    name: of `registry`, no alias. preset: of ``wasserstein``, else None.
    geometry: settings of `GeometrySpec` that were given.
    weight: in a sum. parts: of a sum, whose name is ``sum``; it has no settings of its own.
    overrides: other settings that were given: of the Wasserstein penalty those of `WassersteinSettings`; of
        f-divergences ``estimator`` (``gradient``, or ``paper`` for the paper's penalty f(u)/u) and ``gauge``; ``alpha``
        of ``alpha``.
    """

    name: str = "wasserstein"
    preset: Preset | None = "semantic"
    geometry: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    parts: tuple[RegularizerSpec, ...] = ()

    @classmethod
    def from_plain(cls, values: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> RegularizerSpec:
        """From what `given` returned: settings, or a list of them for a sum."""
        return cls.from_settings(**values) if isinstance(values, Mapping) else cls.sum_of(map(cls.from_plain, values))

    @classmethod
    def from_record(cls, values: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> RegularizerSpec:
        """From what `resolved` returned, now or in an older release, in which ``semantic`` was what ``unbalanced`` is
        and had no transform. What is at its default counts as not set.
        """
        if not isinstance(values, Mapping):
            return cls.sum_of(map(cls.from_record, values))
        if values.get("preset") == "semantic" and "transform" not in values:
            values = {**values, "preset": "unbalanced"}
        if values.get("preset") in PRESETS:
            defaults = cls(preset=values["preset"]).resolved()
            values = {name: value for name, value in values.items() if name == "preset" or value != defaults.get(name)}
        return cls.from_settings(**values)

    @classmethod
    def sum_of(cls, parts: Iterable[RegularizerSpec]) -> RegularizerSpec:
        """A sum. Parts with a geometry must agree on it and on k2: they are measured on one support."""
        listed = tuple(parts)
        if not listed:
            raise ValueError("a sum of nothing; list at least one regularizer")
        first = next((part for part in listed if part.is_wasserstein), None)
        for part in listed:
            if part.parts:
                raise ValueError("a sum within a sum; list all parts side by side")
            if first is not None and part.is_wasserstein:
                _check_one_support(first, part)
        return cls("sum", None, parts=listed)

    @classmethod
    def from_settings(
        cls, name: str = "wasserstein", preset: Preset | None = None, weight: float | None = None, **settings: Any
    ) -> RegularizerSpec:
        """From flat settings, as a recipe has them; None leaves one at its default."""
        key = "wasserstein" if name in PRESETS else ALIASES.get(name, name)
        if key not in REGULARIZERS:
            make_regularizer(name)  # raises, with the nearest name
        known = cls.setting_types()
        refuse_unknown_settings(settings, known)
        given = {setting: value for setting, value in settings.items() if value is not None}
        for setting, value in [*given.items(), *([("preset", preset)] if preset is not None else [])]:
            if not has_setting(name, setting):
                raise ValueError(f"{setting}={value!r} has no meaning for {name}; leave it out")
        if key == "wasserstein":
            preset = typing.cast(Preset, name) if name in PRESETS else preset or "semantic"
        geometry = {setting: value for setting, value in given.items() if setting in GEOMETRY}
        if weight is not None:
            check_weight(weight, name)
        spec = cls(key, preset, geometry, {k: v for k, v in given.items() if k not in GEOMETRY}, weight or 1.0)
        spec.resolved()  # checks the values
        if key != "wasserstein":
            make_regularizer(key, **spec.overrides)
        return spec

    @classmethod
    def parse(cls, text: str) -> RegularizerSpec:
        """``NAME`` or ``NAME:key=value,...``, or a sum of these, ``NAME + WEIGHT*NAME``."""
        if len(terms := _PLUS.split(text)) > 1:
            return cls.sum_of(cls.parse(term) for term in terms)
        weighted = _WEIGHTED.fullmatch(text.strip())
        weight, text = (float(weighted[1]), weighted[2]) if weighted else (None, text.strip())
        name, _, listed = text.partition(":")
        if name not in names():
            close = difflib.get_close_matches(name.lower(), names(), 1)
            hint = f" did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"there is no regularizer {name!r};{hint} use one of {', '.join(names())}, as in paper:lam=50"
            )
        values: dict[str, Any] = {}
        known = cls.setting_types()
        for part in filter(None, listed.split(",")):
            key, equals, value = part.partition("=")
            if not equals or key not in known or key == "name":
                raise ValueError(
                    f"{part!r} of {text!r} is no setting of a regularizer; write key=value with one of "
                    f"{', '.join(one for one in known if one != 'name')}"
                )
            values[key] = from_text(value, known[key], key)
        if weight is not None and "weight" in values:
            raise ValueError(f"{text!r} has the weights {weight:g} and {values['weight']:g}; keep one of them")
        return cls.from_settings(name, **{"weight": weight} | values)

    @staticmethod
    def setting_types() -> dict[str, Any]:
        """Names and types of everything that `from_settings` takes."""
        return {"name": str, "preset": Preset | None, **GEOMETRY, **SOLVER, **F_DIVERGENCE, "weight": float | None}

    @property
    def transport(self) -> RegularizerSpec | None:
        """The part with a geometry, of a sum the first one; None where there is none."""
        if self.parts:
            return next((part for part in self.parts if part.transport is not None), None)
        return self if self.name == "wasserstein" else None

    @property
    def is_wasserstein(self) -> bool:
        """Whether it has a geometry."""
        return self.transport is not None

    @property
    def costs(self) -> GeometrySpec:
        """The geometry, defaults written out."""
        given = self.transport or self
        return GeometrySpec(**{"transform": TRANSFORMS[given.preset or "semantic"], **given.geometry})

    def settings(self) -> WassersteinSettings:
        """Of the Wasserstein penalty, defaults written out."""
        return replace(PRESETS[self.preset or "semantic"], **self.overrides)

    def given(self) -> Any:
        """Flat settings that `from_plain` makes the same of; a list of them for a sum."""
        if self.parts:
            return [part.given() for part in self.parts]
        preset = {} if self.preset is None else {"preset": self.preset}
        return {"name": self.name, **preset, **self.geometry, **self.overrides, **self._weight}

    def resolved(self) -> Any:
        """Everything that decides the penalty, flat, defaults written out; a list of that for a sum."""
        if self.parts:
            return [part.resolved() for part in self.parts]
        if self.is_wasserstein:
            geometry, settings = dataclasses.asdict(self.costs), dataclasses.asdict(self.settings())
            # Runs from before there were these are the same; `from_record` knows a transform by its absence.
            if geometry["power"] == 1:
                del geometry["power"]
            if geometry["transform"] == TRANSFORMS[self.preset or "semantic"] == NONE:
                del geometry["transform"]
            return {"name": self.name, "preset": self.preset, **geometry, **settings, **self._weight}
        values: dict[str, Any] = {"name": self.name, "estimator": "gradient", "gauge": "value"}
        if self.name == "alpha":
            values["alpha"] = Alpha().alpha
        return values | dict(self.overrides) | self._weight

    @property
    def _weight(self) -> dict[str, float]:
        return {} if self.weight == 1 else {"weight": self.weight}

    def changed(self, **settings: Any) -> RegularizerSpec:
        """With other settings, of a sum those of its parts that have them; None leaves one as it is."""
        given = {name: value for name, value in settings.items() if value is not None}
        if self.parts:
            return self.sum_of(
                part.changed(**{name: value for name, value in given.items() if has_setting(part.name, name)})
                for part in self.parts
            )
        return self.from_settings(**(self.given() | given))

    def fitted(self, vocabulary: int, mapped: int | None = None) -> tuple[RegularizerSpec, list[str]]:
        """The same on a vocabulary of so many tokens, and notes on what had to be lowered. What was asked for by number
        is refused: see `check_vocabulary`.
        """
        fault = self.check_vocabulary(vocabulary, mapped)
        if fault is not None:
            raise ValueError(fault[1])
        transport = self.transport
        if transport is None:
            return self, []
        lowered: dict[str, Any] = {}
        notes = []
        neighbours, known = self.costs.neighbours, vocabulary if mapped is None else mapped
        if isinstance(neighbours, int) and neighbours >= known:
            lowered["neighbours"] = known - 1
            notes.append(f"k1 is {known - 1}, all other tokens of a vocabulary of {known}.")
        if transport.settings().k2 > vocabulary:
            lowered["k2"] = vocabulary
            notes.append(f"k2 is {vocabulary}, the whole vocabulary.")
        return self.changed(**lowered), notes

    def check_vocabulary(self, tokens: int, mapped: int | None = None) -> tuple[str, str] | None:
        """The first of k1 and k2 that was asked for by a number beyond a vocabulary of so many tokens, and what to do
        about it. mapped: how many of them have embeddings, by default all.
        """
        given = self.transport or self
        k1, k2 = given.geometry.get("neighbours"), given.overrides.get("k2")
        if k2 is not None and k2 > tokens:
            return "k2", f"k2={k2} exceeds the vocabulary ({tokens} tokens); set k2 to {tokens} or less"
        known = tokens if mapped is None else mapped
        if isinstance(k1, int) and k1 >= known:
            return "neighbours", (
                f"neighbours={k1} exceeds the other tokens of the vocabulary ({known - 1}"
                f"{'' if known == tokens else ' with embeddings'}); set neighbours to {known - 1} or less, or to all"
            )
        return None

    def build(
        self, embeddings: Tensor | None = None, cache: MutableMapping[GeometrySpec, TokenGeometry] | None = None
    ) -> Regularizer:
        """The regularizer, on embeddings ``(V, d)`` if it has a geometry.

        cache: geometries that were measured before, and where this one is put: measuring a vocabulary takes a while.
        """
        cache = {} if cache is None else cache
        if self.parts:
            return Sum([(part.weight, replace(part, weight=1.0).build(embeddings, cache)) for part in self.parts])
        built = self._build(embeddings, cache)
        return built if self.weight == 1 else Sum([(self.weight, built)])

    def _build(self, embeddings: Tensor | None, cache: MutableMapping[GeometrySpec, TokenGeometry]) -> Regularizer:
        if not self.is_wasserstein:
            return make_regularizer(self.name, **self.overrides)
        if embeddings is None:
            raise ValueError(f"{self.preset} has costs between tokens: pass the reference model's embeddings (V, d)")
        spec, _ = self.fitted(len(embeddings))
        if spec.costs not in cache:
            cache[spec.costs] = TokenGeometry.from_embeddings(embeddings, **spec.costs.options())
        return Wasserstein(cache[spec.costs], spec.preset or "semantic", **dataclasses.asdict(spec.settings()))


def _check_one_support(first: RegularizerSpec, other: RegularizerSpec) -> None:
    geometries = dataclasses.asdict(first.costs), dataclasses.asdict(other.costs)
    values = [one | {"k2": spec.settings().k2} for one, spec in zip(geometries, (first, other), strict=True)]
    for name in values[0]:
        if values[0][name] != values[1][name]:
            raise ValueError(
                f"the parts of a sum have {name}={values[0][name]} and {name}={values[1][name]}; they are measured on "
                "one support: set both alike"
            )


def names() -> list[str]:
    """Those that a spec may have: presets, regularizers and their aliases."""
    return [*PRESETS, *REGULARIZERS, *ALIASES]


def has_setting(name: str, setting: str) -> bool:
    """Whether a setting has a meaning for the regularizer of that name."""
    known = "wasserstein" if name in PRESETS else ALIASES.get(name, name)
    if setting in ("name", "gauge", "weight"):
        return True
    if setting == "preset":
        return known == "wasserstein" and name not in PRESETS
    if setting == "estimator":
        return known != "wasserstein"
    if setting == "alpha":
        return known == "alpha"
    return known == "wasserstein"


def from_text(text: str, hint: Any, key: str) -> Any:
    """A value of a command line as the first of a union's types that it can be."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            if text in typing.get_args(kind):
                return text
        elif kind is bool:
            if text in ("true", "false"):
                return text == "true"
        elif kind is type(None):
            if text == "null":
                return None
        else:
            try:
                return kind(text)
            except ValueError:
                continue
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    fitting = [words.get(kind) or " or ".join(typing.get_args(kind)) for kind in kinds if kind is not type(None)]
    raise ValueError(f"{key}={text!r} must be {' or '.join(fitting)}")
