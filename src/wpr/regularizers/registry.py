"""Regularizers by name, for recipes and command lines."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from wpr.regularizers.f_divergences import (
    Alpha,
    ChiSquared,
    ForwardKL,
    JensenShannon,
    ReverseKL,
    SquaredHellinger,
    TotalVariation,
)
from wpr.regularizers.regularizer import Regularizer
from wpr.regularizers.wasserstein import Wasserstein
from wpr.regularizers.wasserstein_settings import PRESETS

REGULARIZERS: dict[str, Callable[..., Regularizer]] = {
    kind.name: kind
    for kind in (ReverseKL, ForwardKL, JensenShannon, Alpha, TotalVariation, ChiSquared, SquaredHellinger, Wasserstein)
}
ALIASES = {
    "rkl": "reverse-kl",
    "kl": "reverse-kl",
    "fkl": "forward-kl",
    "js": "jensen-shannon",
    "tv": "total-variation",
    "chi2": "chi-squared",
    "hellinger": "squared-hellinger",
    "wpr": "wasserstein",
}


def register(name: str, factory: Callable[..., Regularizer]) -> None:
    """Make a regularizer available by name. A name that is taken is refused."""
    if name in REGULARIZERS or name in ALIASES or name in PRESETS:
        raise ValueError(f"the regularizer name {name!r} is taken; choose another")
    REGULARIZERS[name] = factory


def make_regularizer(name: str, **options: Any) -> Regularizer:
    """The regularizer of that name or alias, made with ``options``; ``wasserstein`` and its presets, ``semantic``,
    ``unbalanced`` and ``paper``, need ``geometry=``.
    """
    if name in PRESETS:
        name, options = "wasserstein", {**options, "preset": name}
    key = ALIASES.get(name, name)
    if key not in REGULARIZERS:
        close = difflib.get_close_matches(name.lower(), [*PRESETS, *REGULARIZERS, *ALIASES], 1)
        hint = f"; did you mean {close[0]!r}?" if close else ";"
        raise ValueError(f"regularizer {name!r} is unknown{hint} known are {', '.join([*PRESETS, *REGULARIZERS])}")
    return REGULARIZERS[key](**options)
