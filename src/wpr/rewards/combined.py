"""Several rewards as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wpr.rewards.base import Completions, Reward, score_by_token


class WeightedSum:
    """``sum_k weight_k * score_k``, over the parts that score a response; NaN where none does. The parts' scores of the
    last call are kept for the logs.
    """

    name = "weighted_sum"

    def __init__(self, parts: list[tuple[Reward, float]]) -> None:
        if not parts:
            raise ValueError("a weighted sum of no rewards; give at least one (reward, weight)")
        self.parts = parts
        self.last_scores: dict[str, Tensor] = {}
        self.may_skip = all(getattr(reward, "may_skip", False) for reward, _ in parts)

    def to(self, device: torch.device) -> WeightedSum:
        """The same sum, its models on another device."""
        for reward, _ in self.parts:
            if hasattr(reward, "to"):
                reward.to(device)
        return self

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Let every part that looks at tokens refuse a tokenizer."""
        for reward, _ in self.parts:
            if hasattr(reward, "check_tokenizer"):
                reward.check_tokenizer(tokenizer)

    def __call__(self, completions: Completions) -> Tensor:
        """See `Reward.__call__`."""
        return self.by_token(completions)[0]

    def by_token(self, completions: Completions) -> tuple[Tensor, Tensor]:
        """See `TokenReward.by_token`. Parts that know nothing of tokens place nothing: their scores land at the end."""
        self.last_scores = {}
        total = torch.zeros(len(completions), device=completions.input_ids.device)
        placed = completions.placed([[]] * len(completions))
        scored = torch.zeros_like(total, dtype=torch.bool)
        for reward, weight in self.parts:
            scores, by_token = score_by_token(reward, completions)
            name = reward.name
            while name in self.last_scores:  # two functions of one name are still two rewards
                name += "_"
            self.last_scores[name] = scores
            own = ~scores.isnan() if getattr(reward, "may_skip", False) else torch.ones_like(scored)
            total = total + weight * scores.masked_fill(~own, 0)
            placed = placed + weight * by_token
            scored |= own
        return total.masked_fill(~scored, torch.nan), placed
