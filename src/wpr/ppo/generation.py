"""Sampling responses: one small class a back end.

Notation for shapes: ``B`` responses, ``L`` tokens, ``V`` vocabulary.

Every response has a seed of its own, made from the run's seed, the rollout's number and the response's number in the
global batch. So responses do not depend on how they are spread over processes and batches, an interrupted run draws the
same ones again without any generator state, and a remote engine that takes a seed a request can be asked for the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from wpr.language_models import plain_model
from wpr.ppo.rollout import Prompts, Responses, responses_from_tokens

BLOCK = 256
"""Tokens whose probabilities are added up at a time."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    temperature: above 0; logits are divided by it.
    top_k: only the k most likely tokens, 0 for all. top_p: the most likely tokens that together reach this probability.
    min_new_tokens, max_new_tokens: limits on a response's length, its end-of-sequence token included.
    eos: tokens that end a response.
    """

    temperature: float
    top_k: int
    top_p: float
    min_new_tokens: int
    max_new_tokens: int
    eos: tuple[int, ...]


class GenerationError(FloatingPointError):
    """The policy's logits were no distribution while sampling.

    row, position: the first response and the token of it that it happened at. value: the largest logit there.
    """

    def __init__(self, row: int, position: int, value: float, rows: int) -> None:
        self.row, self.position, self.value, self.rows = row, position, value, rows
        super().__init__(
            f"the policy's logits were not a distribution while sampling token {position} of response {row} (largest "
            f"logit {value}; {rows} response(s) affected)"
        )


class EngineError(RuntimeError):
    """An engine that draws responses for us could not, or gave something that is no response to what was asked."""


class Generation(Protocol):
    """A back end that draws responses from the current policy."""

    def generate(self, policy: Any, prompts: Prompts, sampling: Sampling, seeds: Sequence[int]) -> Responses:
        """One response per prompt row, drawn with its seed, on the prompts' device.

        policy: the module that holds the weights; a remote engine is sent them here.
        """
        ...


def rollout_of(generation: Generation) -> AbstractContextManager[None]:
    """A context in which the policy stays as it is, for back ends that then do some of their work once."""
    scope: AbstractContextManager[None] = generation.rollout() if hasattr(generation, "rollout") else nullcontext()
    return scope


def response_seeds(seed: int, rollout: int, first: int, count: int) -> list[int]:
    """Seeds of responses ``first .. first + count`` of a rollout."""
    return [
        int(np.random.SeedSequence([seed, rollout, row]).generate_state(1, np.uint64)[0])
        for row in range(first, first + count)
    ]


def generate_in_parts(
    generation: Generation, policy: Any, prompts: Prompts, sampling: Sampling, seeds: Sequence[int], size: int | None
) -> Responses:
    """Responses to all prompts, ``size`` at a time: the cache of keys and values of a whole rollout may not fit. Every
    response has its own seed, so that they come out the same.
    """
    if size is None or size >= len(prompts):
        return generation.generate(policy, prompts, sampling, seeds)
    parts: list[Responses] = []
    failed: GenerationError | None = None
    for start in range(0, len(prompts), size):
        part = Prompts(prompts.input_ids[start : start + size], prompts.attention_mask[start : start + size])
        try:
            parts.append(generation.generate(policy, part, sampling, seeds[start : start + size]))
        except GenerationError as error:  # the other parts still run: other processes may wait in their layers
            failed = failed or GenerationError(error.row + start, error.position, error.value, error.rows)
    if failed is not None:
        raise failed
    width = max(part.tokens.shape[1] for part in parts)

    def together(rows: list[Tensor]) -> Tensor:
        return torch.cat([pad(part, (0, width - part.shape[1])) for part in rows])

    log_probs = [part.log_probs for part in parts if part.log_probs is not None]
    return Responses(
        together([part.tokens for part in parts]),
        together([part.mask for part in parts]),
        torch.cat([part.finished for part in parts]),
        together(log_probs) if log_probs else None,
    )


class TransformersGeneration:
    """transformers' ``generate`` on the training weights.

    synced: run as many steps as the slowest process, which sharded weights (ZeRO-3, FSDP) need.
    """

    def __init__(self, synced: bool = False) -> None:
        self.synced = synced

    @torch.no_grad()
    def generate(self, policy: Any, prompts: Prompts, sampling: Sampling, seeds: Sequence[int]) -> Responses:
        """See `Generation.generate`."""
        from transformers import GenerationConfig, LogitsProcessorList

        choice = SeededChoice(seeds, sampling.max_new_tokens, prompts.input_ids)
        processors = LogitsProcessorList([*warpers(sampling), choice])
        config = GenerationConfig(
            do_sample=False,  # `choice` leaves one token
            max_new_tokens=sampling.max_new_tokens,
            min_new_tokens=sampling.min_new_tokens or None,
            eos_token_id=list(sampling.eos) or None,
            pad_token_id=sampling.eos[0] if sampling.eos else 0,
            use_cache=True,
        )
        with only_these_settings(plain_model(getattr(policy, "policy", policy)), config):
            sequences = policy.generate(
                input_ids=prompts.input_ids,
                attention_mask=prompts.attention_mask,
                generation_config=config,
                logits_processor=processors,
                synced_gpus=self.synced,
            )
        choice.check()
        return responses_from_tokens(sequences[:, prompts.input_ids.shape[1] :], sampling.eos)


def warpers(sampling: Sampling) -> list[Any]:
    """What is done to logits before a token is drawn, in this order."""
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    return [
        *([TemperatureLogitsWarper(sampling.temperature)] if sampling.temperature != 1.0 else []),
        *([TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []),
        *([TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []),
    ]


@contextmanager
def only_these_settings(model: Any, config: Any) -> Iterator[None]:
    """Keep the model's own generation settings (a repetition penalty, for instance) out: what is not in our settings
    would change the distribution behind the back of the importance ratios.
    """
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


class SeededChoice:
    """A logits processor that draws the token: the distribution's quantile at a uniform number of the response's own.

    The last processor of the chain. Token v is drawn where ``F(v-1) <= u < F(v)``, F the cumulative probability, so
    that tokens of probability 0 never are. All other tokens are left at -inf for the greedy step that follows.
    """

    def __init__(self, seeds: Sequence[int], length: int, input_ids: Tensor) -> None:
        uniforms = np.stack([np.random.Generator(np.random.Philox(seed)).random(length) for seed in seeds])
        self.uniforms = torch.from_numpy(uniforms).to(input_ids.device)
        self.start = input_ids.shape[1]
        self.bad_step = torch.full((len(seeds),), -1, device=input_ids.device)
        self.bad_value = torch.zeros(len(seeds), device=input_ids.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``(B, V)`` to 0 on the drawn token and -inf elsewhere."""
        step = input_ids.shape[1] - self.start
        drawn, bad = self.quantile(scores, self.uniforms[:, step : step + 1])
        # Noted, not raised: asking for the answer would make the GPU wait at every token.
        bad &= self.bad_step < 0
        self.bad_step = torch.where(bad, step, self.bad_step)
        self.bad_value = torch.where(bad, scores.amax(-1).float(), self.bad_value)
        return torch.full_like(scores, -torch.inf).scatter_(-1, drawn, 0.0)

    @staticmethod
    def quantile(scores: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens ``(B, 1)`` at uniform numbers ``(B, 1)`` of scores ``(B, V)``, and which rows are no
        distribution ``(B,)``.
        """
        # In two steps, the block of tokens and the token: a GPU is slow to add up a few long rows.
        blocks = pad(scores.float().softmax(-1), (0, -scores.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
        ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
        wanted = uniforms * ends[:, -1:]
        block = torch.searchsorted(ends, wanted, right=True).clamp_max(blocks.shape[1] - 1)
        chances = blocks.gather(1, block.unsqueeze(-1).expand(-1, 1, BLOCK)).squeeze(1).double()
        inside = wanted - (ends.gather(1, block) - chances.sum(-1, keepdim=True))
        token = torch.searchsorted(chances.cumsum(-1), inside, right=True)
        # Sums in another order round otherwise: never beyond the block's last token that can be drawn.
        last = torch.where(chances > 0, torch.arange(BLOCK, device=scores.device), 0).amax(-1, keepdim=True)
        return block * BLOCK + torch.minimum(token, last), ~ends[:, -1].isfinite()

    def check(self) -> None:
        """Raise if any logits were no distribution."""
        rows = (self.bad_step >= 0).nonzero().squeeze(-1)
        if len(rows):
            row = int(rows[self.bad_step[rows].argmin()])  # where it began
            raise GenerationError(row, int(self.bad_step[row]), float(self.bad_value[row]), len(rows))
