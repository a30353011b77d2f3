"""The stage that trains a policy: PPO, GRPO or RLOO from the SFT model under its regularizer, measured on held-out
prompts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from wpr.atomic_io import write_atomically
from wpr.config.monitors import GOLD
from wpr.config.recipe import ScorerSettings
from wpr.config.trainers import unused_settings
from wpr.data import Encoder
from wpr.evaluation import diversity, embedding_spread, win_rate
from wpr.evaluation.monitors import make_monitor
from wpr.evaluation.scorers import make_scorer
from wpr.language_models import is_in_parts, plain_model, whole_embeddings
from wpr.model_geometry import regularizer_on
from wpr.model_loading import load_causal, load_scorer, load_tokenizer, lora_config
from wpr.pipeline.arguments import regularizer_settings
from wpr.pipeline.stage import Stage, is_main_process, wait_for_everyone
from wpr.pipeline.training import (
    MetricsFile,
    WarmupCheck,
    forget_final_evaluation,
    last_training_log,
    model_metrics,
    release,
    train_with_logs,
    usable_checkpoint,
)
from wpr.ppo.config import PPOConfig
from wpr.runs.responses import AFTER, BEFORE, Response, prompt_id

logger = logging.getLogger(__name__)

PER_TOKEN = ("penalty", "kl", "divergence")
"""Measures of a response that are sums over its tokens; an evaluation has their means over all tokens."""


def train_ppo(stage: Stage) -> dict[str, Any]:
    """Train and save the policy; results with what held-out responses are worth before and after, and how far the
    policy went for it.
    """
    from transformers import set_seed

    recipe = stage.recipe
    tokenizer = load_tokenizer(stage.sft_model)
    rows = stage.rows(tokenizer)
    held_out = rows.held_out[: recipe.evaluation.prompts]
    names = prompt_names(stage, rows.encoder)
    stops = sorted({rows.encoder.end_id, tokenizer.eos_token_id})  # what SFT taught completions to end with
    args = stage.config(stop_token_ids=stops)
    keep_word_lists(recipe.scorer, stage.folder)
    set_seed(args.seed)  # a new head's weights are drawn from here
    trainer = make_trainer(stage, args, rows.train, held_out, tokenizer)
    checkpoint = usable_checkpoint(stage.checkpoints)
    # Measured within training: before it, nothing gathers weights that are in parts.
    trainer.args.eval_on_start = bool(held_out) and checkpoint is None
    start = StartingPoint(trainer, stage.folder / BEFORE, names)
    trainer.add_callback(start)
    results: dict[str, Any] = {"prompts": len(rows.train), "held_out_prompts": len(held_out)}
    results["watched"] = recipe.evaluation.watched_settings
    if recipe.trainer == "ppo":
        trainer.add_callback(MetricsFile(stage.folder / "metrics.jsonl"))
        trainer.add_callback(WarmupCheck(stage.name))
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        forget_final_evaluation(stage.folder / "metrics.jsonl", trainer.state.log_history)
    else:
        train_with_logs(trainer, stage)
    results["steps"] = trainer.state.global_step
    results["train"] = last_training_log(trainer.state.log_history)
    if held_out:
        found, before = start.results()
        results |= found
        evaluated = trainer.evaluate()
        after = held_out_responses(trainer, stage.folder / AFTER, names)
        results["after"] = describe(trainer, evaluated, after)
        results |= against_before(after, before, args.responses_per_prompt)
        study(trainer, args, after[: recipe.evaluation.case_studies], stage.folder / "tokens.json")
    stage.save(trainer.actor_critic.policy, tokenizer, results)
    release(trainer)
    return results


def make_trainer(
    stage: Stage, args: PPOConfig, train: list[dict[str, Any]], held_out: list[dict[str, Any]], tokenizer: Any
) -> Any:
    """What trains the policy, from the SFT model under the recipe's regularizer, and what measures it."""
    recipe = stage.recipe
    policy = load_causal(recipe.model, stage.sft_model)
    is_ppo = recipe.trainer == "ppo"  # TRL's trainers copy the policy themselves
    reference = load_causal(recipe.model, stage.sft_model) if is_ppo and recipe.model.lora is None else None
    anchor = policy if reference is None else reference
    regularizer = regularizer_on(anchor, recipe.regularizer, args.device)
    parts: dict[str, Any] = {
        "reward": make_scorer(recipe.scorer, stage.reward_model),
        "monitors": {
            name: make_monitor(own, f"evaluation.{name}", args.device)
            for name, own in recipe.evaluation.watched.items()
        },
        # The trainer's own uses the reference's embeddings in place; this one has a copy of them.
        "regularizer": regularizer,
        "eval_regularizers": {
            name: regularizer if own == recipe.regularizer else regularizer_on(anchor, own, args.device)
            for name, own in recipe.evaluation.eval_regularizers.items()
        },
        "train_dataset": train,
        "eval_dataset": held_out or None,
        "processing_class": tokenizer,
        "peft_config": lora_config(recipe.model.lora, "CAUSAL_LM"),
    }
    if is_ppo:
        from wpr.ppo import PPOTrainer

        critic = None if args.share_backbone else load_scorer(recipe.model, critic_of(stage), tokenizer.pad_token_id)
        # reference none: the policy with its adapter off
        trainer = PPOTrainer(policy, args, reference=reference, critic=critic, **parts)
        trainer.console.title = stage.name
        return trainer
    from wpr.pipeline.trl_policy import TRAINERS

    if ignored := unused_settings(recipe):
        logger.warning("%s: trainer: %s does not take %s", stage.name, recipe.trainer, ", ".join(ignored))
    trl_args = stage.trl_config(args)
    return TRAINERS[recipe.trainer](policy, trl_args, args, stage.name, **regularizer_settings(recipe), **parts)


