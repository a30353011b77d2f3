"""What can be found wrong before anything starts, so that it is not found hours later, when a stage begins."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

from wpr.config.functions import import_function
from wpr.config.monitors import GOLD, PROMPT
from wpr.config.recipe import Recipe
from wpr.errors import OptionError, RecipeError, UserError
from wpr.evaluation.encoders import PACKAGES, package_folder
from wpr.evaluation.scorers import make_scorer, refuse_other_tokenizer
from wpr.model_geometry import check_other_embeddings
from wpr.model_loading import check_model, load_tokenizer
from wpr.pipeline.arguments import make_config, make_trl_config, trainer_arguments
from wpr.pipeline.recipe_data import RecipeData
from wpr.pipeline.stage import device_arguments, has_bf16, process_count
from wpr.ppo.metrics import is_reserved
from wpr.regularizers.spec import RegularizerSpec
from wpr.rewards import RewardError
from wpr.rewards.words import WordTable, read_entries
from wpr.runs.folder import RunFolder

logger = logging.getLogger(__name__)

TEXTS, SHOWN = 5000, 5
"""Completions in which forbidden words are looked for, and entries that a message names."""

MOST_UNUSED = 0.8
"""Share of a list's entries that may never occur without a warning."""

MEASURED = ("distinct_", "self_bleu", "embedding_spread", "pass_at_1")
"""How the names of what is measured of all responses together begin."""


def check_stage(name: str, recipe: Recipe, folder: RunFolder) -> None:
    """Make the stage's config, look for the models and functions that it names, try the sandbox if it needs one."""
    kind = name.partition("/")[0]
    if kind == "prepare":
        assert recipe.prepare is not None
        import_function(recipe.prepare.function, "prepare.function")
        return
    arguments = trainer_arguments(recipe, kind, folder.stage(name), process_count(), has_bf16())
    config = make_config(kind, device_arguments() | arguments)
    if kind == "ppo" and recipe.trainer != "ppo":
        if shards_weights(config):
            raise RecipeError(
                f"trainer: {recipe.trainer} cannot train weights that ZeRO-3 or FSDP hold in parts; launch with "
                "configs/accelerate/ddp.yaml or zero2.yaml, or set trainer: ppo"
            )
        make_trl_config(recipe, config, device_arguments() | arguments)
    if kind == "ppo":
        try:
            config.back_end.check(synced=shards_weights(config), processes=process_count())
        except ValueError as error:
            raise RecipeError(f"ppo.{error}") from None
    configs = {
        setting: check_model(model, setting, recipe.model.revision if setting == "model.name" else None)
        for setting, model in _models(recipe, kind)
        if "{prepare}" not in model
    }
    if kind == "ppo" and "model.name" in configs:
        check_regularizers(name, recipe, configs["model.name"].get_text_config().vocab_size)
        for section, own in _regularizers(recipe).items():
            try:
                check_other_embeddings(own, recipe.model.name, recipe.model.revision)
            except ValueError as error:
                raise RecipeError(f"{section}.{error}") from None
    if kind == "ppo":
        check_monitors(recipe)
    if kind == "ppo" and recipe.scorer.kind != "model":
        check_scorer(recipe)
    elif kind == "ppo" and recipe.scorer.name is not None and "{" not in recipe.model.name + recipe.scorer.name:
        tokenizer = load_tokenizer(recipe.model.name, recipe.model.revision)
        refuse_other_tokenizer(recipe.scorer.name, tokenizer, "scorer.name")


def check_prompts(name: str, recipe: Recipe, folder: RunFolder, data: RecipeData) -> None:
    """Refuse a policy whose prompts, before any is left out for its length, are fewer than those of one rollout."""
    arguments = device_arguments() | trainer_arguments(recipe, "ppo", folder.stage(name), process_count(), has_bf16())
    config = make_config("ppo", arguments)
    wanted = config.prompts_per_device * process_count()
    if recipe.trainer != "ppo":
        theirs = make_trl_config(recipe, config, arguments)
        wanted = theirs.generation_batch_size // theirs.num_generations
    rows = data.split.ppo
    found = len(rows) if recipe.data.fidelity == "released" else len({row.prompt_digest() for row in rows})
    if found < wanted:
        size = config.per_device_train_batch_size * config.gradient_accumulation_steps * process_count()
        raise RecipeError(
            f"{name}: split.ppo={recipe.split.ppo:g} leaves {found} prompts for it, fewer than the {wanted} of one "
            f"rollout; lower ppo.batch_size={size}, raise split.ppo, or use more rows (data.source)"
        )


def check_forbidden_words(recipe: Recipe, data: RecipeData) -> None:
    """Refuse a list of forbidden words none of which occurs in the data's completions: every response would have the
    same reward. Warn of one that hardly does.
    """
    if recipe.scorer.words is None:
        return
    table = WordTable(read_entries(recipe.scorer.words))
    texts = [row.chosen for row in data.corpus.rows if row.chosen][:TEXTS]
    if not texts:
        return  # prompts alone do not tell what the model writes
    found = {entry for text in texts for entry, _, _ in table.find(text)}
    unused = [entry.text for entry in table.entries if entry not in found]
    named = ", ".join(unused[:SHOWN]) + (", ..." if len(unused) > SHOWN else "")
    where = f"scorer.words={recipe.scorer.words}"
    if not found and recipe.scorer.preferred is None:
        raise RecipeError(
            f"{where}: none of its {len(unused)} entries ({named}) occurs in {len(texts)} completions of the data, so "
            "that every response would have the same reward; use words of these texts, or other texts (data.source)"
        )
    if len(unused) > MOST_UNUSED * len(table.entries):
        logger.warning(
            "%s: %d of %d entries (%s) do not occur in %d completions of the data",
            where, len(unused), len(table.entries), named, len(texts),
        )  # fmt: skip


