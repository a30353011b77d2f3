"""Means of what happened since the last log, over all processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
Agree = Callable[[list[str]], list[str]]

LOGGED = {
    "score", "reward", "penalty", "divergence", "divergences", "kl", "kl_sequence", "entropy", "response_length",
    "length", "eos_fraction", "empty_responses", "unscored_responses", "value", "beta", "explained_variance", "loss",
    "policy_loss", "value_loss", "ratio", "clip_fraction", "value_clip_fraction", "approx_kl", "early_stop",
    "skipped_rollouts", "learning_rate", "critic_learning_rate", "epoch", "step", "runtime", "number", "prompt",
    "response", "finished", "columns",
}  # fmt: skip
OWN_STARTS = (
    "seconds_", "solver_", "divergence_", "eval_", "train_", "score_", "peak_memory", "rewards/", "monitor/",
    "generation_mismatch",
)  # fmt: skip
OWN_ENDS = ("_ids", "grad_norm")
"""Names that the log and the files of responses have for themselves, how such names begin and how they end."""


def is_reserved(name: str) -> bool:
    """Whether the log or a file of responses has a number of that name."""
    return name in LOGGED or name.startswith(OWN_STARTS) or name.endswith(OWN_ENDS)


class Metrics:
    """Named sums and counts. Every process adds its own; `drain` gives the means over all of them."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def add(self, name: str, values: Tensor | float, count: float | None = None) -> None:
        """Add values to a mean; or, with ``count``, a sum of so many values."""
        if isinstance(values, Tensor):
            total = float(values.double().sum())
            count = float(values.numel()) if count is None else count
        else:
            total, count = float(values), 1.0 if count is None else count
        entry = self.sums.setdefault(name, [0.0, 0.0])
        entry[0] += total
        entry[1] += count

    def drain(self, reduce: Reduce, device: torch.device, agree: Agree = lambda names: names) -> dict[str, float]:
        """Means over all processes, and a fresh start. Names without any value are left out.

        reduce: sums a tensor over all processes. agree: all processes' names together, in one order.
        """
        names = agree(sorted(self.sums))
        table = torch.tensor([self.sums.get(name, [0.0, 0.0]) for name in names], dtype=torch.float64)
        table = reduce(table.to(device) if device.type != "mps" else table.float().to(device)).cpu()
        self.sums = {}
        return {name: float(total / count) for name, (total, count) in zip(names, table, strict=True) if count}

    def state_dict(self) -> dict[str, list[float]]:
        return {name: list(entry) for name, entry in self.sums.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.sums = {name: list(entry) for name, entry in state.items()}


class FunctionLog:
    """What reward functions log of a rollout by the two functions that TRL's trainers give them: ``metrics``, and
    ``columns`` of one value per response. taken: names that they may not use beside those of the log.
    """

    def __init__(self, responses: int, taken: Collection[str] = ()) -> None:
        self.responses, self.taken = responses, taken
        self.metrics: list[tuple[str, float]] = []
        self.columns: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Log a number, as a mean with others of its name."""
        self._check(name)
        self.metrics.append((name, float(value)))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Write a column beside the sampled responses."""
        self._check(column)
        if len(values) != self.responses:
            raise ValueError(
                f"log_extra({column!r}) has {len(values)} values for {self.responses} responses; give one each"
            )
        self.columns[column] = list(values)

    def _check(self, name: str) -> None:
        if is_reserved(name) or name in self.taken:
            raise ValueError(f"a reward function logs {name!r}, which the log has already; give it another name")


class Stopwatch:
    """Seconds by subject. On a GPU the clock is read once its queue is empty, so that work counts where it is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, subject: str) -> Iterator[None]:
        """Time a block."""
        start = self._now()
        try:
            yield
        finally:
            self.seconds[subject] = self.seconds.get(subject, 0.0) + self._now() - start

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def drain(self) -> dict[str, float]:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds


def scored(values: Tensor) -> Tensor:
    """Scores without those of responses that were not scored."""
    return values[~values.isnan()]


def number_or_none(value: Tensor) -> float | None:
    """A score; None of a response that was not scored."""
    return None if value.isnan() else float(value)


def peak_memory_gb(device: torch.device) -> float:
    """The most memory that was in use: of the GPU, since the start of the process; else of the process itself."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9
