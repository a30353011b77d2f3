"""Every knob of the Wasserstein penalty, what it may be, and the three presets."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from wpr.regularizers.regularizer import Gauge
from wpr.transport.sinkhorn import LARGEST_PRODUCT
from wpr.transport.transforms import NONE

Marginals = Literal["balanced", "unbalanced"]
Preset = Literal["paper", "unbalanced", "semantic"]


@dataclass(frozen=True)
class WassersteinSettings:
    """Every knob of the Wasserstein penalty.

    lam: inverse entropy, in units of one over cost. Larger is closer to exact transport and slower to converge.
    k2: how many of each distribution's most likely tokens are told apart.
    iterations: of the solver, at most. With balanced marginals their number is part of the definition.
    tolerance: a position stops once its potentials change (unbalanced) or its marginals are off (balanced) by no more
    than this; 0 runs all iterations.
    marginals: ``"balanced"`` moves all mass, however far; ``"unbalanced"`` may instead destroy and create mass at a
        price.
    rho: that price: how far, in units of cost, mass is moved rather than replaced. Only for unbalanced marginals.
    floor: added to the solver's denominators and logarithm, as the released code does; 0 is exact. Only for balanced
    marginals.
    debias: subtract the policy's transport to itself, so that the divergence is zero, and least, where policy and
    reference agree.
    gauge: ``"value"`` shifts each position's penalties so that their mean under the policy is the divergence; ``"raw"``
        leaves them as they come.
    scaled: divide costs by the geometry's scale.
    """

    lam: float
    k2: int
    iterations: int
    tolerance: float
    marginals: Marginals
    rho: float
    floor: float
    debias: bool
    gauge: Gauge
    scaled: bool

    def __post_init__(self) -> None:
        limits = {
            "lam": (math.isfinite(self.lam) and self.lam > 0, "a finite positive number"),
            "k2": (type(self.k2) is int and self.k2 >= 1, "an integer of at least 1"),
            "iterations": (type(self.iterations) is int and self.iterations >= 1, "an integer of at least 1"),
            "tolerance": (self.tolerance >= 0, "0 or more"),
            "marginals": (self.marginals in ("balanced", "unbalanced"), "'balanced' or 'unbalanced'"),
            "rho": (
                math.isfinite(self.rho) and self.rho > 0,
                "a finite positive number; for exact marginals set marginals='balanced'",
            ),
            "floor": (0 <= self.floor < 1, "between 0 and 1"),
            "debias": (isinstance(self.debias, bool), "True or False"),
            "scaled": (isinstance(self.scaled, bool), "True or False"),
            "gauge": (self.gauge in ("raw", "value"), "'raw' or 'value'"),
        }
        for name, (fine, limit) in limits.items():
            if not fine:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {limit}")
        if self.marginals == "unbalanced" and self.lam * self.rho > LARGEST_PRODUCT:
            raise ValueError(
                f"lam * rho = {self.lam * self.rho:g} exceeds {LARGEST_PRODUCT:g}, where the solver needs millions of "
                "iterations; lower rho, or set marginals='balanced'"
            )
        if self.marginals == "unbalanced" and self.floor:
            raise ValueError(
                f"floor={self.floor} has no meaning with marginals='unbalanced', whose potentials are always finite; "
                f"set floor=0"
            )


def refuse_unknown_settings(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise for the first name that is not known, with the one that is spelled most like it."""
    known = list(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(known)}"
            raise TypeError(f"unknown setting {name!r}; {hint}")


_PAPER = WassersteinSettings(
    lam=100.0,
    k2=128,
    iterations=10,
    tolerance=0.0,
    marginals="balanced",
    rho=1.0,
    floor=1e-16,
    debias=False,
    gauge="raw",
    scaled=False,
)
_UNBALANCED = WassersteinSettings(
    lam=5.0,
    k2=128,
    iterations=60,
    tolerance=1e-4,
    marginals="unbalanced",
    rho=8.0,
    floor=0.0,
    debias=True,
    gauge="value",
    scaled=True,
)
PRESETS: dict[str, WassersteinSettings] = {
    "paper": _PAPER,
    "unbalanced": _UNBALANCED,
    "semantic": replace(_UNBALANCED, lam=40.0, rho=2.0, iterations=120, scaled=False),
}
"""``paper`` reproduces the publication; ``unbalanced`` is its well-posed form on the same distances; ``semantic`` is
that form on distances that know meaning in context, which we recommend in a sum with reverse KL (`RECOMMENDED` of
`spec`). The numbers come from docs/numerics.md: of ``unbalanced`` section 8, of ``semantic`` section 11.
"""

TRANSFORMS: dict[str, str] = {"paper": NONE, "unbalanced": NONE, "semantic": "centre/unit"}
"""The transform of embeddings that each preset's numbers are for. Chords of unit vectors lie between 0 and 2 on every
model, so that ``semantic`` needs no scale.
"""