def critic_of(stage: Stage) -> str:
    """Where the critic starts: the reward model if there is one, else the SFT model with a new head."""
    if stage.recipe.critic != "auto":
        return stage.recipe.critic
    if stage.recipe.reward is not None:
        return str(stage.run.stage("reward") / "model")
    return stage.sft_model


def keep_word_lists(settings: ScorerSettings, folder: Path) -> None:
    """Copies of the lists that a policy is trained on, ``words.txt`` and ``preferred.txt``: files may change later."""
    for name, path in {"words": settings.words, "preferred": settings.preferred}.items():
        if path is not None and is_main_process():
            write_atomically(folder / f"{name}.txt", Path(path).expanduser().read_text(encoding="utf-8-sig"))


def prompt_names(stage: Stage, encoder: Encoder) -> dict[str, str]:
    """What files of responses call the held-out prompts, by the JSON of the prompts as rewards see them."""
    assert stage.data is not None
    return {json.dumps(encoder.prompt_value(row)): prompt_id(row.prompt) for row in stage.data.split.held_out}


class StartingPoint(TrainerCallback):  # type: ignore[misc]
    """What held-out responses were worth before the first step. A run that goes on has it from the log, and from the
    file ``path``, that the first process wrote.
    """

    def __init__(self, trainer: Any, path: Path, names: Mapping[str, str]) -> None:
        self.trainer, self.path, self.names = trainer, path, names

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the responses of the first evaluation."""
        if state.global_step == 0:
            held_out_responses(self.trainer, self.path, self.names)

    def results(self) -> tuple[dict[str, Any], list[Response]]:
        """``before`` with its numbers, and the responses; nothing of a run that was begun without measuring them. An
        older run's checkpoints have no log of them: then the numbers are those that the responses have.
        """
        wait_for_everyone()  # until the file is there
        history = self.trainer.state.log_history
        logged = [row for row in history if row["step"] == 0 and any(name.startswith("eval_") for name in row)]
        if not self.path.exists():
            logger.warning(
                "%s is not there, nothing was measured before the first step; results are without it", self.path
            )
            return {}, []
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]  # responses may hold other line ends
        rows = [Response.from_values(json.loads(line)) for line in lines]
        if not logged:
            logger.warning(
                "the checkpoint has no evaluation before the first step; its numbers are computed from %s, without "
                "entropy, parts of the reward and what functions log",
                self.path,
            )
        return {"before": describe(self.trainer, logged[0] if logged else metrics_of(rows), rows)}, rows


def metrics_of(rows: list[Response]) -> dict[str, float]:
    """What an evaluation says of its responses, as far as they have it: means over responses and, of divergences, over
    tokens.
    """
    values: dict[str, list[float]] = {}
    sums: dict[str, list[float]] = {}
    for row in rows:
        for name, value in {"response_length": row.length, "eos_fraction": row.finished, **row.measures}.items():
            if value is not None:
                (sums if name in PER_TOKEN else values).setdefault(name, []).append(float(value))
        for name, value in row.divergences.items():
            sums.setdefault(f"divergence_{name}", []).append(value)
    tokens = sum(row.length or 0 for row in rows)
    found = {name: sum(several) / len(several) for name, several in values.items()}
    return found | {name: sum(several) / tokens for name, several in sums.items() if tokens}


def held_out_responses(trainer: Any, path: Path, names: Mapping[str, str]) -> list[Response]:
    """Those of the last evaluation, which also go to ``path``. names: of `prompt_names`."""
    rows = [
        Response.from_values(row | {"prompt_id": names.get(json.dumps(row["prompt"])) or prompt_id(row["prompt"])})
        for row in trainer.evaluated
    ]
    if is_main_process():
        lines = (json.dumps(row.as_dict(), ensure_ascii=False, default=str) + "\n" for row in rows)
        write_atomically(path, "".join(lines))
    return rows


def describe(trainer: Any, evaluated: Mapping[str, Any], rows: list[Response]) -> dict[str, float]:
    """An evaluation's numbers, and what can be told of its responses."""
    found = {name.removeprefix("eval_"): value for name, value in model_metrics(dict(evaluated)).items()}
    responses = [row.response for row in rows]
    if responses:  # all may have been left out for faults
        found |= diversity(responses)
    if sum(bool(response.strip()) for response in responses) > 1:
        # In the embedding that the policy started from, so that policies are measured alike.
        weight = whole_embeddings(plain_model(trainer.reference or trainer.actor_critic.policy))
        found["embedding_spread"] = embedding_spread(responses, trainer.processing_class, weight)
    if trainer.reward.name == "code":
        found |= pass_rates(rows)
    return found


