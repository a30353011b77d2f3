"""TRL's trainers on the tiny Llama of tests/ppo/tiny.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, RLOOConfig

from tests.ppo import tiny
from wpr.trl import GRPOTrainer, RLOOTrainer

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def counts_w7(completions: list[str], **columns: Any) -> list[float]:
    """A reward: how often the word w7 occurs."""
    return [float(completion.split().count("w7")) for completion in completions]


def prompts(count: int = 16) -> Dataset:
    """Of one to four words."""
    return Dataset.from_list([{"prompt": row["prompt"]} for row in tiny.prompts(count)])


def trainer(
    folder: Path | str, algorithm: str = "grpo", model: Any = None, parts: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """A run of the tiny policy; ``parts`` replaces what the trainer is given, ``changes`` its settings."""
    kind, config = TRAINERS[algorithm]
    settings = {
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "max_steps": 2, "beta": 0.0,
        "learning_rate": 1e-2, "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1,
        "disable_tqdm": True, "bf16": False, "temperature": 1.0,
    }  # fmt: skip
    given = {
        "reward_funcs": counts_w7,
        "train_dataset": prompts(),
        "processing_class": tiny.tokenizer(),
        **(parts or {}),
    }
    return kind(tiny.policy() if model is None else model, args=config(str(folder), **{**settings, **changes}), **given)


def trls(trainer: Any) -> type:
    """The class of TRL that stands behind a trainer."""
    return next(kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl."))


def batch_of(trainer: Any, prompts: int = 2) -> dict[str, Any]:
    """Prompts with their completions and advantages, as the trainer makes them before a step."""
    trainer.model.train()
    group = trainer.num_generations
    rows = [row for row in list(trainer.train_dataset)[:prompts] for _ in range(group)]
    return trainer._generate_and_score_completions(rows)


def moved(model: Any, seed: int = 3, by: float = 0.1) -> None:
    """Move a policy away from its reference."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(by * torch.randn(parameter.shape, generator=generator))
