"""A Python function as a reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wpr.rewards.base import Completions, RewardError

ScoringFunction = Callable[..., Sequence[float]]


class FunctionReward:
    """``f(prompts, responses, **columns) -> list[float]``, with the dataset's other columns by name."""

    def __init__(self, function: ScoringFunction, name: str | None = None) -> None:
        self.function = function
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))

    def __call__(self, completions: Completions) -> Tensor:
        """See `Reward.__call__`. A wrong number of scores, or something that is no number, is refused."""
        try:
            given: Any = self.function(completions.prompts, completions.responses, **completions.columns)
            scores = given.tolist() if isinstance(given, Tensor) else list(given)
        except Exception as error:
            raise RewardError(f"reward function {self.name!r} raised {type(error).__name__}: {error}") from error
        if len(scores) != len(completions):
            raise RewardError(
                f"reward function {self.name!r} returned {len(scores)} scores for {len(completions)} responses; "
                "return one number a response"
            )
        for row, score in enumerate(scores):
            try:
                float(score)
            except (TypeError, ValueError):
                raise RewardError(
                    f"reward function {self.name!r} returned {score!r} for response {row}; return a number"
                ) from None
        return torch.tensor([float(score) for score in scores], device=completions.input_ids.device)
