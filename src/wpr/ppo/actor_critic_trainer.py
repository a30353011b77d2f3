"""A Trainer for a policy and a critic: two learning rates, two gradient clips, and checkpoints of two ordinary
models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from wpr.ppo import checkpoints
from wpr.ppo.actor_critic import ActorCritic
from wpr.ppo.config import PPOConfig


class ActorCriticTrainer(Trainer, ABC):  # type: ignore[misc]
    """What of the Trainer is particular to an `ActorCritic`, whatever it learns from."""

    args: PPOConfig
    optimizer: Any
    control: Any

    @property
    def actor_critic(self) -> ActorCritic:
        """The module itself, without DDP's or DeepSpeed's wrapper."""
        return self.model  # type: ignore[no-any-return]

    @property
    def folder(self) -> Path:
        """Where the run is written to."""
        return Path(self.args.output_dir)

    def create_optimizer(self, model: Any = None) -> Any:
        """Four groups: policy and critic, each with and without weight decay; the critic's come last."""
        if self.optimizer is not None:
            return self.optimizer
        model = self.model if model is None else model
        args = self.args
        decayed = set(self.get_decay_parameter_names(model))
        critic_rate = args.learning_rate if args.critic_learning_rate is None else args.critic_learning_rate
        groups = []
        for is_policy, rate in ((True, args.learning_rate), (False, critic_rate)):
            for decays in (True, False):
                chosen = [
                    parameter
                    for name, parameter in model.named_parameters()
                    if parameter.requires_grad
                    and name.startswith("policy.") == is_policy
                    and (name in decayed) == decays
                ]
                if chosen:
                    groups.append({"params": chosen, "weight_decay": args.weight_decay if decays else 0.0, "lr": rate})
        kind, options = self.get_optimizer_cls_and_kwargs(args, model)
        self.optimizer = kind(groups, **options)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Policy and critic by themselves, so that a critic far from its target does not silence the policy. DeepSpeed
        clips both together, inside its engine.
        """
        if self.is_deepspeed_enabled:
            return super()._clip_grad_norm(model)
        norms = []
        for is_policy in (True, False):
            chosen = [p for name, p in self.actor_critic.named_parameters() if name.startswith("policy.") == is_policy]
            norm = self.accelerator.clip_grad_norm_(chosen, self.args.max_grad_norm)
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # FSDP: of sharded gradients
        self.part_norms = {"policy_grad_norm": float(norms[0]), "critic_grad_norm": float(norms[1])}
        return torch.stack(norms).norm()

    part_norms: dict[str, float] = {}  # noqa: RUF012 (replaced, never changed)

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """What this process's part of a checkpoint keeps beyond weights, optimizer and random generators."""

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
        checkpoints.save_state(self.own_state(), Path(output_dir), self.args.process_index)
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        checkpoints.save_parts(self.actor_critic, folder, state_dict)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            checkpoints.load_parts(self.actor_critic, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            checkpoints.load_parts(self.actor_critic, Path(self.state.best_model_checkpoint))

    def _resolve_checkpoint(self, resume: str | bool | None) -> Path | None:
        if not resume:
            return None
        if resume is True:
            folder = checkpoints.last_complete_checkpoint(self.folder)
            if folder is None:
                raise ValueError(
                    f"no whole checkpoint in {self.args.output_dir}; call train() without resume_from_checkpoint"
                )
            return folder
        folder = Path(resume)
        found = checkpoints.damage(folder) if checkpoints.is_finished(folder) else "its trainer_state.json is missing"
        if found is not None:
            raise ValueError(
                f"{folder} is not a whole checkpoint: {found}; use resume_from_checkpoint=True for the newest whole one"
            )
        return folder