def check_scorer(recipe: Recipe, spelling: bool = True) -> None:
    """Make a scorer that is no model; refuse words that the model's tokenizer cannot spell, if ``spelling``."""
    files = (recipe.scorer.words, recipe.scorer.preferred)
    if any("{prepare}" in (name or "") for name in files):
        return
    try:
        scorer = make_scorer(recipe.scorer, None)
        if spelling and hasattr(scorer, "check_tokenizer") and "{prepare}" not in recipe.model.name:
            scorer.check_tokenizer(load_tokenizer(recipe.model.name, recipe.model.revision))
    except (RewardError, TypeError, ValueError) as error:
        rules = {name: str(value) for name, value in recipe.scorer.wording.items() if name != "placement"}
        blamed = [name for name, value in rules.items() if value in str(error)] or [*rules, "kind"]
        where = f"{recipe.source.where(f'scorer.{blamed[0]}')}: " if recipe.source is not None else ""
        raise RecipeError(f"{where}scorer.kind={recipe.scorer.kind}: {error}") from None


def shards_weights(config: Any) -> bool:
    """Whether the launch, or a trainer's config, asks for ZeRO-3 or FSDP."""
    zero = getattr(config, "deepspeed_plugin", None)
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" or config.fsdp
    return bool(fsdp) or (zero is not None and zero.zero_stage == 3)


def check_monitors(recipe: Recipe) -> None:
    """Refuse monitors whose name is taken, or whose column, encoder, model or function is not there."""
    for name, own in recipe.evaluation.watched.items():
        place = "evaluation.gold" if name == GOLD else f"evaluation.monitors.{name}"
        if not name.isidentifier() or is_reserved(name) or name.startswith(MEASURED):
            raise RecipeError(
                f"{place}: the results have a number called {name!r}, or it is no name; rename the monitor"
            )
        if own.source not in (None, PROMPT, *recipe.data.kept_columns) and recipe.data.format != "apps":
            kept = ", ".join(recipe.data.kept_columns) or "none"
            raise RecipeError(
                f"{place}: the data keeps no column {own.source!r} (it keeps {kept}); keep it with data.columns: "
                f"{{{own.source}: THEIR_NAME}}, or compare with the prompt (of: prompt)"
            )
        if own.kind == "function":
            assert own.function is not None
            import_function(own.function, place)
        elif own.encoder in PACKAGES:
            try:
                package_folder(*PACKAGES[own.encoder])
            except OptionError as error:
                raise RecipeError(f"{place}.encoder={own.encoder}: {error}, or leave it out ({place}=null)") from None
        elif own.encoder is not None:
            check_model(own.encoder, f"{place}.encoder")
        elif own.model not in (None, "pico"):
            check_model(str(own.model), f"{place}.model")


def not_ready(policies: Iterable[Recipe]) -> list[str]:
    """What would stop policies on this machine before any training, each once: an encoder's package that is not
    installed, a list of words that is not there or that is no such list. The model need not be here. policies: a
    recipe each.
    """
    found: dict[str, None] = {}
    for recipe in policies:
        checks = [check_monitors]
        if recipe.scorer.wording:
            checks.append(functools.partial(check_scorer, spelling=False))
        for check in checks:
            try:
                check(recipe)
            except UserError as error:
                found[str(error)] = None
    return list(found)


def check_regularizers(stage: str, recipe: Recipe, tokens: int) -> None:
    """Refuse regularizers of a PPO stage that a vocabulary of so many tokens is too small for."""
    policy = stage.removeprefix("ppo/")
    for section, own in _regularizers(recipe).items():
        if (found := own.check_vocabulary(tokens)) is not None:
            # A policy that a sweep made has no place in the file.
            known = recipe.source is not None and policy in recipe.policy_names
            where = f"{recipe.source.where(f'{section}.{found[0]}', policy)}: " if recipe.source and known else ""
            raise RecipeError(f"{where}policy {policy}: {section}.{found[1]}")


def _regularizers(recipe: Recipe) -> dict[str, RegularizerSpec]:
    """All of a policy's recipe, by their place in it."""
    eval_regularizers = recipe.evaluation.eval_regularizers.items()
    return {"regularizer": recipe.regularizer} | {
        f"evaluation.eval_regularizers.{name}": own for name, own in eval_regularizers
    }


def _models(recipe: Recipe, kind: str) -> Iterator[tuple[str, str]]:
    """Settings of the stage that name a model, and the name."""
    yield "model.name", recipe.model.name
    if kind == "ppo":
        if recipe.scorer.kind == "model" and recipe.scorer.name is not None:
            yield "scorer.name", recipe.scorer.name
        if recipe.critic != "auto" and recipe.trainer == "ppo":
            yield "critic", recipe.critic
        for section, own in _regularizers(recipe).items():
            if own.costs.other_model is not None:
                yield f"{section}.embeddings", own.costs.other_model
