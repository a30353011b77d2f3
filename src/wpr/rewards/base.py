"""What a reward is: prompts with their responses in, one score per response out, or also what each token earned.

Notation for shapes: ``B`` responses, ``T`` tokens of prompt and response together, ``L`` tokens of the longest
response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


class RewardError(RuntimeError):
    """A reward source failed or gave something that is no score."""


@dataclass(frozen=True)
class Completions:
    """Prompts and responses, as text and as tokens.

    prompts: as the dataset has them, text or chat messages, one per response.
    responses: text, without special tokens.
    input_ids, attention_mask: ``(B, T)`` prompt and response, padded on both sides.
    last: ``(B,)`` index of each row's last real token.
    columns: the other columns of the dataset, one value a response.
    response_ids: tokens of the responses, with the end-of-sequence token, where they are known.
    trainer: what a trainer passes to functions of TRL's convention: ``trainer_state``, ``log_extra``, ``log_metric``.
    tokenizer: that decoded ``response_ids`` to ``responses``, where it is known.
    """

    prompts: Sequence[Any]
    responses: Sequence[str]
    input_ids: Tensor
    attention_mask: Tensor
    last: Tensor
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    response_ids: Sequence[Sequence[int]] | None = None
    trainer: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = None

    def __len__(self) -> int:
        return len(self.responses)

    def placed(self, rows: Sequence[Sequence[float]]) -> Tensor:
        """Numbers of response tokens as a tensor ``(B, L)``, 0 where a row has none."""
        length = max(map(len, self.response_ids or rows), default=0)
        padded = [[*row, *[0.0] * (length - len(row))] for row in rows]
        return torch.tensor(padded, device=self.input_ids.device).reshape(len(self), length)


@runtime_checkable
class Reward(Protocol):
    """Scores completions. A source may also have ``to(device)``; ``may_skip``: whether NaN means that it does not score
    a response, which otherwise is a fault; and, as a monitor, ``in_training``: whether it is asked in training, too.
    """

    name: str

    def __call__(self, completions: Completions) -> Tensor:
        """Scores ``(B,)`` in float32."""
        ...


@runtime_checkable
class TokenReward(Reward, Protocol):
    """A reward that knows which tokens earned it. One that needs the tokenizer for that may also have
    ``check_tokenizer(tokenizer)``, which refuses one that it cannot work with before training.
    """

    def by_token(self, completions: Completions) -> tuple[Tensor, Tensor]:
        """Scores ``(B,)``, as of `__call__`, and what of them tokens earned ``(B, L)``, 0 on padding. What is left of a
        score, ``score - placed.sum()``, is that of the whole response, which its last token gets.

        A token's number may depend on the tokens up to it and on none after: then the policy gradient has the same
        expectation as with all of the score at the end (docs/rewards.md).
        """
        ...


def score_by_token(reward: Reward, completions: Completions) -> tuple[Tensor, Tensor]:
    """See `TokenReward.by_token`; of any reward: one that knows nothing of tokens has placed nothing."""
    nothing = completions.placed([[]] * len(completions))
    if not isinstance(reward, TokenReward):
        return reward(completions), nothing
    scores, placed = reward.by_token(completions)
    if placed.shape != nothing.shape:
        raise RewardError(
            f"reward {reward.name!r} placed numbers of shape {tuple(placed.shape)} on tokens; return {len(scores)} "
            f"rows of {nothing.shape[1]}, the tokens of the longest response"
        )
    return scores, placed


def as_reward(source: Any, weights: Sequence[float] | None = None) -> Reward:
    """Make a `Reward` of what users have: a reward, a sequence-classification model or its folder, a function, or a
    list of these (or of pairs with a weight), which are added. ``weights`` are those of a list without pairs.
    """
    from wpr.rewards.combined import WeightedSum
    from wpr.rewards.function import KEYWORDS, FunctionReward, accepts
    from wpr.rewards.model import RewardModel

    if weights is not None:
        parts = list(source) if isinstance(source, list | tuple) else [source]
        if any(isinstance(part, tuple) for part in parts):
            raise ValueError(
                f"reward_weights={list(weights)} and pairs (reward, weight) give weights twice; leave one of them out"
            )
        if len(parts) != len(weights):
            raise ValueError(
                f"reward_weights={list(weights)} are {len(weights)} weights for {len(parts)} rewards; give one weight "
                "per reward"
            )
        source = list(zip(parts, weights, strict=True))
    # A function may have a name too; a reward for tokens may also be called as TRL's functions are.
    if isinstance(source, TokenReward):
        return source
    if isinstance(source, Reward) and not accepts(source, **dict.fromkeys(KEYWORDS)):
        return source
    if isinstance(source, str | Path):
        return RewardModel.from_pretrained(str(source))
    if hasattr(source, "get_input_embeddings"):
        return RewardModel(source)
    if isinstance(source, list | tuple) and source:
        pairs = [part if isinstance(part, tuple) else (part, 1.0) for part in source]
        return WeightedSum([(as_reward(part), float(weight)) for part, weight in pairs])
    if isinstance(source, Callable):  # type: ignore[arg-type]
        return FunctionReward(source)
    raise TypeError(
        f"reward={source!r} is no reward; pass a sequence-classification model or its folder, a function "
        "f(prompts, responses, **columns) or f(completions, **kwargs) -> list[float], or a list of these"
    )
