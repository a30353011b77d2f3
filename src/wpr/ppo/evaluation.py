"""Measuring a policy on held-out prompts: a response to each, always drawn with the same seeds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from wpr.ppo.actor_critic import ActorCritic
from wpr.ppo.collect import Collector, Experience
from wpr.ppo.distributed import max_over_processes, names_of_all, sum_over_processes
from wpr.ppo.faults import Fault, TrainingFault, report_fault
from wpr.ppo.generation import rollout_of
from wpr.ppo.metrics import Metrics, Stopwatch, number_or_none
from wpr.ppo.rollout_log import note_scores

logger = logging.getLogger(__name__)

EVALUATION = 1 << 40
"""Rollout number of evaluations: every one draws with the same seeds, which no training rollout has."""

Collect = Callable[[dict[str, Any], int], "Experience | Fault"]
Refuse = Callable[[Fault | None], None]
_Trainer: Any = object  # a Trainer stands behind it


class Evaluation:
    """Means over all prompts, and every response by itself.

    collect: draws and measures the responses of a batch whose first prompt has the given number.
    refuse: called on all processes when any has met a fault; raises unless the batch may be left out.
    """

    def __init__(self, collect: Collect, refuse: Refuse, accelerator: Any, responses_per_prompt: int) -> None:
        self.collect = collect
        self.refuse = refuse
        self.accelerator = accelerator
        self.responses_per_prompt = responses_per_prompt
        self.metrics = Metrics()
        self.rows: list[dict[str, Any]] = []

    def run(self, batches: Iterable[dict[str, Any]], prompts: int, batch_size: int) -> None:
        """Go through this process's batches of a dataset of so many prompts."""
        for number, batch in enumerate(batches):
            first = (number * self.accelerator.num_processes + self.accelerator.process_index) * batch_size
            real = max(0, prompts - first)  # beyond it, prompts were repeated to fill up the last batch
            result = self.collect(batch, first * self.responses_per_prompt)
            fault = result if isinstance(result, Fault) else None
            if max_over_processes(self.accelerator, int(fault is not None)):
                self.refuse(fault)
                continue
            assert isinstance(result, Experience)
            self._note(result, first, real * self.responses_per_prompt)

    def _note(self, result: Experience, first: int, real: int) -> None:
        """Count the first ``real`` responses of a batch."""
        counted = torch.arange(len(result.scores), device=result.scores.device) < real
        of_token = counted[result.mask.nonzero()[:, 0]]
        lengths = result.mask.sum(-1)
        note_scores(self.metrics, result, counted)
        self.metrics.add("response_length", lengths[counted])
        self.metrics.add("eos_fraction", result.finished[counted].float())
        for name in ("penalty", "divergence", "kl", "entropy"):
            self.metrics.add(name, getattr(result.measures, name)[of_token])
        for name, values in result.measures.eval_regularizers.items():
            self.metrics.add(f"divergence_{name}", values[of_token])
        sums = {
            name: result.scatter_to_mask(getattr(result.measures, name)).sum(-1)
            for name in ("penalty", "kl", "divergence")
        }
        others = {
            name: result.scatter_to_mask(values).sum(-1) for name, values in result.measures.eval_regularizers.items()
        }
        start = result.input_ids.shape[1] - result.mask.shape[1]
        for row in range(min(real, len(result.scores))):
            tokens, seen = result.input_ids[row], result.attention_mask[row].bool()
            self.rows.append(
                {
                    "number": first * self.responses_per_prompt + row,
                    "prompt_ids": tokens[:start][seen[:start]].tolist(),
                    "response_ids": tokens[start:][result.mask[row]].tolist(),
                    "prompt": result.completions.prompts[row],
                    "response": result.completions.responses[row],
                    "score": number_or_none(result.scores[row]),
                    "length": int(lengths[row]),
                    "finished": bool(result.finished[row]),
                    **{name: float(values[row]) for name, values in sums.items()},
                    **{name: number_or_none(values[row]) for name, values in result.watched.items()},
                    "divergences": {name: float(values[row]) for name, values in others.items()},
                    "columns": {name: values[row] for name, values in result.completions.columns.items()},
                }
            )

    def responses(self) -> list[dict[str, Any]]:
        """Every response of all processes, in the order of the prompts."""
        from accelerate.utils import gather_object

        rows = gather_object(self.rows) if self.accelerator.num_processes > 1 else self.rows
        return sorted(rows, key=lambda row: int(row["number"]))


class HeldOutEvaluation(_Trainer):  # type: ignore[misc]
    """`evaluate` for a Trainer that has a `Collector` and an `ActorCritic` to draw with.

    evaluated: every response of the last evaluation. skipped: batches and rollouts that were left out for faults.
    """

    collector: Collector
    actor_critic: ActorCritic
    control: Any
    evaluated: Sequence[dict[str, Any]] = ()
    skipped = 0

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Draw a response to every prompt of the evaluation set, always with the same seeds, and measure it. The
        responses themselves are in ``evaluated`` afterwards.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):  # one of several, by its name
            dataset = self.eval_dataset[dataset]
        if isinstance(dataset, dict):
            results = [self.evaluate(part, None, f"{metric_key_prefix}_{name}") for name, part in dataset.items()]
            return {name: value for result in results for name, value in result.items()}
        evaluation = Evaluation(
            lambda batch, first: self.collector.collect(
                self.actor_critic,
                Trainer._prepare_inputs(self, batch),
                EVALUATION,
                first,
                evaluating=True,
                trainer_state=self.state,
            ),
            self._refuse_evaluation,
            self.accelerator,
            self.collector.config.responses_per_prompt,
        )
        training_clock, self.collector.stopwatch = self.collector.stopwatch, Stopwatch(self.args.device)
        try:
            with rollout_of(self.collector.generation):
                evaluation.run(self.get_eval_dataloader(dataset), len(dataset), self.args.per_device_eval_batch_size)
        finally:
            self.collector.stopwatch = training_clock
        self.evaluated = evaluation.responses()
        found = evaluation.metrics.drain(
            sum_over_processes(self.accelerator), self.args.device, names_of_all(self.accelerator)
        )
        values = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(values)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, values)
        return values

    def _refuse_evaluation(self, fault: Fault | None) -> None:
        """Stop at a batch that some process met a fault in or, where allowed, leave it out."""
        folder = Path(self.args.output_dir)
        message, path = report_fault(fault, folder, self.state.global_step, self.args.process_index)
        limit = self.collector.config.max_skipped_rollouts
        if self.skipped >= limit:
            raise TrainingFault(
                f"evaluation: {message}. Fix the cause, or raise max_skipped_rollouts (now {limit})", path
            )
        self.skipped += 1
        logger.warning("evaluation: %s. This batch is left out", message)
