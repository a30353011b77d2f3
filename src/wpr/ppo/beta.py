"""The weight of the penalty: fixed, on a schedule, or steered towards a target divergence."""

from __future__ import annotations

import math
from typing import Literal, Protocol

BetaSchedule = Literal["constant", "linear", "cosine"]


class BetaController(Protocol):
    """Gives beta for the next rollout and learns from how far the policy has gone."""

    def beta(self, progress: float) -> float:
        """For a rollout that begins when this share of training is done."""
        ...

    def update(self, divergence: float) -> None:
        """After a rollout: its mean divergence per token."""
        ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class ScheduledBeta:
    """From ``start`` to ``end`` over training, in a straight line or along half a cosine; or constant."""

    def __init__(self, start: float, end: float, shape: BetaSchedule = "linear") -> None:
        self.start, self.end, self.shape = start, end, shape

    def beta(self, progress: float) -> float:
        if self.shape == "constant":
            return self.start
        share = min(max(progress, 0.0), 1.0)
        share = share if self.shape == "linear" else (1 - math.cos(math.pi * share)) / 2
        return self.start + (self.end - self.start) * share

    def update(self, divergence: float) -> None:
        """A schedule does not listen."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing to load."""


class AdaptiveBeta:
    """Steering in the logarithm of beta by a proportional and an integral term (a PI controller):

        e = clip( log(divergence / target), -1, 1 ),     I <- I + rate * e,     log beta = log start + I + gain * e

    The integral finds the beta that holds the target, whatever it is; the proportional term answers at once, and damps
    the swings that a policy which follows beta only after many steps would otherwise be driven into.
    """

    def __init__(self, start: float, target: float, rate: float, gain: float) -> None:
        self.start, self.target, self.rate, self.gain = start, target, rate, gain
        self.integral = self.error = 0.0

    def beta(self, progress: float) -> float:
        return self.start * math.exp(self.integral + self.gain * self.error)

    def update(self, divergence: float) -> None:
        ratio = divergence / self.target
        self.error = min(max(math.log(ratio), -1.0), 1.0) if ratio > 0 else -1.0
        self.integral += self.rate * self.error

    def state_dict(self) -> dict[str, float]:
        return {"integral": self.integral, "error": self.error}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.integral, self.error = state["integral"], state["error"]
