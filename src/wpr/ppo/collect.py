"""One rollout: draw responses, let every model look at them once, score them.

Notation for shapes: ``B`` responses of this process, ``Q`` prompt tokens, ``L`` response tokens, ``P`` real response
tokens.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wpr.language_models import cudnn_attention_disabled, hidden_states, logits_of, position_limit
from wpr.ppo.actor_critic import ActorCritic, positions_per_slice
from wpr.ppo.config import PPOConfig
from wpr.ppo.distributed import is_sharded, max_over_processes
from wpr.ppo.faults import Fault
from wpr.ppo.generation import Generation, GenerationError, Sampling, generate_in_parts, response_seeds
from wpr.ppo.measures import LogitsError, Measures, SliceMeasures, finish, measure
from wpr.ppo.metrics import Stopwatch
from wpr.ppo.rollout import Prompts, Responses, join, last_token, trim
from wpr.regularizers import Regularizer
from wpr.rewards import Completions, Reward, RewardError, RewardModel, WeightedSum


@dataclass(frozen=True)
class Experience:
    """What is known of a rollout once all models have seen it.

    input_ids, attention_mask: ``(B, Q + L)``. mask: ``(B, L)``. finished: ``(B,)``.
    scores: ``(B,)`` as the reward gave them. values: ``(B, L)``. measures: ``(P,)`` each, in the order of ``mask``.
    completions: the texts. watched: ``(B,)`` by name, what the monitors gave.
    """

    input_ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    finished: Tensor
    scores: Tensor
    values: Tensor
    measures: Measures
    completions: Completions
    watched: dict[str, Tensor] = field(default_factory=dict)

    def scatter_to_mask(self, values: Tensor) -> Tensor:
        """Values of real tokens ``(P,)`` in their places ``(B, L)``, 0 elsewhere."""
        return torch.zeros(self.mask.shape, device=values.device).masked_scatter(self.mask, values)


class Collector:
    """Turns prompts into an `Experience`.

    reference: a frozen causal LM, or None where it is the policy with its adapter off.
    monitors: scores that are logged and never learned from.
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
    ) -> Experience | Fault:
        """Draw and measure the responses of rollout ``number``; ``first`` is this process's first response in the
        global batch. What goes wrong on this process is returned, once every process has run the same layers.
        """
        model.eval()
        times = self.config.responses_per_prompt
        prompts = Prompts(batch["input_ids"], batch["attention_mask"]).repeat(times)
        texts = [prompt for prompt in batch["prompts"] for _ in range(times)]
        columns = {name: [value for value in column for _ in range(times)] for name, column in batch["columns"].items()}
        self._check_length(model, prompts.input_ids.shape[1])
        fault: Fault | None = None
        seeds = response_seeds(self.config.seed, number, first, len(prompts))
        with self.stopwatch("generation"), self.accelerator.autocast():
            try:
                size = self.config.generation_batch_size
                responses = generate_in_parts(self.generation, model, prompts, self.sampling, seeds, size)
            except GenerationError as error:
                fault = Fault(
                    "policy logits", str(error), texts[error.row], row=error.row, position=error.position,
                    values={"largest_logit": error.value},
                )  # fmt: skip
                responses = _nothing(prompts)
        ids, mask = join(prompts, responses)
        decoded = self._decode(responses)
        completions = Completions(
            texts, decoded, ids, mask, last_token(prompts.input_ids.shape[1], responses.mask), columns
        )
        with self.stopwatch("scoring"):
            values, measures, errors = self._measure(model, ids, mask, responses.mask, evaluating)
        if fault is None and errors:
            fault = self._describe(errors[0], responses.mask, completions)
        if fault is None:
            fault = _find_bad_token("the critic's value", "value", values, responses.mask, completions)
        if fault is None:
            penalties = torch.zeros_like(values).masked_scatter(responses.mask, measures.penalty)
            fault = _find_bad_token("the penalty", "penalty", penalties, responses.mask, completions)
        # Also after a fault: a reward model that is sharded needs all processes.
        with self.stopwatch("reward"):
            scores, found = _score("reward", self.reward, completions)
        fault = fault or found
        watched = {}
        for name, monitor in self.monitors.items():
            with self.stopwatch("monitors"):
                watched[name], found = _score(f"monitor {name}", monitor, completions)
            fault = fault or found
        if fault is not None:
            return fault
        return Experience(ids, mask, responses.mask, responses.finished, scores, values, measures, completions, watched)

    @cudnn_attention_disabled()  # as in training: the ratio of new to old probabilities is to begin at 1
    def _measure(
        self, model: ActorCritic, ids: Tensor, attention_mask: Tensor, mask: Tensor, evaluating: bool
    ) -> tuple[Tensor, Measures, list[tuple[int, Exception]]]:
        """Values ``(B, L)`` and measures of all tokens, a few sequences at a time. Errors are noted with the number of
        real tokens before their batch, and the layers run on.
        """
        size = self.config.scoring_batch_size or self.config.per_device_train_batch_size
        values = torch.zeros(mask.shape, device=ids.device)
        eval_regularizers = self.eval_regularizers if evaluating else {}
        parts: list[SliceMeasures] = []
        errors: list[tuple[int, Exception]] = []
        seen = 0
        for rows in torch.arange(len(ids), device=ids.device).split(size):
            part_ids, part_attention, part_mask = trim(ids[rows], attention_mask[rows], mask[rows])
            length = part_mask.shape[1]
            visit = self._visitor(part_ids, part_attention, part_mask, eval_regularizers, parts, errors, seen)
            slices = self.slices(int(part_mask.sum()), model)
            # As in training also before it: until then the model has not been wrapped in the precision of the run.
            with self.accelerator.autocast():
                _, part_values = model(part_ids, part_attention, part_mask, slices=slices, visit=visit)
            values[rows, :length] = part_values.masked_fill(~part_mask, 0)
            seen += int(part_mask.sum())
        if not parts or errors:
            return values, _no_measures(ids.device), errors
        with self.stopwatch("penalty"):
            return values, finish(self.regularizer, parts), errors

    def _visitor(
        self,
        ids: Tensor,
        attention_mask: Tensor,
        mask: Tensor,
        eval_regularizers: Mapping[str, Regularizer],
        parts: list[SliceMeasures],
        errors: list[tuple[int, Exception]],
        seen: int,
    ) -> Callable[[slice, Tensor, Tensor | None], None]:
        """A function that measures one slice of a batch's positions and adds the result to ``parts``."""
        tokens = ids[:, ids.shape[1] - mask.shape[1] :][mask]
        reference = self.reference
        states = None
        if reference is not None:
            with self.accelerator.autocast():
                everything = hidden_states(reference, ids, attention_mask)
            start = ids.shape[1] - mask.shape[1]
            states = everything[:, start - 1 : start - 1 + mask.shape[1]][mask]

        def visit(rows: slice, policy_logits: Tensor, reference_logits: Tensor | None) -> None:
            if states is not None:
                reference_logits = logits_of(reference, states[rows])
            assert reference_logits is not None
            if rows.stop == rows.start:
                return
            try:
                with self.stopwatch("penalty"):
                    temperature = self.config.logprob_temperature
                    parts.append(
                        measure(
                            self.regularizer,
                            policy_logits,
                            reference_logits,
                            tokens[rows],
                            temperature,
                            rows.start,
                            eval_regularizers,
                        )
                    )
            except (LogitsError, ValueError) as error:
                errors.append((seen, error))

        return visit

    def slices(self, positions: int, model: ActorCritic) -> int:
        """In how many parts the logits of so many positions are computed."""
        vocabulary = model.config.get_text_config().vocab_size
        slices = max(1, math.ceil(positions / positions_per_slice(vocabulary, self.config.logits_memory_mb)))
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

    def _decode(self, responses: Responses) -> list[str]:
        rows = [tokens[keep].tolist() for tokens, keep in zip(responses.tokens, responses.mask, strict=True)]
        if self.tokenizer is None:
            return [" ".join(map(str, row)) for row in rows]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)  # type: ignore[no-any-return]

    def _describe(self, noted: tuple[int, Exception], mask: Tensor, completions: Completions) -> Fault:
        seen, error = noted
        if not isinstance(error, LogitsError):
            return Fault("penalty", str(error), completions.prompts[0], completions.responses[0])
        row, position = mask.nonzero()[seen + error.position].tolist()
        return Fault(
            f"{error.model} logits",
            f"{error} (response {row}, token {position})",
            completions.prompts[row],
            completions.responses[row],
            row,
            position,
            dict(error.values),
        )


