"""Which settings the trainers of policies take, and what is said of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.recipes import SMALL, refusal, write
from wpr.config.recipe_file import load_recipe
from wpr.config.trainers import FIXED, PPO_ONLY, RENAMED, config_class, own_settings, unused_settings
from wpr.config.typed import field_types
from wpr.pipeline.run import plan

TWO = SMALL + "policies:\n  a: {}\n  b: {trainer: rloo}\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_policy_has_its_own_trainer() -> None:
    recipe = load_recipe(write(TWO))
    assert [recipe.policy(name).trainer for name in ("a", "b")] == ["ppo", "rloo"]
    changed = load_recipe("mine.yaml", ["trainer=grpo", "grpo.loss_type=dr_grpo"])
    assert [changed.policy(name).trainer for name in ("a", "b")] == ["grpo", "grpo"]
    assert changed.policy("b").grpo == {"loss_type": "dr_grpo"}


def test_a_trainer_of_the_command_line_leaves_the_recipe_s_settings_of_ppo_unused() -> None:
    recipe = load_recipe("stories", ["trainer=grpo"]).policy("rkl")
    assert unused_settings(recipe) == ["ppo.critic_learning_rate"]
    assert unused_settings(load_recipe("stories").policy("rkl")) == []


def test_settings_go_to_the_policies_whose_trainer_has_them() -> None:
    recipe = load_recipe(write(TWO), ["ppo.gamma=0.5", "rloo.normalize_advantages=true"])
    assert recipe.policy("a").ppo["gamma"] == 0.5
    assert (recipe.policy("b").rloo, recipe.policy("a").rloo) == ({"normalize_advantages": True}, {})


def test_what_decides_a_policy_s_outcome() -> None:
    """PPO's is what it was before there were others; a critic is nothing to GRPO."""
    (stage,) = (one for one in plan(load_recipe("tiny", ["train=[rkl]"])) if one.name == "ppo/rkl")
    assert stage.inputs.keys() == {"model", "seed", "ppo", "regularizer", "scorer", "critic"}
    stages = [
        next(one for one in plan(load_recipe("tiny", ["trainer=grpo", *changes])) if one.name == "ppo/rkl")
        for changes in (
            [],
            ["critic=some/model"],
            ["grpo.num_completions_to_print=3"],
            ["grpo.delta=2"],
            ["ppo.beta=1"],
        )
    ]
    assert stages[0].inputs["trainer"] == "grpo"
    assert [one.inputs == stages[0].inputs for one in stages] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (TWO, ["trainer=gropo"], "trainer='gropo' must be 'ppo' or 'grpo' or 'rloo'"),
        (TWO, ["trainer=grpo", "grpo.regularizer_future=past"], "must be 'divergence' or 'penalty'"),
        (TWO, ["trainer=grpo", "grpo.num_generations=4"], "one for all trainers: ppo.responses_per_prompt"),
        (TWO, ["trainer=grpo", "grpo.learning_rate=1"], "one for all trainers: ppo.learning_rate"),
        (TWO, ["trainer=grpo", "grpo.los_type=dapo"], "unknown setting grpo.los_type; did you mean grpo.loss_type?"),
        (TWO, ["trainer=grpo", "grpo.loss_type=foo"], "grpo.loss_type='foo' must be 'grpo' or 'sapo' or"),
        (TWO, ["trainer=grpo", "grpo.scale_rewards=foo"], "grpo.scale_rewards='foo' must be 'group' or 'batch'"),
        (TWO, ["trainer=rloo", "rloo.regularizer_in=both"], "rloo.regularizer_in='both' must be 'reward' or 'loss'"),
        (TWO, ["trainer=grpo", "grpo.gamma=0.9"], "grpo.gamma has no meaning for trainer: grpo, which has no critic"),
        (TWO, ["trainer=grpo", "grpo.sync_ref_model=true"], "which has a reference that stays as it was; drop it"),
        (TWO, ["trainer=grpo", "grpo=3"], "grpo=3 must be settings"),
        (TWO, ["trainer=grpo", "ppo.gamma=0.9"], "ppo.gamma has no meaning for any of the policies a, b (trainer: "),
        (TWO, ["grpo.loss_type=dapo"], "policies a, b (trainer: ppo, rloo); drop it, or set trainer=grpo"),
        (SMALL, ["trainer=grpo", "ppo.gamma=0.9"], "ppo.gamma has no meaning for trainer: grpo, which has no critic"),
        (SMALL, ["trainer=grpo", "critic=a/b"], "critic has no meaning for trainer: grpo, which has no critic"),
        (SMALL, ["grpo.loss_type=dapo"], "grpo.loss_type is set, but trainer is ppo; set trainer: grpo, or drop it"),
        (SMALL + "policies: {a: {trainer: grpo, ppo: {critic_learning_rate: 1.0}}}\n", [],
         "mine.yaml, line 5: ppo.critic_learning_rate has no meaning for trainer: grpo, which has no critic; drop"),
        (SMALL + "policies: {a: {trainer: grpo, rloo: {epsilon_high: 1.0}}}\n", [],
         "rloo.epsilon_high is set, but trainer is grpo"),
        # A beta that changes would change what is optimized: not even where policies share it.
        (SMALL + "trainer: grpo\nppo: {target_divergence: 0.1}\n", [],
         "mine.yaml, line 6: ppo.target_divergence has no meaning for trainer: grpo, which has a constant beta"),
        (SMALL + "trainer: grpo\nppo: {logprob_temperature: 1.0}\n", [],
         "trains the distribution that it draws from, at ppo.temperature=0.8; set both alike"),
        (SMALL + "policies: {a: {trainr: grpo}}\n", [], "did you mean policies.a.trainer?"),
    ],
)  # fmt: skip
def test_refusals(text: str, changes: list[str], message: str) -> None:
    assert message in refusal(text, *changes)


def test_shared_settings_of_ppo_may_have_what_only_ppo_takes() -> None:
    text = (
        "trainer: grpo\ncritic: some/model\nppo: {gamma: 0.9, whiten_advantages: false, gae_lambda: 0.95, beta: 0.1}\n"
    )
    recipe = load_recipe(write(SMALL + text)).policy("policy")
    assert unused_settings(recipe) == ["ppo.gamma", "ppo.whiten_advantages", "critic"]


def test_a_trainer_of_the_command_line_leaves_out_what_policies_say_for_another() -> None:
    text = SMALL + "policies: {a: {ppo: {penalty_clip: 2.5}}}\n"
    assert unused_settings(load_recipe(write(text), ["trainer=grpo"]).policy("a")) == ["ppo.penalty_clip"]
    assert unused_settings(load_recipe(write(text)).policy("a", {"trainer": "rloo"})) == ["ppo.penalty_clip"]
    assert "ppo.penalty_clip has no meaning for" in refusal(text, "trainer=grpo", "ppo.penalty_clip=1")


def test_the_tables_name_settings_that_there_are() -> None:
    assert field_types(config_class("ppo")).keys() >= PPO_ONLY.keys()
    known = {name for trainer in ("grpo", "rloo") for name in field_types(config_class(trainer))}
    assert {*RENAMED, *FIXED} - known == {"batch_size"}
    assert {"scale_rewards", "loss_type", "epsilon_high"} <= own_settings("grpo").keys()
    assert not {"learning_rate", "temperature"} & own_settings("rloo").keys()
