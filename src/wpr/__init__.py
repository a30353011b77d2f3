"""Align language models while keeping them close in meaning to a reference model."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wpr.divergence_monitor import DivergenceMonitor
    from wpr.pipeline.from_python import run
    from wpr.ppo import PPOConfig, PPOTrainer
    from wpr.ppo.head_loss import loss_from_hidden
    from wpr.ppo.scoring import from_hidden
    from wpr.regularizers import (
        Alpha,
        ChiSquared,
        ForwardKL,
        JensenShannon,
        Regularizer,
        RegularizerOutput,
        ReverseKL,
        SquaredHellinger,
        Sum,
        TotalVariation,
        Wasserstein,
        make_regularizer,
    )
    from wpr.report.loaded_run import LoadedRun, load_run
    from wpr.transport.geometry import TokenGeometry, token_frequencies
    from wpr.transport.geometry_file import GeometryFileError

__version__ = "0.2.0"

__all__ = [
    "Alpha",
    "ChiSquared",
    "DivergenceMonitor",
    "ForwardKL",
    "GeometryFileError",
    "JensenShannon",
    "LoadedRun",
    "PPOConfig",
    "PPOTrainer",
    "Regularizer",
    "RegularizerOutput",
    "ReverseKL",
    "SquaredHellinger",
    "Sum",
    "TokenGeometry",
    "TotalVariation",
    "Wasserstein",
    "from_hidden",
    "load_run",
    "loss_from_hidden",
    "make_regularizer",
    "run",
    "token_frequencies",
]

_ELSEWHERE = {
    "DivergenceMonitor": "wpr.divergence_monitor",
    "GeometryFileError": "wpr.transport.geometry_file",
    "LoadedRun": "wpr.report.loaded_run",
    "PPOConfig": "wpr.ppo",
    "PPOTrainer": "wpr.ppo",
    "TokenGeometry": "wpr.transport.geometry",
    "from_hidden": "wpr.ppo.scoring",
    "load_run": "wpr.report.loaded_run",
    "loss_from_hidden": "wpr.ppo.head_loss",
    "run": "wpr.pipeline.from_python",
    "token_frequencies": "wpr.transport.geometry",
}
"""Where names come from that are none of `wpr.regularizers`."""


def __getattr__(name: str) -> Any:
    """Imported when asked for: the trainer needs transformers, and `wpr.cli` has a say before torch starts."""
    if name in ("regularizers", "transport"):  # `import wpr` is enough for these, as for the names in them
        return importlib.import_module(f"wpr.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'wpr' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_ELSEWHERE.get(name, "wpr.regularizers")), name)
    except ModuleNotFoundError as error:
        from wpr.errors import missing_package

        if (message := missing_package(error, extra="ppo" if name.startswith("PPO") else None)) is None:
            raise
        raise ImportError(f"wpr.{name}: {message}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
