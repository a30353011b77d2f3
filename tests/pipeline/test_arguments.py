"""From a recipe's section to a trainer's arguments: batches that are what the recipe says, precision, lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wpr.config.recipe import Recipe
from wpr.config.recipe_file import load_recipe
from wpr.config.trainers import config_class
from wpr.errors import RecipeError
from wpr.pipeline.arguments import (
    NO_EFFECT,
    batch_arguments,
    make_config,
    make_trl_config,
    outcome_settings,
    precision_arguments,
    trainer_arguments,
    trl_arguments,
)
from wpr.pipeline.plan_view import resolved
from wpr.pipeline.run import plan


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 64) | st.none())
def test_the_batch_is_exact_and_the_parts_as_large_as_allowed(each: int, processes: int, wanted: int | None) -> None:
    section: dict[str, Any] = {"batch_size": each * processes}
    if wanted is not None:
        section["per_device_train_batch_size"] = wanted
    found = batch_arguments(section, "sft", processes)
    size, steps = found["per_device_train_batch_size"], found["gradient_accumulation_steps"]
    limit = min(each, 8 if wanted is None else wanted)
    assert size * steps * processes == each * processes
    assert size <= limit
    assert not [larger for larger in range(size + 1, limit + 1) if each % larger == 0]


def test_without_a_batch_size_the_trainer_s_own_stand() -> None:
    section = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    assert batch_arguments(section, "sft", 4) == {}
    assert section == {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}


def test_a_batch_that_the_processes_cannot_share() -> None:
    with pytest.raises(RecipeError, match=r"ppo\.batch_size=6 cannot be shared by 4 processes; choose a multiple of 4"):
        batch_arguments({"batch_size": 6}, "ppo", 4)


@pytest.mark.parametrize("size", [0, -1])
def test_no_rows_on_a_device(size: int) -> None:
    with pytest.raises(RecipeError, match="per_device_train_batch_size"):
        batch_arguments({"batch_size": 8, "per_device_train_batch_size": size}, "sft", 1)


@pytest.mark.parametrize(
    ("precision", "bf16", "found"),
    [
        ("auto", True, (True, False)), ("auto", False, (False, False)), ("bf16", False, (True, False)),
        ("fp16", True, (False, True)), ("fp32", True, (False, False)),
    ],
)  # fmt: skip
def test_precision(precision: str, bf16: bool, found: tuple[bool, bool]) -> None:
    assert precision_arguments(precision, bf16) == {"bf16": found[0], "fp16": found[1]}


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("tiny", ["seed=7", "model.precision=auto"])


def test_what_the_recipe_leaves_open_is_filled_in(recipe: Recipe) -> None:
    for stage, folder in (("sft", "x/sft"), ("reward", "x/reward"), ("ppo", "x/ppo/rkl")):
        found = trainer_arguments(recipe, stage, Path(folder), 1, bf16=True)
        assert found["output_dir"] == f"{folder}/checkpoints"
        assert (found["seed"], found["bf16"], found["fp16"]) == (7, True, False)
        assert found["report_to"] in (["tensorboard"], "none")
        assert "batch_size" not in found


def test_lengths_are_those_of_the_data(recipe: Recipe) -> None:
    assert trainer_arguments(recipe, "sft", Path("x"), 1, False)["max_length"] == 64 + 24
    assert trainer_arguments(recipe, "reward", Path("x"), 1, False)["max_length"] == 64 + 24
    found = trainer_arguments(recipe, "ppo", Path("x"), 1, False)
    assert (found["max_prompt_length"], found["max_new_tokens"]) == (64, 24)
    assert "max_length" not in found


def test_sft_learns_the_completion_only(recipe: Recipe) -> None:
    assert trainer_arguments(recipe, "sft", Path("x"), 1, False)["completion_only_loss"] is True
    assert "completion_only_loss" not in trainer_arguments(recipe, "reward", Path("x"), 1, False)


def test_what_the_recipe_says_wins() -> None:
    said = ["sft.max_length=50", "sft.bf16=false", "sft.save_total_limit=9", "sft.completion_only_loss=false",
            "sft.report_to=none", "ppo.max_new_tokens=5", "ppo.fp16=true"]  # fmt: skip
    recipe = load_recipe("tiny", said)
    sft = trainer_arguments(recipe, "sft", Path("x"), 1, True)
    assert (sft["max_length"], sft["bf16"], sft["save_total_limit"]) == (50, False, 9)
    assert (sft["completion_only_loss"], sft["report_to"]) == (False, "none")
    assert "fp16" not in sft
    ppo = trainer_arguments(recipe, "ppo", Path("x"), 1, True)
    assert (ppo["max_new_tokens"], ppo["fp16"], "bf16" in ppo) == (5, True, False)


def test_the_recipe_is_left_as_it_was(recipe: Recipe) -> None:
    before = recipe.as_dict()
    trainer_arguments(recipe, "sft", Path("x"), 1, False)
    assert recipe.as_dict() == before
    assert recipe.sft is not None
    assert recipe.sft["batch_size"] == 16


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_the_trainers_take_the_arguments(stage: str, recipe: Recipe, tmp_path: Path) -> None:
    config: Any = make_config(stage, trainer_arguments(recipe, stage, tmp_path, 1, False) | {"report_to": "none"})
    assert type(config).__name__ == {"sft": "SFTConfig", "reward": "RewardConfig", "ppo": "PPOConfig"}[stage]
    assert (config.seed, config.per_device_train_batch_size) == (7, 32 if stage == "ppo" else 16)


@pytest.mark.parametrize(
    ("stage", "arguments"),
    [("ppo", {"gamma": 2.0}), ("sft", {"lr_scheduler_type": "cosin"}), ("reward", {"eval_strategy": "sometimes"})],
)
def test_what_a_trainer_refuses_is_a_fault_of_the_recipe(stage: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"^{stage}: .*{next(iter(arguments.values()))}"):
        make_config(stage, {"output_dir": str(tmp_path), "report_to": "none"} | arguments)


def test_what_decides_a_stage() -> None:
    assert outcome_settings(None) is None
    assert outcome_settings({"learning_rate": 1.0, "logging_steps": 3, "save_steps": 2}) == {"learning_rate": 1.0}


def test_settings_without_effect_are_settings() -> None:
    """A name that no trainer has would be a slip of the pen."""
    from wpr.config.typed import field_types

    known = {name for stage in ("sft", "reward", "ppo", "grpo") for name in field_types(config_class(stage))}
    assert known >= NO_EFFECT


def trl_arguments_of(*changes: str) -> dict[str, Any]:
    recipe = load_recipe("tiny", ["trainer=grpo", *changes])
    arguments = trainer_arguments(recipe, "ppo", Path("x"), 1, False) | {"report_to": "none"}
    return trl_arguments(recipe, make_config("ppo", arguments), arguments)


def test_what_trl_is_told_is_what_the_recipe_calls_by_ppo_s_names() -> None:
    found = trl_arguments_of(
        "ppo.responses_per_prompt=4", "ppo.max_new_tokens=9", "ppo.ppo_epochs=3", "ppo.num_minibatches=2",
        "ppo.clip_range=0.1", "ppo.temperature=0.5", "ppo.min_new_tokens=2", "grpo.loss_type=dr_grpo", "ppo.beta=0.3",
        "grpo.regularizer_in=loss", "ppo.per_device_train_batch_size=8",
    )  # fmt: skip
    wanted = {
        "num_generations": 4, "max_completion_length": 9, "num_iterations": 3, "steps_per_generation": 8,
        "epsilon": 0.1, "temperature": 0.5, "top_k": 0, "generation_kwargs": {"min_new_tokens": 2}, "beta": 0.0,
        "loss_type": "dr_grpo", "learning_rate": 1e-3, "max_steps": 30, "gradient_checkpointing": False, "seed": 0,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    assert "regularizer_in" not in found
    assert make_config("grpo", found).generation_batch_size == 64


def test_held_out_prompts_have_as_many_responses_as_under_ppo() -> None:
    assert trl_arguments_of()["num_generations_eval"] == 1
    assert trl_arguments_of("ppo.responses_per_prompt=4")["num_generations_eval"] == 4
    assert trl_arguments_of("ppo.responses_per_prompt=4", "grpo.num_generations_eval=3")["num_generations_eval"] == 3


@pytest.mark.parametrize("group", [1, 3])
def test_a_batch_without_whole_groups(group: int) -> None:
    with pytest.raises(
        RecipeError, match=rf"rollout of 32 responses .* ppo\.responses_per_prompt={group}; set that to 2"
    ):
        trl_arguments_of(f"ppo.responses_per_prompt={group}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("ppo.use_liger_kernel=true", "grpo: use_liger_kernel=True replaces layers"),
        ("grpo.top_entropy_quantile=0.5", r"grpo: top_entropy_quantile=0\.5 drops"),
        ("ppo.lr_scheduler_type=cosin", "cosin"),
    ],
)
def test_what_trl_s_trainer_refuses_is_refused_before_it_starts(change: str, message: str) -> None:
    recipe = load_recipe("tiny", ["trainer=grpo", "ppo.report_to=none", change])
    arguments = trainer_arguments(recipe, "ppo", Path("x"), 1, False)
    with pytest.raises(RecipeError, match=message):
        make_trl_config(recipe, make_config("ppo", arguments), arguments)


def test_the_plan_shows_what_trl_is_told() -> None:
    recipe = load_recipe("tiny", ["trainer=rloo", "rloo.regularizer_in=loss", "train=[rkl]"])
    shown = resolved(recipe, plan(recipe))["stages"]["ppo/rkl"]["arguments"]
    found = {name: shown[name] for name in ("trainer", "regularizer_in", "regularizer_beta", "num_generations")}
    assert found == {"trainer": "rloo", "regularizer_in": "loss", "regularizer_beta": 0.05, "num_generations": 2}
