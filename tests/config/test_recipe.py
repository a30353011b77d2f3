"""Recipes: refusals that name the key, the nearest known one and the line; what is written down is the same recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.recipes import SMALL, refusal, write
from wpr.config.recipe import OWNED
from wpr.config.recipe_file import load_recipe, shipped_recipes
from wpr.config.yaml_file import to_yaml


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# Refusals. The recipe has four lines, so that what follows begins in line 5.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sede: 1\n", "line 5: unknown setting sede; did you mean seed?"),
        ("sft:\n  batch_sise: 3\n", "line 6: unknown setting sft.batch_sise; did you mean sft.batch_size?"),
        ("sft:\n  lerning_rate: 3\n", "line 6: unknown setting sft.lerning_rate; did you mean sft.learning_rate?"),
        ("ppo:\n  gae_lamda: 1\n", "line 6: unknown setting ppo.gae_lamda; did you mean ppo.gae_lambda?"),
        ("regularizer:\n  lamm: 1\n", "line 6: unknown setting regularizer.lamm; did you mean regularizer.lam?"),
        ("split:\n  held: 1\n", "line 6: unknown setting split.held; did you mean split.held_out?"),
        ("scorer:\n  kin: model\n", "line 6: unknown setting scorer.kin; did you mean scorer.kind?"),
        ("evaluation:\n  prompt: 1\n", "line 6: unknown setting evaluation.prompt; did you mean evaluation.prompts?"),
        ("prepare:\n  functoin: a:b\n", "line 6: unknown setting prepare.functoin; did you mean prepare.function?"),
        *(
            (f"{section}: {value}\n", f"line 5: {section}=")
            for section in ("policies", "sweeps")
            for value in ("[]", "''", "0", "false")
        ),
        ("policies:\n  a:\n    pppo: {}\n", "line 7: unknown setting policies.a.pppo; did you mean policies.a.ppo?"),
        ("sweeps:\n  s:\n    gird: {}\n", "line 7: unknown setting sweeps.s.gird; did you mean sweeps.s.grid?"),
        ("ppo.beta: 0.5\n", "line 5: unknown setting ppo.beta;"),
        ("1: 2\n", "line 5: unknown setting 1;"),
    ],
)
def test_unknown_keys_at_every_level(text: str, message: str) -> None:
    assert refusal(SMALL + text).startswith(f"mine.yaml, {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  ppo:\n      betta: 1\n", "line 8: unknown setting"),
        ("  regularizer:\n      lamm: 1\n", "line 8: unknown setting"),
        ("  regularizer:\n      lam: -1\n", "line 7: "),
    ],
)
def test_faults_of_a_policy_are_told_with_the_policy_s_line(text: str, message: str) -> None:
    """Line 5 has `policies:`, line 6 the policy."""
    assert refusal(SMALL + "policies:\n  a:\n  " + text).startswith(f"mine.yaml, {message}")


@pytest.mark.parametrize(("section", "key"), [("model", "nam"), ("data", "formt")])
def test_unknown_keys_of_model_and_data(section: str, key: str) -> None:
    text = SMALL.replace(f"{section}: {{", f"{section}: {{{key}: 1, ")
    line = 2 if section == "model" else 3
    known = {"nam": "name", "formt": "format"}[key]
    assert refusal(text) == f"mine.yaml, line {line}: unknown setting {section}.{key}; did you mean {section}.{known}?"


def test_unknown_keys_of_lora() -> None:
    text = "name: small\nmodel:\n  name: m\n  lora:\n    alfa: 1\ndata: {format: hh}\nreward: {}\n"
    assert refusal(text) == "mine.yaml, line 5: unknown setting model.lora.alfa; did you mean model.lora.alpha?"


@pytest.mark.parametrize("name", ["seeds=1", "ppo.betta=1", "model.lora.rr=1", "policies.a.pppo=1"])
def test_unknown_keys_of_the_command_line(name: str) -> None:
    message = refusal(SMALL + "policies: {a: {}}\n", name)
    assert message.startswith(f"command line ({name}): unknown setting {name.partition('=')[0]}; did you mean ")


@pytest.mark.parametrize("text", ["seed", "=1", "--policy"])
def test_what_is_no_override(text: str) -> None:
    assert refusal(SMALL, text).startswith(f"command line: {text!r} is no setting; write key=value")


@pytest.mark.parametrize("name", ["name", "model", "data"])
def test_what_every_recipe_needs(name: str) -> None:
    text = "".join(line + "\n" for line in SMALL.splitlines() if not line.startswith(name))
    assert refusal(text) == f"mine.yaml: {name} is missing; every recipe needs one"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: one\n", "line 5: seed='one' must be a whole number"),
        ("seed: 1.5\n", "line 5: seed=1.5 must be a whole number"),
        ("sft: 3\n", "line 5: sft=3 must be settings, or null to leave the stage out"),
        ("sft: {learning_rate: no}\n", "line 5: sft.learning_rate='no' must be a number"),
        ("sft: {batch_size: 0}\n", "line 5: sft.batch_size=0 must be 1 or more"),
        ("ppo: {beta: [1]}\n", "line 5: ppo.beta=[1] must be a number"),
        ("ppo: {batch_size: 1.5}\n", "line 5: ppo.batch_size=1.5 must be a whole number"),
        ("split: {sft: 2}\n", "line 5: split: split.sft is 2"),
        ("split: {sft: 0.9}\n", "line 5: split: split.sft, reward and ppo add up to 1.7"),
        ("evaluation: {prompts: -1}\n", "line 5: evaluation: prompts=-1 must be 0 or more"),
        ("sweeps: {s: {}}\n", "line 5: sweeps.s: a sweep needs policies, a grid, or both"),
        (
            "sweeps: {s: {policies: [rlk]}}\npolicies: {rkl: {}}\n",
            "line 5: sweep s: unknown policy rlk; did you mean rkl",
        ),
        ("train: [rlk]\npolicies: {rkl: {}}\n", "line 5: train: unknown policy rlk; did you mean rkl?"),
        ("policies: {a/b: {}}\n", "line 5: policies 'a/b' becomes a folder's name"),
        ("output: runs/{nam}\n", "line 5: output='runs/{nam}' may hold {name} and no other braces"),
        ("output: 'runs/{'\n", "line 5: output='runs/{' may hold {name} and no other braces"),
        ("output: '{name.foo}'\n", "line 5: output='{name.foo}' may hold {name} and no other braces"),
        ("output: '{name[x]}'\n", "line 5: output='{name[x]}' may hold {name} and no other braces"),
        ("output: '{name:>9999999999}'\n", "line 5: output='{name:>9999999999}' may hold {name} and no other braces"),
        ("output: '{name.__class__}'\n", "line 5: output='{name.__class__}' may hold {name} and no other braces"),
        ('output: ""\n', "line 5: output='' must be a folder's path"),
        ('output: "a\\0b"\n', "line 5: output='a\\x00b' must be a folder's path"),
        ("policies: [a, b]\n", "line 5: policies=['a', 'b'] must be settings (`name: value`)"),
        ("policies: rkl\n", "line 5: policies='rkl' must be settings (`name: value`)"),
        ("seed: -1\n", "line 5: seed=-1 is outside 0 to 4294967295"),
        (f"seed: {2**70}\n", f"line 5: seed={2**70} is outside 0 to 4294967295"),
        ("ppo: {data_seed: -1}\n", "line 5: ppo.data_seed=-1 is outside 0 to 4294967295"),
        ("scorer: {kind: function}\n", "line 5: scorer.kind=function needs scorer.function"),
        ("scorer: {kind: code}\n", "line 5: scorer.kind=code needs problems with tests, data.format: apps (it is hh)"),
        ("scorer: {kind: human}\n", "line 5: scorer.kind='human' must be 'model' or 'code' or 'function'"),
        ("scorer: {kind: words}\n", "line 5: scorer.kind=words needs scorer.words or scorer.preferred"),
        ("scorer: {kind: words, placement: end}\n", "line 5: scorer.kind=words needs scorer.words or scorer.pref"),
        ("scorer: {kind: reading-level}\n", "line 5: scorer.kind=reading-level needs scorer.grade"),
        ("scorer: {kind: spelling}\n", "line 5: scorer.kind=spelling needs scorer.spelling"),
        ("scorer: {spelling: french}\n", "line 5: scorer.spelling='french' must be 'british' or 'american' or null"),
        ("scorer: {grade: low}\n", "line 5: scorer.grade='low' must be a number or null"),
        ("scorer: {word: w.txt}\n", "line 5: unknown setting scorer.word; did you mean scorer.words?"),
        ("scorer: {words: w.txt, placement: start}\n", "line 5: scorer.placement='start' must be 'token' or 'end'"),
        (
            "scorer: {kind: function, function: a:b, words: w.txt}\n",
            "line 5: scorer.words is set, but scorer.kind is function; set scorer.kind to words, or drop it",
        ),
        ("scorer: {grade: 6, spelling: british}\n", "line 5: scorer.spelling is set, but scorer.kind is reading-level"),
        (
            "scorer: {grade: 6, placement: token}\n",
            "line 5: scorer.placement is set, but scorer.kind is reading-level; set scorer.kind to words or spelling",
        ),
        ("regularizer: {name: wassersten}\n", "line 5: regularizer: regularizer 'wassersten' is unknown"),
        ("regularizer: {lam: 0}\n", "line 5: regularizer: lam=0.0 must be a finite positive number"),
        ("sft: {batch_size: 8, gradient_accumulation_steps: 2}\n", "line 5: sft sets batch_size and gradient_acc"),
    ],
)
def test_values_that_make_no_sense(text: str, message: str) -> None:
    assert refusal(SMALL + text).startswith(f"mine.yaml, {message}")


@pytest.mark.parametrize("name", OWNED)
def test_what_the_pipeline_sets_itself(name: str) -> None:
    for section in ("sft", "ppo"):
        message = refusal(SMALL + f"{section}:\n  {name}: 1\n")
        assert message == f"mine.yaml, line 6: {section}.{name} cannot be set: {OWNED[name]}"


def test_the_largest_seed() -> None:
    assert load_recipe(write(SMALL), [f"seed={2**32 - 1}", "ppo.data_seed=0"]).seed == 2**32 - 1
    assert refusal(SMALL, f"seed={2**32}").startswith("command line (seed=4294967296): seed=4294967296 is outside")


def test_a_long_override_is_quoted_in_part() -> None:
    assert len(refusal(SMALL, "ppo.beta=" + "[" * 5000)) < 500


def test_a_recipe_without_a_reward() -> None:
    assert "there is no reward: train one (reward: {...}), name one" in refusal(SMALL, "reward=null")
    assert load_recipe("mine.yaml", ["reward=null", "scorer.name=some/model"]).scorer.name == "some/model"


def test_a_sweep_over_a_setting_that_is_not_there_is_told_when_the_recipe_is_read() -> None:
    assert "did you mean ppo.beta?" in refusal(SMALL + "sweeps: {s: {grid: {ppo.betta: [1, 2]}}}\n")


# Writing down.


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_recipe_written_down_is_the_same_recipe(name: str) -> None:
    recipe = load_recipe(name)
    again = load_recipe(write(to_yaml(recipe.as_dict()), "again.yaml"))
    assert again == recipe
    assert again.as_dict() == recipe.as_dict()
    for policy in recipe.policy_names:
        own, other = recipe.policy(policy), again.policy(policy)
        assert (other.ppo, other.regularizer) == (own.ppo, own.regularizer)


@pytest.mark.parametrize("name", ["tldr-gemma-2b", "hh-smollm2-135m"])
def test_a_recipe_with_overrides_written_down_trains_the_same_policies(name: str) -> None:
    """`recipe.yaml` of a run's folder is what a reader repeats the run with."""
    recipe = load_recipe(name, ["ppo.beta=0.02", "seed=4", "model.lora.r=8"])
    again = load_recipe(write(to_yaml(recipe.as_dict()), "again.yaml"))
    for policy in recipe.policy_names:
        assert again.policy(policy).ppo == recipe.policy(policy).ppo


def test_unset_parts_of_the_regularizer_are_not_written() -> None:
    assert load_recipe(write(SMALL + "regularizer: {lam: 3}\n")).as_dict()["regularizer"] == {
        "name": "wasserstein",
        "preset": "semantic",
        "lam": 3.0,
    }
