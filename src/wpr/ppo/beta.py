"""The weight of the penalty: fixed, on a schedule, or steered towards a target divergence."""

from __future__ import annotations

import math
from typing import Literal, Protocol

BetaSchedule = Literal["constant", "linear", "cosine"]


class BetaController(Protocol):
    """Gives beta for the next rollout and learns from how far the policy has gone."""

    @property
    def beta(self) -> float: ...

    def update(self, divergence: float, progress: float) -> None:
        """After a rollout: its mean divergence per token, and the share of training that is done."""
        ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class ScheduledBeta:
    """From ``start`` to ``end`` over training, in a straight line or along half a cosine; constant if they are equal."""

    def __init__(self, start: float, end: float, shape: BetaSchedule = "linear") -> None:
        self.start, self.end, self.shape = start, end, shape
        self.progress = 0.0

    @property
    def beta(self) -> float:
        if self.shape == "constant":
            return self.start
        share = self.progress if self.shape == "linear" else (1 - math.cos(math.pi * self.progress)) / 2
        return self.start + (self.end - self.start) * share

    def update(self, divergence: float, progress: float) -> None:
        self.progress = min(max(progress, 0.0), 1.0)

    def state_dict(self) -> dict[str, float]:
        return {"progress": self.progress}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.progress = state["progress"]


class AdaptiveBeta:
    """Multiplicative steering: a divergence above its target raises beta, one below lowers it.

        beta <- beta * exp( rate * clip(divergence / target - 1, -limit, limit) )

    In the logarithm this is integral control, so that beta stays positive and the way up is as fast as the way down.
    """

    def __init__(self, start: float, target: float, rate: float, limit: float = 1.0) -> None:
        self.target, self.rate, self.limit = target, rate, limit
        self._beta = start

    @property
    def beta(self) -> float:
        return self._beta

    def update(self, divergence: float, progress: float) -> None:
        error = divergence / self.target - 1
        self._beta *= math.exp(self.rate * min(max(error, -self.limit), self.limit))

    def state_dict(self) -> dict[str, float]:
        return {"beta": self._beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._beta = state["beta"]
