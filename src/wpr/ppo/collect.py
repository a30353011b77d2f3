"""One rollout: draw responses, let every model look at them once, score them.

Notation for shapes: ``B`` responses of this process, ``Q`` prompt tokens, ``L`` response tokens, ``P`` real response
tokens.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from wpr.language_models import cudnn_attention_disabled, position_limit
from wpr.ppo.actor_critic import ActorCritic
from wpr.ppo.config import PPOConfig
from wpr.ppo.distributed import is_sharded, max_over_processes
from wpr.ppo.faults import Fault
from wpr.ppo.generation import (
    EngineError,
    Generation,
    GenerationError,
    Sampling,
    generate_in_parts,
    response_seeds,
    rollout_of,
)
from wpr.ppo.measures import LogitsError, Measures
from wpr.ppo.metrics import FunctionLog, Stopwatch
from wpr.ppo.rollout import Prompts, Responses, join, last_token, trim
from wpr.ppo.scoring import PositionScorer, slice_count
from wpr.regularizers import Regularizer
from wpr.rewards import Completions, Reward, RewardError, RewardModel, WeightedSum, score_by_token

WORKING_COPIES = 9
"""Float32 copies of one slice's logits that exist at a time: both models' logits and what is computed from them.
Measured on an H200, 2,048 positions of 49,152 tokens in bf16: 6.2, and 8.2 with a temperature other than 1. The
workspace of the Wasserstein solvers has a limit of its own (`transport.sinkhorn.chunk_size`).
"""


@dataclass(frozen=True)
class Experience:
    """What is known of a rollout once all models have seen it.

    input_ids, attention_mask: ``(B, Q + L)``. mask: ``(B, L)``. finished: ``(B,)``.
    scores: ``(B,)`` as the reward gave them. placed: ``(B, L)`` what of them tokens earned. values: ``(B, L)``.
    measures: ``(P,)`` each, in the order of ``mask``.
    completions: the texts. watched: ``(B,)`` by name, what the monitors gave. parts: the same of a sum's parts.
    logged: what reward functions logged themselves.
    mismatch: ``(P,)`` log-probabilities of the engine that drew the tokens, minus the policy's own; None where the
        policy drew them, or is measured at another temperature than 1, which the engine's are of.

    Scores of responses that no function scored are NaN.
    """

    input_ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    finished: Tensor
    scores: Tensor
    placed: Tensor
    values: Tensor
    measures: Measures
    completions: Completions
    watched: dict[str, Tensor]
    parts: dict[str, Tensor]
    logged: FunctionLog
    mismatch: Tensor | None = None

    def scatter_to_mask(self, values: Tensor) -> Tensor:
        """Values of real tokens ``(P,)`` in their places ``(B, L)``, 0 elsewhere."""
        return torch.zeros(self.mask.shape, device=values.device).masked_scatter(self.mask, values)


class Collector:
    """Turns prompts into an `Experience`.

    reference: a frozen causal LM, or None where it is the policy with its adapter off.
    monitors: scores that are logged and never learned from; those with ``in_training = False`` of held-out responses
        only.
    eval_regularizers: regularizers whose divergence is measured beside the own one's, where `collect` is asked to.
    """

    def __init__(
        self,
        config: PPOConfig,
        accelerator: Any,
        tokenizer: Any,
        reference: Any | None,
        reward: Reward,
        regularizer: Regularizer,
        generation: Generation,
        sampling: Sampling,
        stopwatch: Stopwatch,
        monitors: Mapping[str, Reward] | None = None,
        eval_regularizers: Mapping[str, Regularizer] | None = None,
    ) -> None:
        self.monitors, self.eval_regularizers = dict(monitors or {}), dict(eval_regularizers or {})
        self.config, self.accelerator, self.tokenizer = config, accelerator, tokenizer
        self.reference, self.reward, self.regularizer = reference, reward, regularizer
        self.generation, self.sampling, self.stopwatch = generation, sampling, stopwatch

    @torch.no_grad()
    def collect(
        self,
        model: ActorCritic,
        batch: Mapping[str, Any],
        number: int,
        first: int,
        evaluating: bool = False,
        trainer_state: Any = None,
    ) -> Experience | Fault:
        """Draw and measure the responses of rollout ``number``; ``first`` is this process's first response in the
        global batch. What goes wrong on this process is returned, once every process has run the same layers.
        ``trainer_state`` is for reward functions.
        """
        model.eval()
        times = self.config.responses_per_prompt
        prompts = Prompts(batch["input_ids"], batch["attention_mask"]).repeat(times)
        texts = [prompt for prompt in batch["prompts"] for _ in range(times)]
        columns = {name: [value for value in column for _ in range(times)] for name, column in batch["columns"].items()}
        self._check_length(model, prompts.input_ids.shape[1])
        fault: Fault | None = None
        seeds = response_seeds(self.config.seed, number, first, len(prompts))
        with self.stopwatch("generation"), self.accelerator.autocast(), rollout_of(self.generation):
            try:
                size = self.config.generation_batch_size
                responses = generate_in_parts(self.generation, model, prompts, self.sampling, seeds, size)
            except GenerationError as error:
                fault = Fault(
                    "policy logits", str(error), texts[error.row], row=error.row, position=error.position,
                    values={"largest_logit": error.value},
                )  # fmt: skip
                responses = _nothing(prompts)
            except EngineError as error:
                fault = Fault("generation", str(error), texts[0])
                responses = _nothing(prompts)
        logged = FunctionLog(len(prompts), self.monitors)
        completions = self.completions(prompts, responses, texts, columns, logged, trainer_state)
        ids, mask = completions.input_ids, completions.attention_mask
        with self.stopwatch("scoring"):
            values, measures, found_error = self._measure(model, ids, mask, responses.mask, evaluating)
        if fault is None and found_error is not None:
            fault = _describe(found_error, responses.mask, completions)
        if fault is None:
            fault = _find_bad_token("the critic's value", "value", values, responses.mask, completions)
        if fault is None:
            penalties = torch.zeros_like(values).masked_scatter(responses.mask, measures.penalty)
            fault = _find_bad_token("the penalty", "penalty", penalties, responses.mask, completions)
        # Also after a fault: a reward model that is sharded needs all processes.
        scores, placed, watched, found = self.score(completions, evaluating)
        if (fault := fault or found) is not None:
            return fault
        return Experience(
            ids, mask, responses.mask, responses.finished, scores,
            pad(placed, (0, responses.mask.shape[1] - placed.shape[1])), values, measures, completions, watched,
            self.part_scores(), logged, self._mismatch(responses, measures),
        )  # fmt: skip

    def _mismatch(self, responses: Responses, measures: Measures) -> Tensor | None:
        if responses.log_probs is None or self.config.logprob_temperature != 1:
            return None
        return responses.log_probs[responses.mask] - measures.log_prob

    def completions(
        self,
        prompts: Prompts,
        responses: Responses,
        texts: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        logged: FunctionLog,
        trainer_state: Any,
    ) -> Completions:
        """Prompts with their responses, as rewards see them; functions may log to ``logged``."""
        ids = [tokens[keep].tolist() for tokens, keep in zip(responses.tokens, responses.mask, strict=True)]
        return Completions(
            texts, self._decode(ids), *join(prompts, responses), last_token(prompts.input_ids.shape[1], responses.mask),
            columns, ids,
            {"trainer_state": trainer_state, "log_extra": logged.log_extra, "log_metric": logged.log_metric},
            self.tokenizer,
        )  # fmt: skip

    def part_scores(self) -> dict[str, Tensor]:
        """Of the responses that were scored last, by part of the reward, if it has several."""
        return dict(self.reward.last_scores) if isinstance(self.reward, WeightedSum) else {}

    def score(
        self, completions: Completions, evaluating: bool = False
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], Fault | None]:
        """Scores ``(B,)`` by the reward, what of them tokens earned ``(B, L)``, scores ``(B,)`` by the monitors' names;
        and the first thing that went wrong. Monitors that are not for training are asked where ``evaluating``.
        """
        with self.stopwatch("reward"):
            scores, placed, fault = _score("reward", self.reward, completions)
        watched = {}
        for name, monitor in self.monitors.items():
            if not (evaluating or getattr(monitor, "in_training", True)):
                continue
            with self.stopwatch("monitors"):
                watched[name], _, found = _score(f"monitor {name}", monitor, completions, place=False)
            fault = fault or found
        return scores, placed, watched, fault

    @cudnn_attention_disabled()  # as in training: the ratio of new to old probabilities is to begin at 1
    def _measure(
        self, model: ActorCritic, ids: Tensor, attention_mask: Tensor, mask: Tensor, evaluating: bool
    ) -> tuple[Tensor, Measures, LogitsError | ValueError | None]:
        """Values ``(B, L)`` and measures of all tokens, a few sequences at a time; or the first error, once all layers
        have run.
        """
        size = self.config.scoring_batch_size or self.config.per_device_train_batch_size
        values = torch.zeros(mask.shape, device=ids.device)
        scorer = PositionScorer(
            self.regularizer,
            self.reference,
            self.eval_regularizers if evaluating else {},
            partial(self.stopwatch, "penalty"),
        )
        for rows in torch.arange(len(ids), device=ids.device).split(size):
            part_ids, part_attention, part_mask = trim(ids[rows], attention_mask[rows], mask[rows])
            slices = self.slices(int(part_mask.sum()), model)
            # As in training also before it: until then the model has not been wrapped in the precision of the run.
            with self.accelerator.autocast():
                _, part_values = model(
                    part_ids, part_attention, part_mask, self.config.logprob_temperature, slices, scorer
                )
            values[rows, : part_mask.shape[1]] = part_values.masked_fill(~part_mask, 0)
        if scorer.error is not None or scorer.positions == 0:
            return values, Measures(*torch.zeros(5, 0, device=ids.device)), scorer.error
        return values, scorer.result(), None

    def slices(self, positions: int, model: ActorCritic) -> int:
        """In how many parts the logits of so many positions are computed."""
        vocabulary = model.config.get_text_config().vocab_size
        slices = slice_count(positions, vocabulary, self.config.logits_memory_mb, 4 * WORKING_COPIES)
        return max_over_processes(self.accelerator, slices) if is_sharded(self.accelerator) else slices

    def _check_length(self, model: ActorCritic, prompt_length: int) -> None:
        rewards = [part for part, _ in self.reward.parts] if isinstance(self.reward, WeightedSum) else [self.reward]
        models = {"policy": model.policy, "reference": self.reference, "critic": getattr(model, "critic", None)}
        models |= {part.name: part.model for part in rewards if isinstance(part, RewardModel) and not part.tokenizer}
        for name, part in models.items():
            limit = position_limit(part) if part is not None else None
            if limit is not None and prompt_length + self.sampling.max_new_tokens > limit:
                raise ValueError(
                    f"a prompt of {prompt_length} tokens and max_new_tokens={self.sampling.max_new_tokens} exceed the "
                    f"{limit} positions of the {name}; lower max_new_tokens or max_prompt_length"
                )

    def _decode(self, rows: list[list[int]]) -> list[str]:
        if self.tokenizer is None:
            return [" ".join(map(str, row)) for row in rows]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)  # type: ignore[no-any-return]


def _score(
    what: str, source: Reward, completions: Completions, place: bool = True
) -> tuple[Tensor, Tensor, Fault | None]:
    """Scores ``(B,)`` by a reward or monitor and, if asked for, what of them tokens earned ``(B, L)``; or what went
    wrong.
    """
    device, placed = completions.input_ids.device, completions.placed([[]] * len(completions))
    try:
        scores, placed = score_by_token(source, completions) if place else (source(completions), placed)
        scores, placed = scores.to(device).float(), placed.to(device).float()
    except Exception as error:
        message = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
        fault = _fault(completions, what, message, values={"traceback": traceback.format_exc()})
        return torch.zeros(len(completions), device=device), placed, fault
    skipped = scores.isnan() if getattr(source, "may_skip", False) else torch.zeros_like(scores, dtype=torch.bool)
    found = _find_bad_score(what, scores.masked_fill(skipped, 0), completions)
    everywhere = torch.ones_like(placed, dtype=torch.bool)
    return scores, placed, found or _find_bad_token("the token's score", "score", placed, everywhere, completions)


def _nothing(prompts: Prompts) -> Responses:
    """Stand-ins for responses that could not be drawn: one token each, so that all layers can run."""
    shape = (len(prompts), 1)
    device = prompts.input_ids.device
    return Responses(
        torch.zeros(shape, dtype=torch.long, device=device),
        torch.ones(shape, dtype=torch.bool, device=device),
        torch.zeros(len(prompts), dtype=torch.bool, device=device),
    )


def _fault(
    completions: Completions,
    kind: str,
    message: str,
    row: int | None = None,
    position: int | None = None,
    values: Mapping[str, Any] | None = None,
) -> Fault:
    """A fault of a response; of none in particular, the first is shown."""
    shown = row or 0
    prompt, response = completions.prompts[shown], completions.responses[shown]
    return Fault(kind, message, prompt, response, row, position, dict(values or {}))


def _describe(error: LogitsError | ValueError, mask: Tensor, completions: Completions) -> Fault:
    """The fault behind an error that scoring met."""
    if not isinstance(error, LogitsError):
        return _fault(completions, "penalty", str(error))
    row, position = mask.nonzero()[error.position].tolist()
    message = f"{error} (response {row}, token {position})"
    return _fault(completions, f"{error.model} logits", message, row, position, error.values)


def _find_bad_token(what: str, kind: str, numbers: Tensor, mask: Tensor, completions: Completions) -> Fault | None:
    """The first real token ``(B, L)`` whose number is not finite."""
    bad = (~numbers.isfinite() & mask).nonzero()
    if not len(bad):
        return None
    row, position = bad[0].tolist()
    number = numbers[row, position].item()
    message = f"{what} is {number} at token {position} of response {row} ({len(bad)} such)"
    return _fault(completions, kind, message, row, position, {kind: number})


def _find_bad_score(what: str, scores: Tensor, completions: Completions) -> Fault | None:
    bad = (~scores.isfinite()).nonzero().squeeze(-1)
    if not len(bad):
        return None
    row, name = int(bad[0]), "score" if what == "reward" else f"{what} score"
    message = f"the {name} of response {row} is {scores[row].item()} ({len(bad)} such)"
    return _fault(completions, "score", message, row, values={"score": scores[row].item()})
