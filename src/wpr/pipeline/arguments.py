"""From a stage's section of the recipe to the arguments of its trainer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from wpr.config.recipe import Recipe, config_class
from wpr.errors import RecipeError

NO_EFFECT = {
    "logging_first_step", "logging_steps", "logging_strategy", "save_steps", "save_strategy",
    "save_total_limit", "report_to", "run_name", "disable_tqdm", "dataloader_num_workers", "dataloader_pin_memory",
    "dataset_num_proc", "log_completions", "log_completions_steps", "log_level", "eval_strategy", "eval_steps",
    "per_device_eval_batch_size", "project", "trackio_space_id", "gradient_checkpointing", "activation_offloading",
    "torch_empty_cache_steps", "generation_batch_size", "scoring_batch_size", "logits_memory_mb",
}  # fmt: skip
"""Settings that may change between two runs of a stage: they do not change what is trained."""


def trainer_arguments(recipe: Recipe, stage: str, folder: Path, processes: int, bf16: bool) -> dict[str, Any]:
    """Keyword arguments of the stage's config class.

    What the recipe leaves open is filled in: precision, lengths, trackers, and from ``batch_size`` the steps of
    accumulation on this number of processes.
    """
    section = dict(getattr(recipe, stage) or {})
    values: dict[str, Any] = {"output_dir": str(folder / "checkpoints"), "seed": recipe.seed}
    values |= batch_arguments(section, stage, processes)
    if "bf16" not in section and "fp16" not in section:
        values |= precision_arguments(recipe.model.precision, bf16)
    longest = recipe.data.max_prompt_tokens + recipe.data.max_completion_tokens
    if stage in ("sft", "reward"):
        values |= {"max_length": longest, "save_total_limit": 2}
    if stage == "sft":
        values["completion_only_loss"] = True
    if stage == "ppo":
        values |= {"max_prompt_length": recipe.data.max_prompt_tokens, "save_total_limit": 2,
                   "max_new_tokens": recipe.data.max_completion_tokens}  # fmt: skip
    values["report_to"] = ["tensorboard"] if importlib.util.find_spec("tensorboard") else "none"
    section.pop("batch_size", None)
    return values | section


def batch_arguments(section: dict[str, Any], stage: str, processes: int) -> dict[str, int]:
    """Per-device batch and accumulation that make up ``batch_size`` exactly, with as large a batch as is allowed."""
    total = section.get("batch_size")
    if total is None:
        return {}
    if total % processes:
        raise RecipeError(
            f"{stage}.batch_size={total} cannot be shared by {processes} processes; choose a multiple of {processes}, "
            "or another number of processes"
        )
    each = total // processes
    wanted = section.get("per_device_train_batch_size", 8)
    if wanted < 1:
        raise RecipeError(f"{stage}.per_device_train_batch_size={wanted} must be 1 or more")
    size = next(part for part in range(min(each, wanted), 0, -1) if each % part == 0)
    section.pop("per_device_train_batch_size", None)
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": each // size}


def precision_arguments(precision: str, bf16: bool) -> dict[str, bool]:
    """``bf16`` and ``fp16`` for a setting of `ModelSettings.precision`, given what the device has."""
    chosen = ("bf16" if bf16 else "fp32") if precision == "auto" else precision
    return {"bf16": chosen == "bf16", "fp16": chosen == "fp16"}


def make_config(stage: str, arguments: dict[str, Any]) -> Any:
    """The stage's config object; what its own checks refuse is told as a fault of the recipe."""
    try:
        return config_class(stage)(**arguments)
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{stage}: {error}") from None


def outcome_settings(section: dict[str, Any] | None) -> dict[str, Any] | None:
    """What of a section decides the stage's outcome."""
    if section is None:
        return None
    # With a batch over all devices, that of one device only says in how many steps it is gone through.
    free = NO_EFFECT | ({"per_device_train_batch_size"} if "batch_size" in section else set())
    return {name: value for name, value in section.items() if name not in free}
