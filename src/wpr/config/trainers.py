"""What trains a policy: PPO, or TRL's GRPO and RLOO, and which settings each of them takes.

Settings that mean the same for all stand in the recipe's `ppo`, under one name and with one default; what TRL alone has
stands in `grpo` and `rloo`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Literal, cast

from wpr.config.typed import Where, convert, field_types, unknown
from wpr.data.rows import shown
from wpr.errors import RecipeError

TRL_TRAINERS = ("grpo", "rloo")

PPO_ONLY = {
    **dict.fromkeys(("critic_learning_rate", "share_backbone", "value_clip_range", "value_coefficient"), "no critic"),
    **dict.fromkeys(("gamma", "gae_lambda"), "no critic, and no advantages made of its values"),
    **dict.fromkeys(("beta_schedule", "beta_end"), "a constant beta"),
    **dict.fromkeys(("target_divergence", "target_measure", "beta_rate", "beta_gain"), "a constant beta"),
    "whiten_advantages": "a scale of its own (grpo.scale_rewards, rloo.normalize_advantages)",
    "update_kl_limit": "no early end of a rollout",
    "penalty_clip": "penalties as they are",
    **dict.fromkeys(("log_completions", "log_completions_steps"), "a log of its own (grpo.log_completions)"),
}
"""Settings of `ppo` that the other trainers do not take, and what these have instead."""

NEVER_IGNORED = ("ppo.beta_schedule", "ppo.beta_end", "ppo.target_divergence")
"""Those of them that would change what is optimized: they are refused also where policies share them."""

RENAMED = {
    "num_generations": "ppo.responses_per_prompt",
    "max_completion_length": "ppo.max_new_tokens",
    "num_iterations": "ppo.ppo_epochs",
    "steps_per_generation": "ppo.num_minibatches",
    "generation_batch_size": "ppo.num_minibatches",
    "epsilon": "ppo.clip_range",
    "reward_clip_range": "ppo.reward_clip",
    "shuffle_dataset": "ppo.train_sampling_strategy",
    "batch_size": "ppo.batch_size",
    **dict.fromkeys(("model_init_kwargs", "trust_remote_code"), "the section model"),
    **dict.fromkeys(("reward_weights", "multi_objective_aggregation"), "the section scorer, which is one reward"),
    "chat_template_kwargs": "data.template",
}
"""TRL's names of what recipes call otherwise."""

FIXED = dict.fromkeys(
    ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), "a reference that stays as it was"
)
"""TRL's settings that recipes do not have, and what they have instead."""

REGULARIZER_SETTINGS = {"regularizer_in": ("reward", "loss"), "regularizer_future": ("divergence", "penalty")}
"""What `wpr.trl` takes beside TRL's settings, by its values, the default first."""


@cache
def config_class(section: str) -> type:
    """The class whose fields a section of the recipe holds: a stage's, or a trainer's."""
    if section == "ppo":
        from wpr.ppo import PPOConfig

        return PPOConfig
    try:
        import trl
    except ImportError:
        raise RecipeError(
            "SFT, reward models, GRPO and RLOO need TRL; install it with `pip install 'wpr[train]'`"
        ) from None
    names = {"sft": "SFTConfig", "reward": "RewardConfig", "grpo": "GRPOConfig", "rloo": "RLOOConfig"}
    return cast(type, getattr(trl, names[section]))


def is_shared(name: str) -> bool:
    """Whether a setting of `ppo` is one for all trainers."""
    return name not in PPO_ONLY


def own_settings(trainer: str) -> dict[str, Any]:
    """Names and types of what TRL's trainer takes beside the settings of `ppo`."""
    from wpr.trl_settings import LOSS_TYPES

    elsewhere = {*filter(is_shared, field_types(config_class("ppo"))), *RENAMED, *FIXED} - {"beta"}  # of TRL's KL
    found = {name: kind for name, kind in field_types(config_class(trainer)).items() if name not in elsewhere}
    choices: dict[str, Any] = {  # TRL looks at these only when it trains
        "scale_rewards": Literal["group", "batch", "none", True, False],
        "loss_type": Literal[LOSS_TYPES],
        "importance_sampling_level": Literal["token", "sequence"],
    }
    found |= {name: kind for name, kind in choices.items() if name in found}
    return found | {name: Literal[kinds] for name, kinds in REGULARIZER_SETTINGS.items()}


def trl_section(trainer: str, values: Any, where: Where) -> dict[str, Any]:
    """The section of TRL's trainer, its names and types checked."""
    if values is None or values == {}:
        return {}
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where(trainer)}: {trainer}={shown(values, 200)} must be settings (`name: value`)")
    known, shared = own_settings(trainer), field_types(config_class("ppo"))
    for name in values:
        key = f"{trainer}.{name}"
        if name in known:
            continue
        if name in RENAMED or (name in shared and is_shared(name)):
            raise RecipeError(
                f"{where(key)}: {key} has another name in recipes, one for all trainers: "
                f"{RENAMED.get(name, f'ppo.{name}')}"
            )
        if name in PPO_ONLY or name in FIXED:
            raise _meaningless(key, trainer, where)
        raise unknown(key, known, where, trainer)
    return {name: convert(value, known[name], f"{trainer}.{name}", where) for name, value in values.items()}


def check_trainer(recipe: Any, said: Collection[str], where: Where) -> None:
    """Refuse settings of a policy's recipe that its trainer does not take.

    said: dotted settings that are the policy's own, or the command line's or a sweep's: those that have no meaning for
    its trainer are refused. The recipe's own `ppo` and `grpo` may have some, since its policies share them.
    """
    trainer = recipe.trainer
    for key in said:
        if (section := key.partition(".")[0]) in TRL_TRAINERS and section != trainer:
            raise RecipeError(
                f"{where(key)}: {key} is set, but trainer is {trainer}; set trainer: {section}, or drop it"
            )
    if trainer == "ppo":
        return
    config_class(trainer)
    for key in unused_settings(recipe):
        if key in NEVER_IGNORED or key in said:
            raise _meaningless(key, trainer, where)
    drawn = recipe.ppo.get("temperature", _default("temperature"))
    if (trained := recipe.ppo.get("logprob_temperature", drawn)) != drawn:
        raise RecipeError(
            f"{where('ppo.logprob_temperature')}: ppo.logprob_temperature={trained} has no meaning for trainer: "
            f"{trainer}, which trains the distribution that it draws from, at ppo.temperature={drawn}; set both alike"
        )


def unused_settings(recipe: Any) -> list[str]:
    """Dotted settings of a recipe, other than their defaults, that its trainer does not take."""
    if recipe.trainer == "ppo":
        return []
    found = [f"ppo.{name}" for name, value in recipe.ppo.items() if not is_shared(name) and value != _default(name)]
    return found if recipe.critic == "auto" else [*found, "critic"]


def _default(name: str) -> Any:
    return next(setting.default for setting in dataclasses.fields(config_class("ppo")) if setting.name == name)


def _meaningless(key: str, trainer: str, where: Where) -> RecipeError:
    instead = (PPO_ONLY | FIXED).get(key.rpartition(".")[2], "no critic")
    return RecipeError(f"{where(key)}: {key} has no meaning for trainer: {trainer}, which has {instead}; drop it")
