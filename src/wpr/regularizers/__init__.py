"""Policy regularizers: f-divergences and Wasserstein, under one protocol."""

from wpr.regularizers.f_divergences import (
    Alpha,
    ChiSquared,
    FDivergence,
    ForwardKL,
    JensenShannon,
    ReverseKL,
    SquaredHellinger,
    TotalVariation,
)
from wpr.regularizers.registry import make_regularizer, register
from wpr.regularizers.regularizer import Regularizer, RegularizerOutput
from wpr.regularizers.sums import Sum
from wpr.regularizers.wasserstein import Wasserstein
from wpr.regularizers.wasserstein_settings import PRESETS, WassersteinSettings

__all__ = [
    "PRESETS",
    "Alpha",
    "ChiSquared",
    "FDivergence",
    "ForwardKL",
    "JensenShannon",
    "Regularizer",
    "RegularizerOutput",
    "ReverseKL",
    "SquaredHellinger",
    "Sum",
    "TotalVariation",
    "Wasserstein",
    "WassersteinSettings",
    "make_regularizer",
    "register",
]
