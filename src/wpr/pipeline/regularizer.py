"""A recipe's regularizer: its settings, and the object made from them on the reference's embeddings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from wpr.regularizers.f_divergences import Alpha
from wpr.regularizers.registry import ALIASES, REGULARIZERS, make_regularizer
from wpr.regularizers.wasserstein import Wasserstein
from wpr.regularizers.wasserstein_settings import PRESETS

_GEOMETRY = ("metric", "neighbours", "scale", "embeddings")
_SOLVER = tuple(field.name for field in dataclasses.fields(PRESETS["paper"]))


@dataclass
class RegularizerSettings:
    """Which leash, and how tight its parts are; null leaves a part at its preset's or class's default.

    name: of `wpr.regularizers`: wasserstein, reverse-kl, forward-kl, jensen-shannon, alpha, total-variation,
        chi-squared, squared-hellinger, or an alias of one.
    estimator: of f-divergences: ``gradient``, or ``paper`` for the paper's penalty f(u)/u. alpha: of ``alpha``.
    gauge: of all: ``value`` or ``raw``.
    preset: of ``wasserstein``: ``semantic`` or ``paper``.
    metric: cost of two tokens, ``euclidean`` or ``cosine``, of their embeddings.
    neighbours: the paper's k1, or ``all``.
    scale: unit of cost: ``median-nn``, ``none``, or a number.
    embeddings: a model of the same tokenizer (folder or hub name) whose embeddings give the costs; null: the
        reference's own.
    lam, k2, iterations, tolerance, marginals, rho, floor, debias, scaled: see `wpr.regularizers.wasserstein`.
    """

    name: str = "wasserstein"
    estimator: Literal["gradient", "paper"] | None = None
    alpha: float | None = None
    preset: Literal["semantic", "paper"] | None = None
    metric: Literal["euclidean", "cosine"] | None = None
    neighbours: int | Literal["all"] | None = None
    scale: str | float | None = None
    embeddings: str | None = None
    lam: float | None = None
    k2: int | None = None
    iterations: int | None = None
    tolerance: float | None = None
    marginals: Literal["balanced", "unbalanced"] | None = None
    rho: float | None = None
    floor: float | None = None
    debias: bool | None = None
    gauge: Literal["raw", "value"] | None = None
    scaled: bool | None = None

    def __post_init__(self) -> None:
        known = ALIASES.get(self.name, self.name)
        if known not in REGULARIZERS:
            make_regularizer(self.name)  # raises, with the nearest name
        if self.scale is not None and isinstance(self.scale, str) and self.scale not in ("median-nn", "none"):
            raise ValueError(f"scale={self.scale!r} must be median-nn, none or a number")
        for name in self.given():
            if not has_setting(self.name, name):
                raise ValueError(f"{name}={getattr(self, name)!r} has no meaning for {self.name}; leave it out")
        if isinstance(self.neighbours, int) and self.neighbours < 1:
            raise ValueError(f"neighbours={self.neighbours} must be 1 or more, or all")
        if isinstance(self.scale, float) and not self.scale > 0:
            raise ValueError(f"scale={self.scale} must be a positive number, median-nn or none")
        if self.is_wasserstein:
            self.solver()
        else:
            make_regularizer(self.name, **self.options())

    @property
    def is_wasserstein(self) -> bool:
        return ALIASES.get(self.name, self.name) == "wasserstein"

    def given(self) -> dict[str, Any]:
        """The parts that are set."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def options(self) -> dict[str, Any]:
        """What an f-divergence is made with."""
        values = {name: getattr(self, name) for name in ("estimator", "alpha", "gauge")}
        return {name: value for name, value in values.items() if value is not None}

    def solver(self) -> dict[str, Any]:
        """Every setting of the Wasserstein penalty, the preset's where none is given."""
        changed = {name: getattr(self, name) for name in _SOLVER if getattr(self, name) is not None}
        return dataclasses.asdict(dataclasses.replace(PRESETS[self.preset or "semantic"], **changed))

    def check_vocabulary(self, tokens: int) -> tuple[str, str] | None:
        """The first of k1 and k2 that a vocabulary of so many tokens is too small for, and what to do about it."""
        if not self.is_wasserstein:
            return None
        values = self.resolved()
        if values["k2"] > tokens:
            return "k2", f"k2={values['k2']} exceeds the vocabulary ({tokens} tokens); set k2 to {tokens} or less"
        k1 = values["neighbours"]
        if k1 != "all" and k1 >= tokens:
            return "neighbours", (
                f"neighbours={k1} exceeds the other tokens of the vocabulary ({tokens - 1}); set neighbours to "
                f"{tokens - 1} or less, or to all"
            )
        return None

    def resolved(self) -> dict[str, Any]:
        """Everything that decides the penalty, defaults written out."""
        if self.is_wasserstein:
            geometry = {"metric": self.metric or "euclidean", "neighbours": self.neighbours or 512,
                        "scale": self.scale or "median-nn", "embeddings": self.embeddings}  # fmt: skip
            return {"name": "wasserstein", "preset": self.preset or "semantic", **geometry, **self.solver()}
        known = ALIASES.get(self.name, self.name)
        values: dict[str, Any] = {
            "name": known,
            "estimator": self.estimator or "gradient",
            "gauge": self.gauge or "value",
        }
        if known == "alpha":
            values["alpha"] = Alpha().alpha if self.alpha is None else self.alpha
        return values


