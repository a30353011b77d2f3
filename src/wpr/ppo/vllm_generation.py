"""Responses drawn by vLLM, with the policy's weights of now.

Notation for shapes: ``B`` responses, ``L`` tokens of the longest.

vLLM is sent the weights whenever they have changed, and a seed with every request. Its sampler is its own: the same
seed draws other tokens than our own back ends do. Log-probabilities that PPO learns from are always the policy's own
(`collect.Collector`); vLLM's come along to be compared with them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from wpr.language_models import (
    evaluating,
    fingerprint,
    is_partitioned,
    logits_of,
    merged_weights,
    pad,
    plain_model,
    states_before,
)
from wpr.ppo.generation import EngineError, GenerationError, Sampling
from wpr.ppo.rollout import Prompts, Responses, join, trim
from wpr.ppo.vllm_engines import Drawn, Engine, EngineStoppedError

logger = logging.getLogger(__name__)

LARGEST_SEED = 2**63 - 1
COMPARED = 4
"""Responses whose log-probabilities are compared with the policy's own after every change of weights."""
TOLERANCE = 0.5
"""Mean difference of log-probabilities, in nats, that no rounding explains: of bf16 it was 0.013 with wpr-pico."""


class VLLMGeneration:
    """A `Generation` whose tokens come from vLLM.

    engine: a `LocalEngine` or a `ServerEngine`. stopwatch: times what sending weights takes.
    """

    def __init__(
        self,
        engine: Engine,
        say: Callable[[str], None] = logger.warning,
        stopwatch: Callable[[str], AbstractContextManager[None]] = lambda subject: nullcontext(),
    ) -> None:
        self.engine, self.say, self.stopwatch = engine, say, stopwatch
        self._sent: tuple[Hashable, ...] | None = None

    @torch.no_grad()
    def generate(self, policy: Any, prompts: Prompts, sampling: Sampling, seeds: Sequence[int]) -> Responses:
        """See `Generation.generate`. An engine that stops is started again or waited for, once, and drawn from again:
        the same seeds give the same responses.
        """
        model = getattr(policy, "policy", policy)
        if is_partitioned(model) or any(type(weight).__name__ == "DTensor" for weight in model.parameters()):
            raise EngineError(
                "the policy's weights are held in parts (ZeRO-3, FSDP), and vLLM takes whole ones; use ZeRO-2 or DDP, "
                "or generation='transformers'"
            )
        try:
            return self._generate(model, prompts, sampling, seeds)
        except EngineStoppedError as error:
            self._sent = None
            self.say(f"{error}. These {len(prompts)} responses are drawn again once it is back")
        self.engine.restart()
        return self._generate(model, prompts, sampling, seeds)

    def _generate(self, model: Any, prompts: Prompts, sampling: Sampling, seeds: Sequence[int]) -> Responses:
        rows = [ids[real].tolist() for ids, real in zip(prompts.input_ids, prompts.attention_mask.bool(), strict=True)]
        changed = self._send(model)
        self._check_length(rows, sampling)
        drawn = self.engine.draw(rows, sampling, [seed & LARGEST_SEED for seed in seeds])
        responses = self._responses(drawn, sampling, plain_model(model), len(rows), prompts.input_ids.device)
        if changed:
            self._compare(model, prompts, responses)
        return responses

    def _send(self, model: Any) -> bool:
        """The weights, if the engine has others; whether it had."""
        device = plain_model(model).device
        autocast = torch.is_autocast_enabled(device.type)
        kind = torch.get_autocast_dtype(device.type) if autocast else plain_model(model).dtype
        if self.engine.connect(model, kind):
            self._sent = None
        now = fingerprint(model)
        if now == self._sent:
            return False
        self._sent = None
        with self.stopwatch("weight_sync"):
            self.engine.load(merged_weights(model))
        self._sent = now
        return True

    def _check_length(self, rows: Sequence[Sequence[int]], sampling: Sampling) -> None:
        row = max(range(len(rows)), key=lambda row: len(rows[row]))
        longest, limit = len(rows[row]), self.engine.max_length
        if longest + sampling.max_new_tokens > limit:
            raise EngineError(
                f"prompt {row} has {longest} tokens; with max_new_tokens={sampling.max_new_tokens} that exceeds the "
                f"{limit} of {self.engine.name}; lower max_new_tokens or max_prompt_length, or {self.engine.longer}"
            )

    def _responses(
        self, drawn: Sequence[Drawn], sampling: Sampling, model: Any, count: int, device: torch.device
    ) -> Responses:
        """What was drawn, once it is seen to be what was asked for."""
        if len(drawn) != count:
            raise EngineError(f"{self.engine.name} gives {len(drawn)} responses to {count} prompts")
        vocabulary = model.config.get_text_config().vocab_size
        for row, one in enumerate(drawn):
            fault = _fault(one, sampling, vocabulary)
            if fault is not None:
                raise EngineError(f"{self.engine.name} gives response {row} {fault}")
        bad = [(row, place) for row, one in enumerate(drawn) if (place := _first_bad(one)) is not None]
        if bad:
            row, place = min(bad, key=lambda found: found[1])
            raise GenerationError(row, place, math.nan, len(bad))
        tokens, mask = pad([one.tokens for one in drawn], device=device)
        log_probs = torch.zeros(mask.shape)
        for values, one in zip(log_probs, drawn, strict=True):
            values[: len(one.log_probs)] = torch.tensor(one.log_probs)
        finished = torch.tensor([one.tokens[-1] in sampling.eos for one in drawn], device=device)
        return Responses(tokens, mask.bool(), finished, log_probs.to(device))

    def _compare(self, model: Any, prompts: Prompts, responses: Responses) -> None:
        """Refuse an engine whose probabilities are not the policy's: one with another architecture may take some of
        its weights and leave others out.
        """
        few = slice(COMPARED)
        assert responses.log_probs is not None
        some = Responses(responses.tokens[few], responses.mask[few], responses.finished[few])
        ids, attention, mask = trim(
            *join(Prompts(prompts.input_ids[few], prompts.attention_mask[few]), some), some.mask
        )
        with evaluating(model):
            logits = logits_of(model, states_before(model, ids, attention, mask.shape[1])[mask])
        own = own_log_probs(logits, ids[:, -mask.shape[1] :][mask])
        far = float((own - responses.log_probs[few, : mask.shape[1]][mask]).abs().mean())
        if not far <= TOLERANCE and math.isfinite(float(own.sum())):  # NaN of the policy is met where it is scored
            self._sent = None
            raise EngineError(
                f"{self.engine.name} has log-probabilities for its first responses that differ from the policy's by "
                f"{far:.3g} on average, more than {TOLERANCE}: it runs another architecture, or has not taken all "
                "weights; start it with the policy's own folder"
            )

    def close(self) -> None:
        """Give the engine's memory back."""
        self.engine.close()
        self._sent = None


