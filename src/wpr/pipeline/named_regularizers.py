"""Regularizers that a command line names: ``reverse-kl``, ``paper``, ``wasserstein:preset=semantic,lam=10``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from wpr.pipeline.errors import OptionError
from wpr.pipeline.regularizer import RegularizerSettings
from wpr.pipeline.typed import convert, field_types
from wpr.pipeline.yaml_file import parse_value
from wpr.regularizers.registry import ALIASES, REGULARIZERS
from wpr.regularizers.wasserstein import Wasserstein
from wpr.regularizers.wasserstein_settings import PRESETS

SIDE_BY_SIDE = ("reverse-kl", "squared-hellinger", "paper", "semantic")
"""What analyses compare where nothing else is asked for: the usual leash, the control without geometry, the paper's
form, and ours.
"""


def parse_regularizer(text: str) -> RegularizerSettings:
    """``NAME`` or ``NAME:key=value,...``: a regularizer's name or alias, or a preset of ``wasserstein``, and settings
    as a recipe's ``regularizer`` section has them.
    """
    name, _, listed = text.partition(":")
    values: dict[str, Any] = {"name": name}
    if name in PRESETS:
        values = {"name": "wasserstein", "preset": name}
    elif name not in REGULARIZERS and name not in ALIASES:
        known = [*PRESETS, *(one for one in REGULARIZERS if one != "wasserstein"), "wasserstein"]
        raise OptionError(f"there is no regularizer {name!r}; use one of {', '.join(known)}, as in {known[0]}:lam=50")
    types = field_types(RegularizerSettings)
    for part in filter(None, listed.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in types:
            raise OptionError(
                f"{part!r} of {text!r} is no setting of a regularizer; write key=value with one of {', '.join(types)}"
            )
        values[key] = convert(parse_value(value), types[key], key, lambda key: f"--regularizer {text}")
    try:
        return RegularizerSettings(**values)
    except (TypeError, ValueError) as error:
        raise OptionError(f"--regularizer {text}: {error}") from None


class RegularizerShop:
    """Makes regularizers on one reference model, each geometry once: measuring a vocabulary takes a while."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference
        self._notes: dict[str, list[str]] = {}
        self._geometries: dict[tuple[Any, ...], Any] = {}

    def make_all(self, texts: Sequence[str]) -> dict[str, Any]:
        """Regularizers by the text that names them."""
        return {text: self.make(parse_regularizer(text), text) for text in dict.fromkeys(texts)}

    def make(self, settings: RegularizerSettings, name: str) -> Any:
        """One regularizer; ``name`` is what notes call it. The paper's k1 and k2 are lowered to the vocabulary's size
        where they were not asked for by number.
        """
        try:
            return self._made(settings, name)
        except ValueError as error:
            raise OptionError(f"{name}: {error}") from None

    def _made(self, settings: RegularizerSettings, name: str) -> Any:
        from wpr.pipeline.regularizer import build_regularizer
        from wpr.transport.geometry import TokenGeometry, input_embeddings

        if not settings.is_wasserstein or settings.embeddings is not None:
            return build_regularizer(settings, self.reference)
        weight = input_embeddings(self.reference)
        notes = self._notes[name] = []
        values = settings.resolved()
        neighbours = None if values["neighbours"] == "all" else values["neighbours"]
        if settings.neighbours is None and neighbours is not None and neighbours >= len(weight):
            neighbours = len(weight) - 1
            notes.append(f"{name}: k1 is {neighbours}, all other tokens of a vocabulary of {len(weight)}.")
        solver = settings.solver()
        if settings.k2 is None and solver["k2"] > len(weight):
            solver["k2"] = len(weight)
            notes.append(f"{name}: k2 is {len(weight)}, the whole vocabulary.")
        scale = None if values["scale"] == "none" else values["scale"]
        key = (values["metric"], neighbours, scale)
        if key not in self._geometries:
            self._geometries[key] = TokenGeometry.from_embeddings(weight, *key)
        return Wasserstein(self._geometries[key], settings.preset or "semantic", **solver)

    def notes(self, names: Iterable[str]) -> list[str]:
        """What was changed in these regularizers to fit a small vocabulary."""
        return [note for name in names for note in self._notes.get(name, [])]


def changed(settings: RegularizerSettings, **values: Any) -> RegularizerSettings:
    """The settings with those given changed; None leaves one as it is."""
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return dataclasses.replace(settings, **given)
    except ValueError as error:
        raise OptionError(str(error)) from None
