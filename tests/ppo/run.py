"""A run of the tiny policy as a program, for tests that need real processes: killed, resumed, several at a time."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.ppo import tiny
from wpr.pipeline.environment import leave_launch
from wpr.ppo import PPOTrainer, TransformersGeneration
from wpr.ppo.generation import Sampling
from wpr.ppo.graph_generation import GraphGeneration
from wpr.ppo.rollout import Prompts, Responses


def digest(model: torch.nn.Module) -> str:
    """One number for all weights, to the last bit."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


class Pause(transformers.TrainerCallback):
    """Slows a run down, so that there is time to kill it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(self.seconds)

    on_step_end = on_substep_end


class Silent(TransformersGeneration):
    """Draws responses, and keeps them to itself."""

    def generate(self, *args: Any) -> Responses:
        made = super().generate(*args)
        return Responses(made.tokens, made.mask & False, made.finished)


def main(train: Callable[[list[str]], None]) -> None:
    """Runs one after the other, between "+" in the command line: most of a short run's time is spent on imports."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    arguments = [*sys.argv[1:], "+"]
    while arguments:
        end = arguments.index("+")
        train(arguments[:end])
        arguments = arguments[end + 1 :]
    leave_launch()


def train(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--regularizer", default="semantic")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--resume-from", type=Path, help="a checkpoint of another run, copied into the folder first")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument(
        "--reference", type=Path, help="a folder; loaded after the settings are made, as ZeRO-3 asks for"
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--silent-rank", type=int, help="a process whose responses are all empty")
    parser.add_argument("--copied", action="store_true", help="responses are drawn from a whole copy of the policy")
    parser.add_argument("--sharded-draw", action="store_true", help="instead of training: see `sharded_draw`")
    options = parser.parse_args(arguments)
    if options.sharded_draw:
        return sharded_draw(options.folder)
    if "deepspeed" in options.settings:
        communicate_without_compiling()
    parts: dict[str, Any] = {"callbacks": [Pause(options.pause)], "train_dataset": tiny.prompts(options.prompts)}
    if "eval_strategy" in options.settings:
        parts["eval_dataset"] = tiny.prompts(5)
    if options.silent_rank is not None and int(os.environ["RANK"]) == options.silent_rank:
        parts["generation"] = Silent()
    if options.copied:
        parts["generation"] = GraphGeneration(TransformersGeneration(synced=True), say=refuse, graphs=False)
    if options.regularizer == "semantic":
        options.settings.setdefault("beta", 0.1)
    if options.reference:
        parts["reference"] = str(options.reference)
    trainer: PPOTrainer = tiny.trainer(
        options.folder, regularizer=options.regularizer, build=wide_policy, parts=parts, **options.settings
    )
    if options.resume_from:
        if trainer.is_world_process_zero():
            shutil.copytree(options.resume_from, options.folder / options.resume_from.name)
        trainer.accelerator.wait_for_everyone()
    trainer.train(resume_from_checkpoint=options.resume or bool(options.resume_from) or None)
    trainer.save_model()
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(str(options.folder / "final_state.json"))
        state = {"weights": digest(trainer.model) if not trainer.is_deepspeed_enabled else ""}
        (options.folder / "final.json").write_text(json.dumps(state))
    trainer.accelerator.wait_for_everyone()


def refuse(message: str) -> None:
    raise AssertionError(message)


def sharded_draw(folder: Path) -> None:
    """Draw from a policy that FSDP 2 holds in parts, with and without an adapter, and from the same in one piece: each
    process another number of responses.
    """
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard

    torch.distributed.is_initialized() or torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    found: dict[str, list[Any]] = {}
    for name, whole in {"plain": wide_policy(), "adapter": get_peft_model(wide_policy(), adapter)}.items():
        rows = 3 + 2 * rank
        given = Prompts(torch.tensor([[5, 9, 11]] * rows), torch.ones(rows, 3, dtype=torch.long))
        settings = (given, Sampling(1.0, 0, 1.0, 0, 12, (1,)), range(len(given)))
        drawn = TransformersGeneration().generate(whole, *settings)
        for layer in (*(whole.get_base_model() if name == "adapter" else whole).model.layers, whole):
            fully_shard(layer)
        assert all(hasattr(weight, "full_tensor") for weight in whole.parameters())
        copied = GraphGeneration(say=refuse, graphs=False).generate(whole, *settings)
        found[name] = [one.tokens[one.mask].tolist() for one in (drawn, copied)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def communicate_without_compiling() -> None:
    """DeepSpeed's processes on a CPU exchange float32 through an operation that it compiles, which takes a minute, or
    else through gloo.
    """
    backend: Any = importlib.import_module("deepspeed.comm.torch")  # as an attribute of the package it is torch itself
    assert backend.build_shm_op
    backend.build_shm_op = lambda: None


def wide_policy() -> Any:
    """Sharper than a fresh model, so that penalties are not all alike."""
    model = tiny.policy()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model


if __name__ == "__main__":
    main(train)