def own_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of tokens ``(P,)`` by logits ``(P, V)``."""
    return logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _first_bad(drawn: Drawn) -> int | None:
    """The first token whose log-probability is no number."""
    return next(
        (place for place, value in enumerate(drawn.log_probs) if value is None or not math.isfinite(value)), None
    )


def _fault(drawn: Drawn, sampling: Sampling, vocabulary: int) -> str | None:
    """What about a response is not as it was asked for, if anything."""
    tokens, longest = drawn.tokens, sampling.max_new_tokens
    ends = [place for place, token in enumerate(tokens) if token in sampling.eos]
    if len(drawn.log_probs) != len(tokens):
        return f"{len(tokens)} tokens with {len(drawn.log_probs)} log-probabilities"
    if any(not 0 <= token < vocabulary for token in tokens):
        return f"token {max(tokens, key=abs)}, of a vocabulary of {vocabulary}"
    if len(tokens) > longest or (ends and ends[0] < len(tokens) - 1):
        return f"{len(tokens)} tokens, more than {longest} or beyond its end token"
    if not ends and len(tokens) < longest:
        return (
            f"{len(tokens)} of {longest} tokens, without an end token (of {list(sampling.eos)}); did the server stop "
            "it, or has it end tokens of its own (--generation-config vllm turns these off)?"
        )
    if ends and len(tokens) <= sampling.min_new_tokens:
        return f"{len(tokens)} tokens with the end token, fewer than min_new_tokens={sampling.min_new_tokens} asks for"
    return None
