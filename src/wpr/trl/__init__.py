"""TRL's GRPO, RLOO and on-policy distillation under any regularizer (docs/trl.md)."""

try:
    import trl as _trl  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("wpr.trl needs TRL; install it with `pip install 'wpr[train]'`") from error

from wpr.trl.distillation import DistillationTrainer
from wpr.trl.regularized import GRPOTrainer, RLOOTrainer

__all__ = ["DistillationTrainer", "GRPOTrainer", "RLOOTrainer"]
