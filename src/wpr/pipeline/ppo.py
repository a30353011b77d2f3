"""The PPO stage: `PPOTrainer` from the SFT model under the policy's regularizer, measured on held-out prompts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from wpr.pipeline.arguments import make_config
from wpr.pipeline.errors import RecipeError
from wpr.pipeline.folder import write_atomically
from wpr.pipeline.functions import import_function
from wpr.pipeline.model_card import model_card
from wpr.pipeline.models import load_causal, load_scorer, load_tokenizer, lora_config, save_model
from wpr.pipeline.recipe import ScorerSettings
from wpr.pipeline.regularizer import build_regularizer
from wpr.pipeline.stage import Stage, is_main_process
from wpr.pipeline.training import MetricsFile, forget_partial_checkpoints, last_training_log, learned, release
from wpr.ppo.checkpoints import last_complete_checkpoint

logger = logging.getLogger(__name__)


def train_ppo(stage: Stage) -> dict[str, Any]:
    """Train and save the policy; results with what held-out responses are worth before and after, and how far the
    policy went for it.
    """
    from transformers import set_seed

    from wpr.ppo import PPOTrainer

    recipe = stage.recipe
    tokenizer = load_tokenizer(stage.sft_model)
    rows = stage.rows(tokenizer)
    held_out = rows.held_out[: recipe.evaluation.prompts]
    stops = sorted({rows.encoder.end_id, tokenizer.eos_token_id})  # what SFT taught completions to end with
    args = make_config("ppo", {"stop_token_ids": stops} | stage.arguments())
    set_seed(args.seed)  # a new head's weights are drawn from here
    policy = load_causal(recipe.model, stage.sft_model)
    reference = None if recipe.model.lora is not None else load_causal(recipe.model, stage.sft_model)
    trainer = PPOTrainer(
        policy,
        args,
        reward=make_scorer(recipe.scorer, stage.reward_model),
        regularizer=build_regularizer(recipe.regularizer, policy if reference is None else reference),
        reference=reference,  # none: the policy with its adapter off
        critic=None if args.share_backbone else load_scorer(recipe.model, critic_of(stage), tokenizer.pad_token_id),
        train_dataset=rows.train,
        eval_dataset=held_out or None,
        processing_class=tokenizer,
        peft_config=lora_config(recipe.model.lora, "CAUSAL_LM"),
    )
    trainer.console.title = stage.name
    results: dict[str, Any] = {"prompts": len(rows.train), "held_out_prompts": len(held_out)}
    before: list[float] = []
    if held_out:
        results["before"], before = measure(trainer, stage.folder / "responses-before.jsonl")
    trainer.add_callback(MetricsFile(stage.folder / "metrics.jsonl"))
    forget_partial_checkpoints(stage.checkpoints)
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(stage.checkpoints) is not None)
    results["steps"] = trainer.state.global_step
    results["train"] = last_training_log(trainer.state.log_history)
    if held_out:
        results["after"], after = measure(trainer, stage.folder / "responses.jsonl")
        results["win_rate_before"] = win_rate(after, before)
    if trainer.args.should_save:
        save_model(
            trainer.actor_critic.policy, tokenizer, stage.folder / "model", model_card(recipe, stage.name, results)
        )
    release(trainer)
    return results


def critic_of(stage: Stage) -> str:
    """Where the critic starts: the reward model if there is one, else the SFT model with a new head."""
    if stage.recipe.critic != "auto":
        return stage.recipe.critic
    if stage.recipe.reward is not None:
        return str(stage.run.stage("reward") / "model")
    return stage.sft_model


def make_scorer(settings: ScorerSettings, reward_model: str | None) -> Any:
    """What PPO maximises, ready to score."""
    if settings.kind == "function":
        from wpr.rewards import FunctionReward

        assert settings.function is not None
        return FunctionReward(import_function(settings.function, "scorer.function"))
    if settings.kind == "code":
        from wpr.rewards.code import CodeReward, Limits

        try:
            limits = Limits(**settings.limits)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"scorer.limits: {error}") from None
        return CodeReward(limits=limits, workers=settings.workers, unsafe=settings.unsafe)
    from wpr.rewards import RewardModel

    assert reward_model is not None
    return RewardModel.from_pretrained(reward_model)


def measure(trainer: Any, path: Path) -> tuple[dict[str, float], list[float]]:
    """Metrics on the held-out prompts, and the score of each response; the responses go to ``path``."""
    metrics = learned(trainer.evaluate())
    if is_main_process():
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in trainer.evaluated)
        write_atomically(path, "".join(lines))
    found = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    if trainer.reward.name == "code":
        found |= pass_rates(trainer.evaluated)
    return found, [row["score"] for row in trainer.evaluated]


def pass_rates(rows: list[dict[str, Any]]) -> dict[str, float]:
    """pass@1 by difficulty: the share of programs that pass all their tests, which is a code reward of 1."""
    groups: dict[str, list[bool]] = {}
    for row in rows:
        difficulty = str(row["columns"].get("difficulty") or "unknown")
        for name in ("all", difficulty):
            groups.setdefault(name, []).append(row["score"] >= 1.0)
    return {f"pass_at_1_{name}": sum(passed) / len(passed) for name, passed in groups.items()}


def win_rate(scores: list[float], others: list[float]) -> float:
    """Share of prompts on which the first is scored higher, equal scores counting half."""
    wins = [1.0 if own > other else 0.5 if own == other else 0.0 for own, other in zip(scores, others, strict=True)]
    return sum(wins) / len(wins)
