"""Align language models while keeping them close in meaning to a reference model."""

from wpr.regularizers import (
    Alpha,
    ChiSquared,
    ForwardKL,
    JensenShannon,
    Regularizer,
    RegularizerOutput,
    ReverseKL,
    SquaredHellinger,
    TotalVariation,
    Wasserstein,
    make_regularizer,
)
from wpr.transport.geometry import TokenGeometry, token_frequencies
from wpr.transport.geometry_file import GeometryFileError

__version__ = "0.1.0"

__all__ = [
    "Alpha",
    "ChiSquared",
    "ForwardKL",
    "GeometryFileError",
    "JensenShannon",
    "Regularizer",
    "RegularizerOutput",
    "ReverseKL",
    "SquaredHellinger",
    "TokenGeometry",
    "TotalVariation",
    "Wasserstein",
    "make_regularizer",
    "token_frequencies",
]