def has_setting(regularizer: str, setting: str) -> bool:
    """Whether a setting has a meaning for the regularizer of that name."""
    known = ALIASES.get(regularizer, regularizer)
    if setting in ("name", "gauge"):
        return True
    if setting == "estimator":
        return known != "wasserstein"
    if setting == "alpha":
        return known == "alpha"
    return known == "wasserstein"


def build_regularizer(settings: RegularizerSettings, reference: Any, device: Any = None) -> Any:
    """The regularizer on ``reference``'s embeddings, or on those of another model of the same tokenizer.

    device: if it is a GPU, the vocabulary is measured there, and the geometry is there; else where the model is. It
        takes seconds on a GPU; for 256,000 x 2,048 some 36 minutes on two CPU cores.
    """
    if not settings.is_wasserstein:
        return make_regularizer(settings.name, **settings.options())
    from wpr.transport.geometry import TokenGeometry, input_embeddings

    weight = input_embeddings(reference)
    if device is None or device.type != "cuda":  # others lack operations that measuring needs
        device = weight.device
    if settings.embeddings is not None:
        weight = _embeddings_of(settings.embeddings, reference)
    values = settings.resolved()
    neighbours = None if values["neighbours"] == "all" else values["neighbours"]
    scale = None if values["scale"] == "none" else values["scale"]
    geometry = TokenGeometry.from_embeddings(weight.to(device), values["metric"], neighbours, scale)
    return Wasserstein(geometry, settings.preset or "semantic", **settings.solver())


def check_same_tokens(embeddings: str, model: str, revision: str | None = None) -> None:
    """Refuse embeddings of a model in whose tokenizer ids stand for other tokens than in ``model``'s. That both have as
    many says nothing: costs between unrelated tokens would be taken without a word.
    """
    from wpr.pipeline.models import load_vocabulary

    theirs, ours = load_vocabulary(embeddings, "regularizer.embeddings"), load_vocabulary(model, revision=revision)
    ids = sorted({index for _, index in theirs.items() ^ ours.items()})
    if not ids:
        return
    named = [{index: token for token, index in one.items()} for one in (theirs, ours)]
    first = ", ".join(f"{index} is {' and not '.join(repr(one.get(index)) for one in named)}" for index in ids[:3])
    raise ValueError(
        f"regularizer.embeddings={embeddings} has another tokenizer than {model}: {len(ids)} ids differ, the first are "
        f"{first} (None: no token); only a model of the same tokenizer gives costs between the policy's tokens"
    )


def _embeddings_of(name: str, reference: Any) -> Any:
    from transformers import AutoModelForCausalLM

    from wpr.transport.geometry import input_embeddings

    check_same_tokens(name, reference.name_or_path)
    weight = input_embeddings(AutoModelForCausalLM.from_pretrained(name, dtype="auto")).float()
    rows = len(input_embeddings(reference))
    if len(weight) < rows:
        raise ValueError(
            f"regularizer.embeddings={name} has embeddings of {len(weight)} tokens and the policy of {rows}: the "
            "tokenizer is the same, but the policy's matrix is padded further; name a model with as many or more"
        )
    return weight[:rows]  # what is left over pads the other matrix, and is no token