def against_before(after: list[Response], before: list[Response], times: int) -> dict[str, Any]:
    """Win rates over the model before training, by the score and by gold; ``times`` responses per prompt."""
    found: dict[str, Any] = {}
    earlier = {row.number: row for row in before}
    pairs = [(row, earlier[row.number]) for row in after if row.number in earlier]  # faults may leave out some
    for measure_name, title in (("score", "win_rate_before"), (GOLD, "gold_win_rate_before")):
        scored = [pair for pair in pairs if all(measure_name in row.measures for row in pair)]
        if scored:
            groups = [row.number // times for row, _ in scored]
            ours, theirs = ([row.measures[measure_name] for row in side] for side in zip(*scored, strict=True))
            rate = win_rate(ours, theirs, groups)
            found[title] = rate.rate
            found[f"{title}_interval"] = {"low": rate.low, "high": rate.high, "p_value": rate.p_value}
    return found


def study(trainer: Any, args: PPOConfig, rows: list[Response], path: Path) -> None:
    """Write responses token by token under KL and the Wasserstein penalty, where there is one, to ``path``. Where
    weights are in parts, all processes run the models.
    """
    from wpr.analysis.case_study import study_response
    from wpr.regularizers import ReverseKL
    from wpr.regularizers.sums import transports_of

    measured = (trainer.regularizer, *trainer.eval_regularizers.values())
    regularizers = [transport for one in measured for transport in transports_of(one)]
    sharded = is_in_parts(trainer.actor_critic)
    if not regularizers or not rows or not (sharded or is_main_process()):
        return
    wasserstein = regularizers[0]
    if root := getattr(trainer.actor_critic, "unshard", None):
        root()  # FSDP 2 would gather what is in no layer only in the whole module's forward pass
    studies = [
        study_response(
            trainer.actor_critic.policy, trainer.reference, trainer.processing_class, row.prompt_ids,
            row.response_ids, ReverseKL(), wasserstein, number=row.number, score=row.measures.get("score"),
            gold=row.measures.get(GOLD), temperature=args.logprob_temperature,
        )
        for row in rows
    ]  # fmt: skip
    if hasattr(trainer.actor_critic, "reshard"):
        trainer.actor_critic.reshard()
    if not is_main_process():
        return
    settings = wasserstein.settings
    view = {
        "policy": path.parent.name,
        "penalties": {"kl": "reverse KL", "wpr": f"Wasserstein, {wasserstein.preset}"},
        "beta": args.beta,
        "lam": settings.lam,
        "scale": wasserstein.geometry.scale,
        "studies": studies,
    }
    write_atomically(path, json.dumps(view, ensure_ascii=False) + "\n")


def pass_rates(rows: list[Response]) -> dict[str, float]:
    """pass@1 by difficulty: the share of programs that pass all their tests, which is a code reward of 1."""
    groups: dict[str, list[bool]] = {}
    for row in rows:
        difficulty = str(row.columns.get("difficulty") or "unknown")
        for name in ("all", difficulty):
            groups.setdefault(name, []).append(row.measures["score"] >= 1.0)
    return {f"pass_at_1_{name}": sum(passed) / len(passed) for name, passed in groups.items()}
