"""Policies that TRL's GRPO and RLOO train: the recipe's reward, PPO's evaluation and log, exact resuming.

Text became tokens before: a row of the dataset stands for a row of the pipeline, with the prompt's own ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from wpr import trl
from wpr.language_models import pad
from wpr.pipeline.sft import end_with
from wpr.pipeline.training import Resumable, show_progress
from wpr.ppo.actor_critic import ActorCritic
from wpr.ppo.advantages import assemble_rewards
from wpr.ppo.collect import WORKING_COPIES, Collector
from wpr.ppo.config import PPOConfig
from wpr.ppo.distributed import max_over_processes, sum_over_processes
from wpr.ppo.evaluation import HeldOutEvaluation
from wpr.ppo.faults import TrainingFault, report_fault
from wpr.ppo.generation import EngineError, GenerationError
from wpr.ppo.metrics import FunctionLog, Stopwatch, number_or_none, peak_memory_gb, scored
from wpr.ppo.parts import make_monitors, place_regularizer, place_reward, sampling_of
from wpr.ppo.prompts import PromptCollator, RolloutSampler
from wpr.ppo.rollout import Prompts, Responses
from wpr.rewards import Reward, ScoreShaping
from wpr.trl_settings import not_drawn

NAMES = {
    "regularizer/penalty": "penalty",
    "regularizer/divergence": "divergence",
    "regularizer/reverse-kl": "kl",
    "completions/mean_length": "response_length",
    "clip_ratio/region_mean": "clip_fraction",
    "reward": "score_shaped",  # PPO's `reward` has the penalties in it
    "step_time": "seconds_step",
}
"""What TRL logs, and what PPO calls the same."""


class PolicyTrainer(Resumable, HeldOutEvaluation):
    """One of TRL's trainers in the pipeline.

    shared: the settings that all trainers have; responses are evaluated with them as PPO's are. title: of the progress.
    reward, monitors, regularizer, eval_regularizers: as of `PPOTrainer`.
    """

    def __init__(
        self,
        model: Any,
        args: Any,
        shared: PPOConfig,
        title: str,
        *,
        reward: Reward,
        monitors: Mapping[str, Any],
        eval_regularizers: Mapping[str, Any],
        train_dataset: Sequence[Mapping[str, Any]],
        eval_dataset: Sequence[Mapping[str, Any]] | None,
        processing_class: Any,
        **options: Any,
    ) -> None:
        from datasets import Dataset

        self.rows, self.shared = train_dataset, shared
        self.stopwatch = Stopwatch(args.device)
        end_with(model, shared.stop_token_ids or [])
        prompts = [processing_class.decode(row["input_ids"]) for row in train_dataset]
        back_end = shared.back_end.make(args.device, processes=args.world_size, stopwatch=self.stopwatch)
        # By itself TRL draws as our own plain back end does; graphs are faster, where they have its settings.
        trl_draws = shared.generation == "auto" and (args.device.type != "cuda" or any(not_drawn(args).values()))
        super().__init__(
            model,
            self.score,
            args,
            train_dataset=Dataset.from_dict({"prompt": prompts, "row": range(len(prompts))}),
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            regularizer_beta=shared.beta,
            regularizer_memory_mb=2 / WORKING_COPIES * shared.logits_memory_mb,  # there it is of the logits alone
            generation=None if trl_draws else back_end,
            **options,
        )
        show_progress(self, title)
        # Evaluations draw as many responses as they are told, and end them as TRL does.
        shared.responses_per_prompt, shared.stop_token_ids = args.num_generations_eval, self.eos_token_ids
        policy = self.accelerator.unwrap_model(self.model)
        self.actor_critic = ActorCritic(policy, None)  # its value head is not asked for anything
        self.shaping = ScoreShaping(shared.missing_eos_penalty, shared.normalize_rewards, shared.reward_clip)
        self.sum = sum_over_processes(self.accelerator)
        self.reward = place_reward(reward, shared.reward_weights, self.actor_critic, self.accelerator, processing_class)
        anchor = policy if self.reference is None else self.reference
        self.eval_regularizers = {
            name: place_regularizer(other, anchor, self.accelerator) for name, other in eval_regularizers.items()
        }
        self.collector = Collector(
            shared, self.accelerator, processing_class, self.reference, self.reward, self.regularizer,
            back_end, sampling_of(shared, policy, processing_class), self.stopwatch,
            make_monitors(monitors, policy, self.accelerator), self.eval_regularizers,
        )  # fmt: skip

    def score(
        self, completion_ids: list[list[int]], row: list[int], log_metric: Any, log_extra: Any, **_: Any
    ) -> list[float | list[float] | None]:
        """TRL's reward function: scores as the policy learns from them, or what tokens get of them. Those of reward and
        monitors are logged.
        """
        rows, device = [self.rows[number] for number in row], self.args.device
        tokens, mask = pad(completion_ids, device=device)
        finished = torch.tensor([ids[-1] in self.eos_token_ids for ids in completion_ids], device=device)
        columns = {name: [one[name] for one in rows] for name in rows[0] if name not in ("input_ids", "prompt")}
        prompts = Prompts(*pad([one["input_ids"] for one in rows], left=True, device=device))
        responses = Responses(tokens, mask.bool(), finished)
        logged, texts = FunctionLog(len(rows), self.collector.monitors), [one["prompt"] for one in rows]
        completions = self.collector.completions(prompts, responses, texts, columns, logged, self.state)
        scores, placed, watched, fault = self.collector.score(completions)
        if max_over_processes(self.accelerator, int(fault is not None)):
            folder, step = Path(self.args.output_dir), self.state.global_step
            message, path = report_fault(fault, folder, step, self.args.process_index)
            raise TrainingFault(f"step {step}: {message}. Fix the cause and run again", path)
        parts = {f"rewards/{name}/mean": part for name, part in self.collector.part_scores().items()}
        for name, values in ({"score": scores, "eos_fraction": finished.float()} | watched | parts).items():
            if len(known := scored(values)):
                log_metric(name, known.mean().item())
        for name, value in logged.metrics:
            log_metric(name, value)
        for name, column in logged.columns.items():
            log_extra(name, column)
        shaped = self.shaping(scores, finished, self.sum)
        if not placed.any():
            return [number_or_none(score) for score in shaped]
        rewards = assemble_rewards(shaped, torch.zeros_like(placed), mask.bool(), 0.0, self.shaping.scale * placed)
        return [
            None if score.isnan() else tokens[: len(ids)].tolist()
            for score, tokens, ids in zip(shaped, rewards, completion_ids, strict=True)
        ]

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return self._prompt_ids, None, {}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._prompt_ids = [list(self.rows[one["row"]]["input_ids"]) for one in inputs]
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        return batch

    def _generate(self, *args: Any) -> Any:
        with self.stopwatch("generation"):
            try:
                return super()._generate(*args)
            except (EngineError, GenerationError) as error:
                raise TrainingFault(
                    f"step {self.state.global_step}: {error}. The checkpoints in {self.args.output_dir} are as they "
                    "were; fix the cause and resume",
                    None,
                ) from error

    def _penalties(self, *args: Any) -> Any:
        with self.stopwatch("scoring"):
            return super()._penalties(*args)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.stopwatch("backpropagation"):
            return super().training_step(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, by the names of PPO's log."""
        metrics = self._metrics["train"]
        for name, known in NAMES.items():
            if name in metrics:
                metrics[known] = metrics.pop(name)
        if "loss" in logs:
            metrics["beta"] = [self.regularizer_beta or self.beta]
            metrics["peak_memory_gb"] = [peak_memory_gb(self.args.device)]
            seconds = self.stopwatch.drain()
            whole = seconds.pop("backpropagation", 0.0)
            parts = [value for part, value in seconds.items() if part != "weight_sync"]  # that is in generation
            for part, value in (seconds | {"backpropagation": whole - sum(parts)}).items():
                metrics[f"seconds_{part}"] = [value]
        super().log(logs, start_time)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Prompts in their order, as PPO has them."""
        collate = PromptCollator(self.processing_class, self.shared.max_prompt_length)
        return self.accelerator.prepare_data_loader(
            DataLoader(eval_dataset, batch_size=self.args.per_device_eval_batch_size, collate_fn=collate)
        )

    def _get_train_sampler(self, dataset: Any = None) -> RolloutSampler:
        args = self.args  # TRL's sampler would begin its first epoch again in a run that is resumed later
        return RolloutSampler(
            self.train_dataset if dataset is None else dataset,
            group=args.generation_batch_size // args.num_generations,
            repeats=args.steps_per_generation * args.num_iterations,
            shuffle=args.train_sampling_strategy != "sequential",
            seed=args.seed if args.data_seed is None else args.data_seed,
            rollouts_done=lambda: self.state.global_step // self.shared.steps_per_rollout,
            each=args.num_generations,
        )

    def _own_state(self) -> dict[str, Any]:
        """The running moments of scores, and completions that are not used up yet."""
        within = self._step % (self.args.steps_per_generation * self.num_iterations)
        return {
            "within": within,
            "completions": self._buffered_inputs if within else None,
            "moments": self.shaping.moments.state_dict(),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self._step, self._buffered_inputs = state["within"], state["completions"]
        self.shaping.moments.load_state_dict(state["moments"])


class GRPOPolicyTrainer(PolicyTrainer, trl.GRPOTrainer):
    """GRPO in the pipeline."""


class RLOOPolicyTrainer(PolicyTrainer, trl.RLOOTrainer):
    """RLOO in the pipeline."""


TRAINERS = {"grpo": GRPOPolicyTrainer, "rloo": RLOOPolicyTrainer}
