"""What a checkpoint folder holds beyond the Trainer's own files, and which folders are whole.

checkpoint-<step>/                the policy, as an ordinary transformers (or PEFT adapter) folder
    critic/                       the critic, as an ordinary sequence-classification folder
    value_head.safetensors        or, with a shared backbone, its head
    ppo_state_<rank>.pt           beta, running moments, metrics, and the rollout if it is not used up yet
    trainer_state.json            written last, once all processes are done: a folder without it was never finished

A folder that was finished may still have been damaged since, or have lost files, by a full disk or a broken copy.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wpr.atomic_io import unused_path
from wpr.damaged_files import first_damaged, weights_file
from wpr.language_models import is_peft
from wpr.ppo.actor_critic import ActorCritic

logger = logging.getLogger(__name__)

CRITIC = "critic"
VALUE_HEAD = "value_head.safetensors"
PPO_STATE = "ppo_state_{}.pt"
LOGS_STATE = "{}-logs_state.pt"
"""Per process: what `PPOTrainer` keeps, and what the trainers of SFT and reward stages have gathered for their log."""
PARTITIONED = ("global_step*", "latest", "pytorch_model_fsdp*")
"""What DeepSpeed and FSDP write in place of weights and optimizer."""


def is_finished(folder: Path) -> bool:
    """Whether everything was written before the process ended, however it ended."""
    return (folder / "trainer_state.json").exists()


def damage(folder: Path) -> str | None:
    """What keeps training from going on from a checkpoint that was finished; None where it is whole."""
    found = first_damaged(folder.rglob("*"))
    if found is not None:
        return found
    if (missing := next(_missing(folder), None)) is not None:
        return f"{folder} is damaged ({missing} is missing)"
    state = json.loads((folder / "trainer_state.json").read_bytes().decode("utf-8-sig"))
    has_step = isinstance(state, dict) and isinstance(state.get("global_step"), int)
    return None if has_step else f"{folder / 'trainer_state.json'} is damaged (it has no global_step)"


def _missing(folder: Path) -> Iterator[str]:
    """Files that are not there and that the trainers always write."""
    has_critic, has_head = (folder / CRITIC).is_dir(), (folder / VALUE_HEAD).is_file()
    is_ppo = has_critic or has_head or any(folder.glob(PPO_STATE.format("*")))
    is_partitioned = any(any(folder.glob(pattern)) for pattern in PARTITIONED)
    if not is_partitioned:
        yield from _missing_weights(folder)
        if has_critic:
            yield from (f"{CRITIC}/{name}" for name in _missing_weights(folder / CRITIC))
        elif is_ppo and not has_head:
            yield f"{CRITIC} or {VALUE_HEAD}"
    own = PPO_STATE if is_ppo else LOGS_STATE
    numbered = _ranks(folder, "rng_state_{}.pth")
    ranks = numbered | _ranks(folder, own) or {0}
    rng = "rng_state_{}.pth" if numbered or max(ranks) > 0 else "rng_state.pth"
    # Ranks begin at 0, but for save_on_each_node=True.
    names = [pattern.format(rank) for rank in range(min(ranks), max(ranks) + 1) for pattern in (rng, own)]
    names += [] if is_partitioned else ["optimizer.pt", "scheduler.pt"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing != names:  # else it was written with save_only_model=True
        yield from missing


def _missing_weights(folder: Path) -> Iterator[str]:
    """Of a model or of its adapters; PEFT puts adapters that are not called "default" into folders of their own."""
    configs = folder.rglob("adapter_config.json")
    adapters = [config.parent for config in configs if CRITIC not in config.relative_to(folder).parts]
    for adapter in adapters:
        if weights_file(adapter) is None:
            yield str((adapter / "adapter_model.safetensors").relative_to(folder))
    if not adapters:
        if weights_file(folder) is None:
            yield "model.safetensors"
        if not (folder / "config.json").is_file():
            yield "config.json"


def _ranks(folder: Path, pattern: str) -> set[int]:
    """The numbers of the processes that wrote such files."""
    before, after = pattern.split("{}")
    found = {path.name.removeprefix(before).removesuffix(after) for path in folder.glob(pattern.format("*"))}
    return {int(rank) for rank in found if rank.isdigit()}


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


def thin(output_dir: Path, keep: str) -> None:
    """Free the space of a finished stage's checkpoints. keep: ``all`` leaves them, ``none`` leaves nothing, ``weights``
    leaves the model's own files, as ``weights-STEP``: nothing takes that for a checkpoint to go on from.
    """
    if keep == "all" or not output_dir.is_dir():
        return
    for folder in checkpoints_in(output_dir):
        if keep == "weights" and next(_missing_weights(folder), None) is None:
            resuming = {CRITIC, VALUE_HEAD, "optimizer.pt", "optimizer.bin", "scheduler.pt", "training_args.bin"}
            patterns = ("*rng_state*.pth", PPO_STATE.format("*"), LOGS_STATE.format("*"), *PARTITIONED)
            found = {path for pattern in (*resuming, *patterns) for path in folder.glob(pattern)}
            for path in found:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            folder.rename(unused_path(folder.with_name(folder.name.replace("checkpoint-", "weights-"))))
        else:
            shutil.rmtree(folder)


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
    torch.save(state, folder / PPO_STATE.format(rank))


def load_state(folder: Path, rank: int, sizes: dict[str, float]) -> dict[str, Any]:
    """Read it back. Between rollouts ``sizes`` (processes, batches, passes) may change; within one they may not."""
    path = folder / PPO_STATE.format(rank)
    path = path if path.exists() else folder / PPO_STATE.format(0)
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
