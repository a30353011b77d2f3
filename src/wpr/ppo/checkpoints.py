"""What a checkpoint folder holds beyond the Trainer's own files, and which folders are whole.

checkpoint-<step>/                the policy, as an ordinary transformers (or PEFT adapter) folder
    critic/                       the critic, as an ordinary sequence-classification folder
    value_head.safetensors        or, with a shared backbone, its head
    ppo_state_<rank>.pt           beta, running moments, metrics, and the rollout if it is not used up yet
    trainer_state.json            written last, once all processes are done: a folder without it was never finished

A folder that was finished may still have been damaged since, by a full disk or a broken copy.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wpr.damaged_files import first_damaged
from wpr.language_models import is_peft
from wpr.ppo.actor_critic import ActorCritic

logger = logging.getLogger(__name__)

CRITIC = "critic"
VALUE_HEAD = "value_head.safetensors"


def is_finished(folder: Path) -> bool:
    """Whether everything was written before the process ended, however it ended."""
    return (folder / "trainer_state.json").exists()


def damage(folder: Path) -> str | None:
    """What keeps training from going on from a checkpoint that was finished; None where it is whole."""
    found = first_damaged(folder.rglob("*"))
    if found is not None:
        return found
    state = json.loads((folder / "trainer_state.json").read_bytes().decode("utf-8-sig"))
    has_step = isinstance(state, dict) and isinstance(state.get("global_step"), int)
    return None if has_step else f"{folder / 'trainer_state.json'} is damaged (it has no global_step)"


def checkpoints_in(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, the newest first, whatever their state."""
    steps = {folder: folder.name.removeprefix("checkpoint-") for folder in output_dir.glob("checkpoint-*")}
    folders = [folder for folder, step in steps.items() if step.isdigit() and folder.is_dir()]
    return sorted(folders, key=lambda folder: -int(steps[folder]))


def last_complete_checkpoint(output_dir: Path) -> Path | None:
    """The newest checkpoint of a run that training can go on from; of newer ones that are damaged it is said."""
    for folder in checkpoints_in(output_dir):
        if is_finished(folder):
            if (found := damage(folder)) is None:
                return folder
            logger.warning("%s; %s is passed over", found, folder)
    return None


def save_parts(model: ActorCritic, folder: Path, state: dict[str, Tensor] | None) -> None:
    """Policy and critic as folders that ``from_pretrained`` reads. ``state`` is the whole module's, where its own
    weights are in parts.
    """
    with _quiet():
        model.policy.save_pretrained(folder, state_dict=_part(state, "policy."))
        if hasattr(model, "critic"):
            model.critic.save_pretrained(folder / CRITIC, state_dict=_part(state, "critic."))
    if not hasattr(model, "critic"):
        from safetensors.torch import save_file

        head = _part(state, "value_head.") or model.value_head.state_dict()
        save_file({name: tensor.contiguous().cpu() for name, tensor in head.items()}, folder / VALUE_HEAD)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers: they would cut through the run's own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _part(state: dict[str, Tensor] | None, prefix: str) -> dict[str, Tensor] | None:
    if state is None:
        return None
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def load_parts(model: ActorCritic, folder: Path) -> None:
    """Weights of a checkpoint into the module, in place."""
    _load(model.policy, folder)
    if hasattr(model, "critic"):
        _load(model.critic, folder / CRITIC)
    else:
        from safetensors.torch import load_file

        model.value_head.load_state_dict(load_file(folder / VALUE_HEAD))


def _load(model: Any, folder: Path) -> None:
    if is_peft(model):
        own = folder / model.active_adapter  # where PEFT puts adapters that are not called "default"
        own = own if (own / "adapter_config.json").exists() else folder
        if not (own / "adapter_config.json").exists():
            raise FileNotFoundError(f"{folder} holds no adapter; it was written by a run without LoRA: resume without")
        model.load_adapter(str(own), model.active_adapter, is_trainable=True)
        return
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"{folder} holds no {type(model).__name__}; resume with the kind of policy and critic that "
            "wrote the checkpoint"
        )
    # Through from_pretrained: it undoes whatever save_pretrained did to names and layouts.
    with _quiet():
        loaded: nn.Module = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(loaded.state_dict())


def save_state(state: dict[str, Any], folder: Path, rank: int) -> None:
    """Write one process's state: tensors, numbers and text only."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / f"ppo_state_{rank}.pt")


def load_state(folder: Path, rank: int, sizes: dict[str, float]) -> dict[str, Any]:
    """Read it back. Between rollouts ``sizes`` (processes, batches, passes) may change; within one they may not."""
    path = folder / f"ppo_state_{rank}.pt"
    path = path if path.exists() else folder / "ppo_state_0.pt"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing; {folder} is not a checkpoint of PPOTrainer, or was written with save_only_model=True"
        )
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    changed = [
        f"{name} {state['sizes'].get(name)} -> {now}" for name, now in sizes.items() if state["sizes"].get(name) != now
    ]
    if state["micro_batch"] and changed:
        raise ValueError(
            f"{folder} was written in the middle of a rollout, whose sizes have changed: {', '.join(changed)}; resume "
            f"with the same, or from a checkpoint at a multiple of {state['steps_per_rollout']} steps"
        )
    return state
