"""A Trainer that learns from rollouts, each of which spans several of its micro-batches.

The Trainer's loop is left as it is: it asks for micro-batches, accumulates gradients, steps the optimizer, logs, saves
and resumes. At a rollout's first micro-batch it is collected; each one then learns from its share. After a fault the
rest of a rollout is left out, and a checkpoint may fall into the middle of one.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerState
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_utils import TrainOutput

from wpr.language_models import cudnn_attention_disabled
from wpr.ppo import checkpoints
from wpr.ppo.actor_critic_trainer import ActorCriticTrainer
from wpr.ppo.console import ConsoleCallback
from wpr.ppo.distributed import EndsInTime, check_fsdp, max_over_processes, names_of_all, sum_over_processes
from wpr.ppo.faults import Fault, TrainingFault, describe_gradient, report_fault
from wpr.ppo.metrics import Metrics, Stopwatch, peak_memory_gb
from wpr.ppo.prompts import RolloutSampler
from wpr.ppo.rollout import Rollout, minibatch_rows

logger = logging.getLogger(__name__)


class RolloutTrainer(EndsInTime, ActorCriticTrainer):
    """Rollouts in the Trainer's loop. What they are, and what is learned from them, is said by the methods that are
    not implemented here, and by ``compute_loss``, which is given ``{"micro_batch": Rollout}``.
    """

    def __init__(self, **options: Any) -> None:
        """``options`` are those of `transformers.Trainer`."""
        super().__init__(**options)
        self.model_accepts_loss_kwargs = False  # the loss is a mean over tokens that `compute_loss` counts itself
        self.console = ConsoleCallback(bar=not self.args.disable_tqdm)
        self.remove_callback(DEFAULT_PROGRESS_CALLBACK)
        self.remove_callback(PrinterCallback)
        self.add_callback(self.console)
        check_fsdp(self.accelerator)
        self.stopwatch = Stopwatch(self.accelerator.device)
        self.sum, self.agree = sum_over_processes(self.accelerator), names_of_all(self.accelerator)
        self._reset()

    @abstractmethod
    def _begin_rollout(self, inputs: dict[str, Any]) -> None:
        """Set ``rollout``, or leave it out by `_refuse`."""

    @abstractmethod
    def _begin_update(self, number: int) -> None:
        """Called before micro-batch ``number`` of the rollout, the first of an optimizer step."""

    @abstractmethod
    def _end_update(self) -> None:
        """Called after the last micro-batch of an optimizer step."""

    def _reset(self) -> None:
        self.metrics = Metrics()
        self.skipped = 0
        self.rollouts = 0  # begun so far: what seeds are made from, also if sizes change between rollouts
        self.rollout: Rollout | None = None
        self.micro_batch = 0  # of the current rollout, the next to be learned from
        self.idle = False  # the rest of the current rollout is left out
        self.step_left_out = False
        self.critic_rate = 0.0
        self._resume_from: Path | None = None

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
            self.restore(checkpoints.load_state(self._resume_from, self.args.process_index, self.args.fixed_in_rollout))
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
        except LossFaultError as error:
            model.zero_grad()
            self._refuse(error.fault)
            return torch.zeros((), device=self.args.device)
        return loss

    def _rows(self, number: int) -> Tensor:
        """Responses of a micro-batch of the rollout."""
        args = self.args
        processes, process = self.accelerator.num_processes, self.accelerator.process_index
        own = minibatch_rows(number, args, processes, process, [args.seed, self.rollouts])
        return torch.from_numpy(own).to(args.device)

    def _refuse(self, fault: Fault | None) -> bool:
        """If any process has a fault: write it, and stop or, where allowed, leave out the rest of the rollout."""
        if not max_over_processes(self.accelerator, int(fault is not None)):
            return False
        message, path = report_fault(fault, self.folder, self.state.global_step, self.args.process_index)
        self.skipped += 1
        if self.skipped > self.args.max_skipped_rollouts:
            raise TrainingFault(
                f"step {self.state.global_step}: {message}. No step was taken; the checkpoints in "
                f"{self.args.output_dir} are as they were. Fix the cause and resume, or allow rollouts to be left "
                f"out with max_skipped_rollouts (now {self.args.max_skipped_rollouts})",
                path,
            )
        if fault is not None and fault.kind == "loss" and self.is_deepspeed_enabled:
            raise TrainingFault(f"step {self.state.global_step}: {message}. DeepSpeed cannot leave out a step", path)
        logger.warning("step %d: %s. Rollout left out (%d so far)", self.state.global_step, message, self.skipped)
        self.metrics.add("skipped_rollouts", 1.0)
        self.idle = True
        return True

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

    def own_state(self) -> dict[str, Any]:
        """The rollout if it is not used up yet, metrics, and what the Trainer has gathered for its log."""
        within = self.micro_batch != 0
        return {
            "sizes": self.args.fixed_in_rollout,
            "steps_per_rollout": self.args.steps_per_rollout,
            "rollout": self.rollout.state_dict() if within and self.rollout is not None else None,
            "idle": self.idle,
            "micro_batch": self.micro_batch,
            "rollouts": self.rollouts,
            "metrics": self.metrics.state_dict(),
            "skipped": self.skipped,
            "loss": self._tr_loss.cpu(),
            "total_loss": self._total_loss_scalar,
            "last_logged": self._globalstep_last_logged,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what `own_state` gave."""
        self.skipped, self.rollouts = state["skipped"], state["rollouts"]
        if state["sizes"]["world_size"] != self.args.world_size:
            return  # what follows is of one process each
        self.micro_batch, self.idle = state["micro_batch"], state["idle"]
        if state["rollout"] is not None:
            self.rollout = Rollout.from_state_dict(state["rollout"], self.args.device)
        self.metrics.load_state_dict(state["metrics"])
        self._tr_loss += state["loss"].to(self.args.device)
        self._total_loss_scalar, self._initial_global_step = state["total_loss"], 0
        self._globalstep_last_logged = state["last_logged"]


class LossFaultError(RuntimeError):
    """Carries a fault out of the loss, past the backward pass."""

    def __init__(self, fault: Fault | None) -> None:
        super().__init__("the loss is not finite")
        self.fault = fault
