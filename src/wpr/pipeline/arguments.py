"""From a stage's section of the recipe to the arguments of its trainer."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from wpr.config.recipe import Recipe
from wpr.config.trainers import REGULARIZER_SETTINGS, config_class, is_shared
from wpr.errors import RecipeError
from wpr.ppo.config import PPOConfig

NO_EFFECT = {
    "logging_first_step", "logging_steps", "logging_strategy", "save_steps", "save_strategy",
    "save_total_limit", "report_to", "run_name", "disable_tqdm", "dataloader_num_workers", "dataloader_pin_memory",
    "dataset_num_proc", "log_completions", "log_completions_steps", "log_level", "eval_strategy", "eval_steps",
    "per_device_eval_batch_size", "project", "trackio_space_id", "gradient_checkpointing", "activation_offloading",
    "torch_empty_cache_steps", "generation_batch_size", "scoring_batch_size", "logits_memory_mb",
    "vllm_url", "vllm_memory", "vllm_max_length", "vllm_folder",
    "num_completions_to_print", "log_unique_prompts", "log_multimodal", "log_completions_hub_repo",
}  # fmt: skip
"""Settings that may change between two runs of a stage: they do not change what is trained."""


def trainer_arguments(recipe: Recipe, stage: str, folder: Path, processes: int, bf16: bool) -> dict[str, Any]:
    """Keyword arguments of the stage's config class; of a policy that TRL trains, those that all trainers share.

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
    if stage == "ppo" and recipe.trainer != "ppo":
        section = {name: value for name, value in section.items() if is_shared(name)}
        section |= {"logprob_temperature": section.get("temperature", PPOConfig.temperature)}
        section.pop("responses_per_prompt", None)  # its groups may be spread over processes: see `trl_arguments`
    return values | section


def trl_arguments(recipe: Recipe, shared: PPOConfig, arguments: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the config class of TRL's trainer. ``shared``: the config of ``arguments``, from
    `trainer_arguments`; where both have a default of a setting, that of `PPOConfig` holds, as for PPO.
    """
    kind, common = config_class(recipe.trainer), {setting.name for setting in fields(TrainingArguments)}
    defaults: list[dict[str, Any]] = [{one.name: one.default for one in fields(each)} for each in (PPOConfig, kind)]
    given = {name: default for name, default in defaults[0].items() if default != defaults[1].get(name, default)}
    given = {name: value for name, value in (given | arguments).items() if name in common}
    own = {name: value for name, value in getattr(recipe, recipe.trainer).items() if name not in REGULARIZER_SETTINGS}
    drawn = ({"min_new_tokens": shared.min_new_tokens} if shared.min_new_tokens else {}) | (
        own.pop("generation_kwargs", None) or {}
    )
    times = recipe.ppo.get("responses_per_prompt")
    group = defaults[1]["num_generations"] if times is None else times
    batch = shared.responses_per_device * shared.world_size
    if group < 2 or batch % group:
        raise RecipeError(
            f"trainer: {recipe.trainer} compares the responses to a prompt: a rollout of {batch} responses "
            f"(ppo.batch_size times ppo.num_minibatches) cannot hold groups of ppo.responses_per_prompt={group}; set "
            "that to 2 or more, and the batch to a multiple of it"
        )
    return given | own | {
        "metric_for_best_model": shared.metric_for_best_model,
        "greater_is_better": shared.greater_is_better,
        "beta": own.get("beta", 0.0),  # the regularizer stands in its place
        "num_generations": group,
        "num_generations_eval": own.get("num_generations_eval") or times or 1,  # as PPO evaluates
        "num_iterations": shared.ppo_epochs,
        "steps_per_generation": shared.num_minibatches * shared.gradient_accumulation_steps,
        "max_completion_length": shared.max_new_tokens,
        "temperature": shared.temperature,
        "top_k": shared.top_k,
        "top_p": shared.top_p,
        "epsilon": shared.clip_range,
        "disable_dropout": shared.disable_dropout,
        "generation_kwargs": drawn or None,
    }  # fmt: skip


def make_trl_config(recipe: Recipe, shared: PPOConfig, arguments: dict[str, Any]) -> Any:
    """The config of TRL's trainer, for a policy that it trains; see `trl_arguments`."""
    from wpr.trl_settings import check_settings

    args = make_config(recipe.trainer, trl_arguments(recipe, shared, arguments))
    if args.beta and shared.beta:
        raise RecipeError(
            f"{recipe.trainer}.beta={args.beta} is the weight of TRL's own KL estimate, ppo.beta={shared.beta} that of "
            "the regularizer; set one of them to 0"
        )
    try:
        check_settings(args, regularizer_beta=shared.beta, **regularizer_settings(recipe))
    except ValueError as error:
        raise RecipeError(f"{recipe.trainer}: {error}") from None
    return args


def regularizer_settings(recipe: Recipe) -> dict[str, Any]:
    """Where TRL's trainer has the regularizer, and what tokens pay for their future; see `wpr.trl`."""
    return {name: getattr(recipe, recipe.trainer).get(name, kinds[0]) for name, kinds in REGULARIZER_SETTINGS.items()}


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
