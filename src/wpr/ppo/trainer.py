"""`PPOTrainer`: PPO with a critic, under any policy regularizer, as a transformers Trainer.

The Trainer's loop is left as it is: it asks for micro-batches, accumulates gradients, steps the optimizer, logs, saves
and resumes. A *rollout* spans several of its micro-batches: at the first of them responses are drawn and measured
(`collect.Collector`), and each one then learns from its share of them. `docs/ppo.md` has the formulas.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PrinterCallback, ProgressCallback, TrainerState
from transformers.trainer_utils import TrainOutput

from wpr.language_models import check_split, cudnn_attention_disabled, is_partitioned, is_peft, without_dropout
from wpr.ppo import checkpoints
from wpr.ppo.actor_critic import ActorCritic
from wpr.ppo.actor_critic_trainer import ActorCriticTrainer
from wpr.ppo.advantages import assemble_rewards, explained_variance, generalized_advantages, whiten
from wpr.ppo.beta import AdaptiveBeta, BetaController, ScheduledBeta
from wpr.ppo.collect import Collector, Experience
from wpr.ppo.config import PPOConfig
from wpr.ppo.console import ConsoleCallback, report_table, write_completions
from wpr.ppo.distributed import (
    check_fsdp,
    is_sharded,
    max_over_processes,
    names_of_all,
    place_frozen,
    sum_over_processes,
)
from wpr.ppo.evaluation import EVALUATION, Evaluation
from wpr.ppo.faults import Fault, TrainingFault, describe_gradient, describe_loss, write_fault
from wpr.ppo.generation import Generation, TransformersGeneration
from wpr.ppo.losses import policy_loss, value_loss
from wpr.ppo.metrics import Metrics, Stopwatch, peak_memory_gb
from wpr.ppo.parts import (
    check_apart,
    check_critic,
    check_reward_vocabulary,
    check_vocabularies,
    load_critic,
    load_policy,
    make_monitors,
    place_regularizer,
    sampling_of,
    tokenizer_folder,
    use_one_gpu,
)
from wpr.ppo.prompts import PromptCollator, RolloutSampler
from wpr.ppo.rollout import Rollout, minibatch_rows
from wpr.ppo.rollout_log import completion_rows, note_rollout
from wpr.ppo.trainer_state import restore, state_of
from wpr.regularizers import Regularizer
from wpr.rewards import RunningMoments, as_reward

logger = logging.getLogger(__name__)


class PPOTrainer(ActorCriticTrainer):
    """Algorithm 2 of the paper, for any `Regularizer`.

    Example::

        trainer = PPOTrainer(
            model="path/to/sft", critic="path/to/reward-model", reward="path/to/reward-model",
            regularizer="semantic", args=PPOConfig("out", beta=0.05), train_dataset=prompts,
        )
        trainer.train()
    """

    def __init__(
        self,
        model: Any,
        args: PPOConfig,
        *,
        reward: Any,
        regularizer: Regularizer | str = "semantic",
        reference: Any = None,
        critic: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        generation: Generation | None = None,
        monitors: Mapping[str, Any] | None = None,
        eval_regularizers: Mapping[str, Regularizer | str] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        """Set up a run.

        model: the policy: a causal LM, a PEFT model, or a folder or hub name.
        reward: see `wpr.rewards.as_reward`.
        regularizer: one of `wpr.regularizers`, or a name: ``"semantic"`` and ``"paper"`` are the presets of
            `Wasserstein` on the reference's own embeddings, others are those of `make_regularizer`.
        reference: None is the policy with its adapter off for a PEFT model, else a frozen copy of the policy.
        critic: a sequence-classification model with one label, or its folder; None with ``args.share_backbone``.
        train_dataset: rows with ``prompt`` (text or chat messages) or ``input_ids``; other columns reach reward
            functions.
        processing_class: the tokenizer; by default that of ``model``'s folder.
        generation: where responses come from; by default transformers' ``generate``.
        monitors: scores by name, given as rewards are, that are logged and never learned from: what tells whether a
            reward model is being fooled.
        eval_regularizers: regularizers by name, whose divergence evaluations measure beside the own one's, so that
            policies under different ones can be compared.
        """
        if not isinstance(args, PPOConfig):
            raise TypeError(f"args is a {type(args).__name__}; pass a PPOConfig")
        model, critic, reference, reward = (
            str(part) if isinstance(part, Path) else part for part in (model, critic, reference, reward)
        )
        if isinstance(model, str) and processing_class is None:
            from transformers import AutoTokenizer

            processing_class = AutoTokenizer.from_pretrained(tokenizer_folder(model))
        policy = load_policy(model, peft_config)
        critic = load_critic(critic, args)
        own_reference = reference is None and is_peft(policy)
        if reference is None and not own_reference:
            if is_partitioned(policy):
                raise ValueError("under ZeRO-3 the reference cannot be copied from the policy; pass reference=")
            reference = copy.deepcopy(policy)
        elif isinstance(reference, str):
            reference = load_policy(reference, None)
        if reference is policy:
            raise ValueError(
                "reference and model are the same object, which would freeze the policy; pass reference=None"
            )
        use_one_gpu(args)
        actor_critic = ActorCritic(policy, critic)
        if args.disable_dropout:
            without_dropout(actor_critic)
        super().__init__(
            model=actor_critic,
            args=args,
            data_collator=PromptCollator(processing_class, args.max_prompt_length),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.model_accepts_loss_kwargs = False  # the loss is a mean over tokens that `compute_loss` counts itself
        self.console = ConsoleCallback(bar=not args.disable_tqdm)
        self.remove_callback(ProgressCallback)
        self.remove_callback(PrinterCallback)
        self.add_callback(self.console)

        check_fsdp(self.accelerator)
        device = self.accelerator.device
        check_split(policy)
        check_critic(actor_critic)
        self.reference = None if own_reference else place_frozen(reference, self.accelerator)
        if self.reference is not None:
            check_split(self.reference)
            check_vocabularies(policy, self.reference)
        self.reward = as_reward(reward)
        check_apart(self.reward, critic)
        check_reward_vocabulary(self.reward, policy)
        if hasattr(self.reward, "to"):
            self.reward.to(device)
        self.regularizer = place_regularizer(regularizer, policy if own_reference else self.reference, self.accelerator)
        anchor = policy if own_reference else self.reference
        self.eval_regularizers = {
            name: place_regularizer(other, anchor, self.accelerator)
            for name, other in (eval_regularizers or {}).items()
        }
        self.monitors = make_monitors(monitors or {}, policy, device)
        self.stopwatch = Stopwatch(device)
        self.collector = Collector(
            args, self.accelerator, processing_class, self.reference, self.reward, self.regularizer,
            generation or TransformersGeneration(synced=is_sharded(self.accelerator)),
            sampling_of(args, policy, processing_class), self.stopwatch, self.monitors, self.eval_regularizers,
        )  # fmt: skip
        self.evaluated: list[dict[str, Any]] = []
        self.sum, self.agree = sum_over_processes(self.accelerator), names_of_all(self.accelerator)
        self._reset()

    def _reset(self) -> None:
        args = self.args
        self.beta: BetaController = (
            AdaptiveBeta(args.beta, args.target_divergence, args.beta_rate, args.beta_gain)
            if args.target_divergence is not None
            else ScheduledBeta(args.beta, args.beta if args.beta_end is None else args.beta_end, args.beta_schedule)
        )
        self.moments = RunningMoments()
        self.metrics = Metrics()
        self.skipped = 0
        self.rollouts = 0  # begun so far: what seeds are made from, also if sizes change between rollouts
        self.rollout: Rollout | None = None
        self.micro_batch = 0  # of the current rollout, the next to be learned from
        self.idle = False  # the rest of the current rollout is left out
        self.step_left_out = False
        self.critic_rate = 0.0
        self.update_sums: dict[str, float] = {}
        self.update_tokens = 1.0
        self._resume_from: Path | None = None

    # ---- the loop ----

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train; see `Trainer.train`. ``resume_from_checkpoint=True`` takes the newest whole checkpoint: one that was
        being written when a run was killed is passed over.
        """
        self._reset()
        folder = self._resolve_checkpoint(resume_from_checkpoint)
        self._resume_from = folder
        if folder is not None and (finished := self._finished(folder)) is not None:
            return finished
        try:
            return super().train(resume_from_checkpoint=None if folder is None else str(folder), **kwargs)
        finally:
            self.console.close()

    def _finished(self, folder: Path) -> TrainOutput | None:
        """What a run that needs no more steps returns, its weights loaded. (The Trainer would take one more.)"""
        state = TrainerState.load_from_json(str(folder / "trainer_state.json"))
        args = self.args
        steps = args.max_steps
        if steps <= 0:
            if not hasattr(self.train_dataset, "__len__"):
                return None
            groups = len(self.train_dataset) // (args.prompts_per_device * self.accelerator.num_processes)
            steps = math.ceil(args.num_train_epochs * groups * args.steps_per_rollout)
        if steps == 0 or state.global_step < steps or self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return None
        logger.warning("%s has all %d steps; nothing is left to train", folder, steps)
        self.state = state
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self._load_best_model()
        else:
            self._load_from_checkpoint(str(folder))
        return TrainOutput(state.global_step, 0.0, {})

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One micro-batch: at a rollout's first, collect it; then learn from the micro-batch's share of it."""
        if self._resume_from is not None:
            restore(self, self._resume_from)
            self._resume_from = None
        if self.micro_batch == 0:
            self._begin_rollout(inputs)
        accumulation = self.args.gradient_accumulation_steps
        number, self.micro_batch = self.micro_batch, self.micro_batch + 1
        self.micro_batch %= self.args.steps_per_rollout * accumulation
        loss = torch.zeros((), device=self.args.device)
        if not self.idle:
            with cudnn_attention_disabled():
                loss = self._learn(model, number)
        self.step_left_out = self.idle
        if self.step_left_out:
            # No step is taken: weights and the optimizer's moments stay as they are, and the schedule goes on.
            self.accelerator.gradient_state._set_sync_gradients(False)
        elif (number + 1) % accumulation == 0:
            self._end_update()
        if self.micro_batch == 0:
            self.rollout = None
        return loss

    def _learn(self, model: nn.Module, number: int) -> Tensor:
        """Loss and gradients of micro-batch ``number`` of the rollout."""
        if number % self.args.gradient_accumulation_steps == 0:
            self._begin_update(number)
        assert self.rollout is not None
        try:
            with self.stopwatch("backpropagation"):
                batch = self.rollout.take(self._rows(number))
                loss: Tensor = super().training_step(model, {"micro_batch": batch})
        except _LossFaultError as error:
            model.zero_grad()
            self._refuse(error.fault)
            return torch.zeros((), device=self.args.device)
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> Tensor:
        """The PPO loss of one micro-batch, as its share of the mean over all tokens of the update."""
        batch: Rollout = inputs["micro_batch"]
        args = self.args
        slices = self.collector.slices(int(batch.mask.sum()), self.actor_critic)
        log_probs, values = model(
            batch.input_ids, batch.attention_mask, batch.mask, temperature=args.logprob_temperature, slices=slices
        )
        policy, sums = policy_loss(log_probs, batch.log_probs, batch.advantages, batch.mask, args.clip_range)
        value, value_sums = value_loss(values, batch.values, batch.returns, batch.mask, args.value_clip_range)
        total = (policy + args.value_coefficient * value) / self.update_tokens
        if max_over_processes(self.accelerator, int(not torch.isfinite(total))):
            raise _LossFaultError(describe_loss(batch, log_probs, values, policy, value, self._text))
        count = float(batch.mask.sum())
        sums = {**sums, **value_sums, "policy_loss": policy.detach(), "value_loss": value.detach()}
        for name, summed in sums.items():
            self.metrics.add(name, float(summed), count)
        self.update_sums["approx_kl"] = self.update_sums.get("approx_kl", 0.0) + float(sums["approx_kl"])
        # Processes' gradients are averaged and the Trainer divides by the micro-batches: both are undone here.
        scale = self.accelerator.num_processes * self.current_gradient_accumulation_steps
        scaled: Tensor = total * scale
        return scaled

    def _begin_rollout(self, inputs: dict[str, Any]) -> None:
        """Draw responses, measure them, and turn scores and penalties into advantages."""
        self.idle = False
        args = self.args
        number = self.rollouts
        self.rollouts += 1
        inputs = self._prepare_inputs(inputs)
        first = self.accelerator.process_index * args.responses_per_device
        result = self.collector.collect(self.actor_critic, inputs, number, first)
        if self._refuse(result if isinstance(result, Fault) else None):
            return
        assert isinstance(result, Experience)
        beta = self.beta.beta(self.state.global_step / self.state.max_steps)
        scores = self._shape_scores(result)
        penalties = result.scatter_to_mask(result.measures.penalty)
        rewards = assemble_rewards(scores, penalties, result.mask, beta)
        advantages, returns = generalized_advantages(rewards, result.values, result.mask, args.gamma, args.gae_lambda)
        explained = float(explained_variance(result.values, returns, result.mask, self.sum))
        note_rollout(self.metrics, result, rewards, beta, explained, self.reward)
        if scores is not result.scores:
            self.metrics.add("score_shaped", scores)
        if args.whiten_advantages:
            advantages = whiten(advantages, result.mask, self.sum)
        self.rollout = Rollout(
            result.input_ids, result.attention_mask, result.mask,
            result.scatter_to_mask(result.measures.log_prob), result.values, advantages, returns,
        )  # fmt: skip
        measured = getattr(result.measures, args.target_measure)
        total, count = self.sum(torch.stack([measured.sum(), measured.new_tensor(len(measured))]).double()).tolist()
        self.beta.update(total / max(count, 1))
        if args.log_completions and number % args.log_completions_steps == 0:
            self._log_completions(completion_rows(result, args.log_completions, self.state.global_step))

    def _shape_scores(self, result: Experience) -> Tensor:
        """Scores as they are placed on the responses: end-of-sequence penalty, normalisation, clip."""
        scores = result.scores
        if self.args.missing_eos_penalty is not None:
            scores = scores - self.args.missing_eos_penalty * (~result.finished).float()
        if self.args.normalize_rewards:
            self.moments.update(scores, self.sum)
            scores = self.moments.normalise(scores)
        if self.args.reward_clip is not None:
            scores = scores.clamp(-self.args.reward_clip, self.args.reward_clip)
        return scores

    def _rows(self, number: int) -> Tensor:
        """Responses of a micro-batch of the rollout."""
        args = self.args
        processes, process = self.accelerator.num_processes, self.accelerator.process_index
        own = minibatch_rows(number, args, processes, process, [args.seed, self.rollouts])
        return torch.from_numpy(own).to(args.device)

    def _begin_update(self, number: int) -> None:
        """Count the tokens of the whole update, over its micro-batches and processes."""
        assert self.rollout is not None
        steps = range(number, number + self.args.gradient_accumulation_steps)
        tokens = torch.stack([self.rollout.mask[self._rows(step)].sum() for step in steps]).sum()
        self.update_tokens = float(self.sum(tokens.double()).clamp_min(1))
        self.update_sums = {}

    def _end_update(self) -> None:
        limit = self.args.update_kl_limit
        if limit is None:
            return
        total = torch.tensor(self.update_sums.get("approx_kl", 0.0), dtype=torch.float64, device=self.args.device)
        far = float(self.sum(total)) / self.update_tokens > limit
        self.metrics.add("early_stop", float(far))
        self.idle = far

    # ---- faults ----

    def _refuse(self, fault: Fault | None) -> bool:
        """If any process has a fault: write it, and stop or, where allowed, leave out the rest of the rollout."""
        if not max_over_processes(self.accelerator, int(fault is not None)):
            return False
        path = None
        if fault is not None:
            path = write_fault(fault, self.folder, self.state.global_step, self.args.process_index)
        self.skipped += 1
        told = (
            f"{fault.message}; written to {path}" if fault else "another process met a fault; see its file in faults/"
        )
        if self.skipped > self.args.max_skipped_rollouts:
            raise TrainingFault(
                f"step {self.state.global_step}: {told}. No step was taken; the checkpoints in "
                f"{self.args.output_dir} are as they were. Fix the cause and resume, or allow rollouts to be left "
                f"out with max_skipped_rollouts (now {self.args.max_skipped_rollouts})",
                path,
            )
        if fault is not None and fault.kind == "loss" and self.is_deepspeed_enabled:
            raise TrainingFault(f"step {self.state.global_step}: {told}. DeepSpeed cannot leave out a step", path)
        logger.warning("step %d: %s. Rollout left out (%d so far)", self.state.global_step, told, self.skipped)
        self.metrics.add("skipped_rollouts", 1.0)
        self.idle = True
        return True

    def _text(self, tokens: Tensor) -> str:
        if self.processing_class is None:
            return str(tokens.tolist())
        return str(self.processing_class.decode(tokens.tolist()))

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.step_left_out:
            return torch.zeros((), device=self.args.device)
        norm = super()._clip_grad_norm(model)
        for name, value in self.part_norms.items():
            self.metrics.add(name, value)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The last look before the optimizer's step: gradients that are not finite are refused too."""
        self.critic_rate = float(self.optimizer.param_groups[-1]["lr"])  # of this step, as the Trainer's own
        if self.step_left_out:
            return torch.zeros((), device=self.args.device)
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        value = float("nan") if norm is None else float(norm)
        # A gradient scaler (fp16) meets overflows by itself; DeepSpeed has taken its step already.
        if norm is not None and not np.isfinite(value) and self.accelerator.scaler is None:
            if self.is_deepspeed_enabled:
                raise TrainingFault(
                    f"step {self.state.global_step}: the gradient's norm is {value}, and DeepSpeed has taken the step; "
                    "resume from the last checkpoint, with a lower learning_rate or max_grad_norm",
                    None,
                )
            model.zero_grad()
            self._refuse(describe_gradient(value, self.part_norms))
            self.step_left_out = True
            self.accelerator.gradient_state._set_sync_gradients(False)
        return norm

    # ---- logs ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what happened since the last log, over all processes, to the Trainer's own numbers."""
        if "loss" in logs:
            logs |= self.metrics.drain(self.sum, self.args.device, self.agree)
            seconds = self.stopwatch.drain()
            if "scoring" in seconds:  # the models' forward passes, without the penalty that is computed in between
                seconds["scoring"] -= seconds.get("penalty", 0.0)
            logs |= {f"seconds_{subject}": value for subject, value in seconds.items()}
            logs["peak_memory_gb"] = peak_memory_gb(self.args.device)
            logs["critic_learning_rate"] = self.critic_rate
        super().log(logs, start_time)

    def _log_completions(self, rows: list[dict[str, Any]]) -> None:
        """Sampled responses of the main process, as a table and as a file."""
        if not self.is_world_process_zero():
            return
        write_completions(rows, self.folder, self.state.global_step)
        self.console.show(rows, self.state.global_step)
        report_table(rows)

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
                self.actor_critic, self._prepare_inputs(batch), EVALUATION, first, evaluating=True
            ),
            self._refuse_evaluation,
            self.accelerator,
            self.args.responses_per_prompt,
        )
        training_clock, self.collector.stopwatch = self.collector.stopwatch, Stopwatch(self.args.device)
        try:
            evaluation.run(self.get_eval_dataloader(dataset), len(dataset), self.args.per_device_eval_batch_size)
        finally:
            self.collector.stopwatch = training_clock
        self.evaluated = evaluation.responses()
        found = evaluation.metrics.drain(self.sum, self.args.device, self.agree)
        values = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(values)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, values)
        return values

    def _refuse_evaluation(self, fault: Fault | None) -> None:
        """Stop at a batch that some process met a fault in or, where allowed, leave it out."""
        path = write_fault(fault, self.folder, self.state.global_step, self.args.process_index) if fault else None
        told = f"{fault.message}; written to {path}" if fault else "another process met a fault"
        if self.skipped >= self.args.max_skipped_rollouts:
            limit = self.args.max_skipped_rollouts
            raise TrainingFault(f"evaluation: {told}. Fix the cause, or raise max_skipped_rollouts (now {limit})", path)
        self.skipped += 1
        logger.warning("evaluation: %s. This batch is left out", told)

    # ---- data, optimizer, checkpoints ----

    def get_train_dataloader(self) -> Any:
        """Prompts in groups of a rollout; see `RolloutSampler`."""
        if self.train_dataset is None:
            raise ValueError("training needs train_dataset, rows with a 'prompt'")
        if not hasattr(self.train_dataset, "__len__"):
            raise ValueError(
                "a dataset without a length cannot be grouped into rollouts; load it whole, or take(n) of it"
            )
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self.args.prompts_per_device,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> RolloutSampler:
        args = self.args
        return RolloutSampler(
            self.train_dataset if train_dataset is None else train_dataset,
            group=args.prompts_per_device * self.accelerator.num_processes,
            repeats=args.steps_per_rollout * args.gradient_accumulation_steps,
            shuffle=args.train_sampling_strategy != "sequential",
            seed=args.seed if args.data_seed is None else args.data_seed,
            rollouts_done=lambda: self.state.global_step // args.steps_per_rollout,
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """If the folder is there, from an earlier run, it is marked as not whole before any of it is written again."""
        if self.args.should_save:
            mark = self.folder / f"checkpoint-{self.state.global_step}" / "trainer_state.json"
            mark.unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """With the generators' states, the last that every process writes before the first one closes the
        checkpoint.
        """
        super()._save_rng_state(output_dir)
        checkpoints.save_state(state_of(self), Path(output_dir), self.args.process_index)
        self.accelerator.wait_for_everyone()


class _LossFaultError(RuntimeError):
    """Carries a fault out of the loss, past the backward pass."""

    def __init__(self, fault: Fault | None) -> None:
        super().__init__("the loss is not finite")
        self.fault = fault
