"""What policies are trained to maximise, made from a recipe's settings, and its scores of responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wpr.config.functions import import_function
from wpr.config.recipe import WORDING, ScorerSettings
from wpr.errors import RecipeError, UserError
from wpr.language_models import pad
from wpr.rewards import Completions, Reward
from wpr.runs.responses import Response

BATCH = 32


def make_scorer(settings: ScorerSettings, reward_model: str | None) -> Any:
    """The reward that settings name, ready to score. reward_model: folder or hub name of the one that is used."""
    if settings.kind == "function":
        from wpr.rewards import FunctionReward

        assert settings.function is not None
        return FunctionReward(import_function(settings.function, "scorer.function"))
    if settings.kind == "code":
        from wpr.rewards.code import CodeReward, Limits

        try:
            limits = Limits(**settings.limits)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"scorer.limits: {error}") from None
        return CodeReward(limits=limits, workers=settings.workers, unsafe=settings.unsafe)
    if settings.kind in WORDING:
        from wpr.rewards.wording import wording_reward

        return wording_reward(settings.kind, **settings.wording)
    from wpr.rewards import RewardModel

    assert reward_model is not None
    return RewardModel.from_pretrained(reward_model)


def refuse_other_tokenizer(reward_model: str, tokenizer: Any, setting: str) -> None:
    """Refuse a reward model that would read a policy's tokens as others: it is given their numbers, not the text.
    One without a tokenizer of its own passes; so do tokens that were added to either, such as padding.
    """
    from wpr.model_loading import load_any_tokenizer

    try:
        own = load_any_tokenizer(reward_model, setting)
    except UserError:
        return
    theirs, added = own.get_vocab(), {**tokenizer.get_added_vocab(), **own.get_added_vocab()}
    vocabulary = tokenizer.get_vocab()
    other = sum(theirs.get(token) != number for token, number in vocabulary.items() if token not in added)
    if other:
        raise RecipeError(
            f"{setting}={reward_model}: it has another tokenizer than the policy, in which {other} of "
            f"{len(vocabulary)} tokens are something else, so that its scores would mean nothing; take a reward model "
            "of the policy's tokenizer, or a function that gives it texts (scorer.function=package.module:function)"
        )


def score_responses(
    reward: Reward,
    rows: Sequence[Response],
    device: torch.device | None = None,
    tokenizer: Any = None,
    size: int = BATCH,
) -> list[float]:
    """Scores of responses that have their prompts' tokens; NaN where the reward gives none."""
    found: list[float] = []
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        ids, mask = pad([[*row.prompt_ids, *row.response_ids] for row in part], device=device)
        shared = set.intersection(*(set(row.columns) for row in part))
        completions = Completions(
            [row.prompt for row in part],
            [row.response for row in part],
            ids,
            mask,
            mask.sum(-1) - 1,
            {name: [row.columns[name] for row in part] for name in sorted(shared)},
            [row.response_ids for row in part],
            tokenizer=tokenizer,
        )
        found += reward(completions).tolist()
    return found
