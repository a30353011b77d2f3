"""Responses that a reference model draws, with their rewards: what `advice` is told from.

Notation for shapes: ``N`` prompts, ``n`` responses per prompt, ``B`` responses, ``P`` positions, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wpr.analysis.starting_beta import FEWEST_PROMPTS, variances
from wpr.errors import OptionError
from wpr.evaluation.response_generation import EncodedPrompt, LoadedModel, SamplingParams, batches, respond
from wpr.evaluation.scorers import score_responses
from wpr.language_models import hidden_states, logits_of, pad
from wpr.rewards import Reward
from wpr.runs.responses import Response

PROMPTS, SAMPLES, POSITIONS = 48, 8, 256
"""Prompts that are best, responses to each, and positions of them at which divergences are measured."""


@dataclass(frozen=True)
class Samples:
    """Responses of the reference to prompts, ``n`` of each in sequence, and their rewards ``(N, n)``; NaN: none."""

    responses: list[Response]
    rewards: Tensor

    @property
    def per_prompt(self) -> int:
        return self.rewards.shape[1]

    @property
    def length(self) -> float:
        """Tokens of a response in the mean."""
        return sum(len(one.response_ids) for one in self.responses) / len(self.responses)

    @property
    def deviation(self) -> float:
        """Of the reward over all responses, by which `normalize_rewards` divides."""
        return float(self.rewards[~self.rewards.isnan()].std())

    def one_each(self) -> list[int]:
        """Of each prompt the index of the first response that has a reward; prompts without one are left out."""
        known = ~self.rewards.isnan()
        return [
            row * self.per_prompt + int(known[row].long().argmax()) for row in range(len(known)) if known[row].any()
        ]


def draw(
    model: LoadedModel,
    prompts: Sequence[EncodedPrompt],
    reward: Reward,
    samples: int = SAMPLES,
    sampling: SamplingParams | None = None,
    batch_size: int = 64,
    advance: Callable[[int], None] = lambda count: None,
) -> Samples:
    """Draw and score ``samples`` responses to each prompt; refuse too few prompts, and rewards that say nothing."""
    if len(prompts) < FEWEST_PROMPTS:
        raise OptionError(
            f"there are {len(prompts)} different prompts, and {FEWEST_PROMPTS} are the fewest that an interval can be "
            f"told from; give more texts, best {PROMPTS}"
        )
    if samples < 2:
        raise OptionError(f"--samples {samples} responses per prompt have no variance; draw 2 or more, best {SAMPLES}")
    asked = [
        replace(prompt, prompt_id=f"{place}-{number}")
        for place, prompt in enumerate(prompts)
        for number in range(samples)
    ]
    ids = {one.prompt_id: one.input_ids for one in asked}
    drawn: dict[str, Response] = {}
    for batch in batches(asked, batch_size):
        for one in respond(model, batch, sampling or SamplingParams(1.0, max_new_tokens=64)):
            drawn[one.prompt_id] = replace(one, prompt_ids=ids[one.prompt_id])
        advance(len(batch))
    responses = [drawn[one.prompt_id] for one in asked]
    rewards = scored(reward, model)(responses).reshape(len(prompts), samples)
    _check(rewards, reward)
    return Samples(responses, rewards)


def scored(reward: Reward, model: LoadedModel) -> Callable[[Sequence[Response]], Tensor]:
    """Rewards ``(B,)`` of responses, in float64."""
    return lambda rows: torch.tensor(
        score_responses(reward, rows, model.model.device, model.tokenizer), dtype=torch.float64
    )


def _check(rewards: Tensor, reward: Reward) -> None:
    """Refuse rewards ``(N, n)`` from which nothing can be told."""
    known = rewards[~rewards.isnan()]
    if known.isinf().any() or (len(known) < rewards.numel() and not getattr(reward, "may_skip", False)):
        wrong = int((~rewards.isfinite()).sum())
        raise OptionError(
            f"the reward {reward.name!r} gave no finite number for {wrong} of {rewards.numel()} responses; let it give "
            "one for every text, empty ones too"
        )
    within = variances(rewards)
    within = within[~within.isnan()]
    if len(within) < FEWEST_PROMPTS:
        raise OptionError(
            f"the reward {reward.name!r} scored {len(known)} of {rewards.numel()} responses, two or more of only "
            f"{len(within)} prompts; {FEWEST_PROMPTS} prompts are the fewest. Give texts that the model answers with "
            "words, or a larger --max-new-tokens"
        )
    if float(within.mean().sqrt()) <= 1e-9 * (1 + float(known.abs().max())):
        raise OptionError(
            f"the reward {reward.name!r} is the same for all responses to a prompt (mean {float(known.mean()):.4g}): "
            "there is nothing to learn from it here. Look whether its words occur in the texts at all, raise "
            "--temperature or --samples, or give other texts"
        )


@torch.no_grad()
def reference_logs(model: LoadedModel, samples: Samples, count: int = POSITIONS) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``(P, V)`` of the reference at positions of the responses, spread over all of them, and which
    prompt ``(P,)`` each belongs to.
    """
    rows, found = [], []
    chosen = samples.one_each()
    each = max(1, math.ceil(count / len(chosen)))
    for index in chosen:
        one = samples.responses[index]
        tokens = list(one.response_ids)
        if not tokens:
            continue
        ids, mask = pad([[*one.prompt_ids, *tokens]], device=model.model.device)
        places = torch.linspace(0, len(tokens) - 1, min(each, len(tokens))).round().long()
        states = hidden_states(model.model, ids, mask)[0, (len(one.prompt_ids) + places - 1).to(ids.device)]
        found.append(logits_of(model.model, states).float().log_softmax(-1))
        rows += [index // samples.per_prompt] * len(places)
    return torch.cat(found), torch.tensor(rows)