def _score(what: str, source: Reward, completions: Completions) -> tuple[Tensor, Fault | None]:
    """Scores ``(B,)`` by a reward or monitor, or what went wrong."""
    device = completions.input_ids.device
    try:
        scores = source(completions).to(device).float()
    except Exception as error:
        message = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
        told = {"traceback": traceback.format_exc()}
        fault = Fault(what, message, completions.prompts[0], completions.responses[0], values=told)
        return torch.zeros(len(completions), device=device), fault
    return scores, _find_bad_score(what, scores, completions)


def _nothing(prompts: Prompts) -> Responses:
    """Stand-ins for responses that could not be drawn: one token each, so that all layers can run."""
    shape = (len(prompts), 1)
    device = prompts.input_ids.device
    return Responses(
        torch.zeros(shape, dtype=torch.long, device=device),
        torch.ones(shape, dtype=torch.bool, device=device),
        torch.zeros(len(prompts), dtype=torch.bool, device=device),
    )


def _no_measures(device: torch.device) -> Measures:
    empty = torch.zeros(0, device=device)
    return Measures(empty, empty, empty, empty, empty)


def _find_bad_token(what: str, kind: str, numbers: Tensor, mask: Tensor, completions: Completions) -> Fault | None:
    """The first real token ``(B, L)`` whose number is not finite."""
    bad = (~numbers.isfinite() & mask).nonzero()
    if not len(bad):
        return None
    row, position = bad[0].tolist()
    number = numbers[row, position].item()
    return Fault(
        kind,
        f"{what} is {number} at token {position} of response {row} ({len(bad)} such)",
        completions.prompts[row],
        completions.responses[row],
        row,
        position,
        {kind: number},
    )


def _find_bad_score(what: str, scores: Tensor, completions: Completions) -> Fault | None:
    bad = (~scores.isfinite()).nonzero().squeeze(-1)
    if not len(bad):
        return None
    row = int(bad[0])
    return Fault(
        "score",
        f"the {'score' if what == 'reward' else what + ' score'} of response {row} is {scores[row].item()} "
        f"({len(bad)} such)",
        completions.prompts[row],
        completions.responses[row],
        row,
        values={"score": scores[row].item()},
    )
