"""Align language models while keeping them close in meaning to a reference model."""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from wpr.hidden_penalties import from_hidden
    from wpr.ppo import PPOConfig, PPOTrainer

__version__ = "0.1.0"

__all__ = [
    "Alpha",
    "ChiSquared",
    "ForwardKL",
    "GeometryFileError",
    "JensenShannon",
    "PPOConfig",
    "PPOTrainer",
    "Regularizer",
    "RegularizerOutput",
    "ReverseKL",
    "SquaredHellinger",
    "TokenGeometry",
    "TotalVariation",
    "Wasserstein",
    "from_hidden",
    "make_regularizer",
    "token_frequencies",
]


def __getattr__(name: str) -> Any:
    """The trainer needs transformers, and is imported when it is asked for."""
    if name in ("PPOConfig", "PPOTrainer"):
        import wpr.ppo

        return getattr(wpr.ppo, name)
    if name == "from_hidden":
        from wpr.hidden_penalties import from_hidden

        return from_hidden
    raise AttributeError(f"module 'wpr' has no attribute {name!r}")
