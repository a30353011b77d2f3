"""What a `PPOTrainer` keeps between steps beyond weights and optimizer: taken for a checkpoint, and put back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wpr.ppo import checkpoints
from wpr.ppo.rollout import Rollout

if TYPE_CHECKING:
    from wpr.ppo.trainer import PPOTrainer

logger = logging.getLogger(__name__)

SIZES = (
    "world_size", "per_device_train_batch_size", "gradient_accumulation_steps", "num_minibatches", "ppo_epochs",
    "responses_per_prompt", "seed", "logprob_temperature",
)  # fmt: skip
"""Settings that must not change in the middle of a rollout."""


def state_of(trainer: PPOTrainer) -> dict[str, Any]:
    """Beta, moments, metrics, the rollout if it is not used up yet, and what the Trainer has gathered for its log."""
    within = trainer.micro_batch != 0
    return {
        "sizes": _sizes(trainer),
        "steps_per_rollout": trainer.args.steps_per_rollout,
        "rollout": trainer.rollout.state_dict() if within and trainer.rollout is not None else None,
        "idle": trainer.idle,
        "micro_batch": trainer.micro_batch,
        "rollouts": trainer.rollouts,
        "beta_kind": type(trainer.beta).__name__,
        "beta": trainer.beta.state_dict(),
        "moments": trainer.moments.state_dict(),
        "metrics": trainer.metrics.state_dict(),
        "skipped": trainer.skipped,
        "loss": trainer._tr_loss.cpu(),
        "total_loss": trainer._total_loss_scalar,
        "last_logged": trainer._globalstep_last_logged,
    }


def restore(trainer: PPOTrainer, folder: Path) -> None:
    """Put back what the checkpoint ``folder`` holds."""
    args = trainer.args
    state = checkpoints.load_state(folder, args.process_index, _sizes(trainer))
    if state["beta_kind"] == type(trainer.beta).__name__:
        trainer.beta.load_state_dict(state["beta"])
    else:
        logger.warning("beta was set by %s, now by %s: it starts anew", state["beta_kind"], type(trainer.beta).__name__)
    trainer.moments.load_state_dict(state["moments"])
    trainer.skipped, trainer.rollouts = state["skipped"], state["rollouts"]
    if state["sizes"]["world_size"] != args.world_size:
        return  # what follows is of one process each
    trainer.micro_batch, trainer.idle = state["micro_batch"], state["idle"]
    if state["rollout"] is not None:
        trainer.rollout = Rollout.from_state_dict(state["rollout"], args.device)
    trainer.metrics.load_state_dict(state["metrics"])
    trainer._tr_loss += state["loss"].to(args.device)
    trainer._total_loss_scalar, trainer._initial_global_step = state["total_loss"], 0
    trainer._globalstep_last_logged = state["last_logged"]


def _sizes(trainer: PPOTrainer) -> dict[str, float]:
    return {name: getattr(trainer.args, name) for name in SIZES}
