"""Recipes: merging, overrides, policies, and refusals that name the key, the nearest known one and the line."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wpr.pipeline.errors import RecipeError
from wpr.pipeline.recipe import (
    OWNED,
    RESETS,
    find_recipe,
    load_recipe,
    merge,
    merge_dotted,
    shipped_recipes,
)
from wpr.pipeline.yaml_file import to_yaml

SMALL = "name: small\nmodel: {name: m}\ndata: {format: hh}\nreward: {}\n"
"""Four lines: what every recipe needs, and a reward."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "mine.yaml") -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return name


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(text), list(overrides))
    told = str(caught.value)
    assert "\n" not in told
    return told


# Merging.

SECTIONS = st.sampled_from(["ppo", "sft", "beta", "seed", "lam"])  # none that `RESETS` speaks of
TREES = st.recursive(
    st.integers() | st.none() | st.lists(st.integers(), max_size=2),
    lambda part: st.dictionaries(SECTIONS, part, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


@given(TREES)
def test_merging_nothing_changes_nothing(tree: dict[str, Any]) -> None:
    assert merge(tree, {}) == tree
    assert merge({}, tree) == tree
    assert merge(tree, tree) == tree


@given(TREES, TREES)
def test_the_top_wins(base: dict[str, Any], top: dict[str, Any]) -> None:
    merged = merge(base, top)

    def check(merged: dict[str, Any], base: dict[str, Any], top: dict[str, Any]) -> None:
        assert set(merged) == {*base, *top}
        for key, value in merged.items():
            if key not in top:
                assert value == base[key]
            elif isinstance(top[key], dict) and isinstance(base.get(key), dict):
                check(value, base[key], top[key])
            else:
                assert value == top[key]

    check(merged, base, top)
    assert merge(merged, top) == merged


@given(TREES, TREES)
def test_merging_leaves_its_arguments_alone(base: dict[str, Any], top: dict[str, Any]) -> None:
    before = copy.deepcopy((base, top))
    merge(base, top)
    assert (base, top) == before


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


@given(TREES, TREES)
def test_dotted_changes_are_a_tree_written_flat(base: dict[str, Any], top: dict[str, Any]) -> None:
    assert merge_dotted(base, flat(top)) == merge(base, top)


@given(TREES)
def test_dotted_changes_come_in_any_order(tree: dict[str, Any]) -> None:
    changes = flat(tree)
    backwards = dict(reversed(changes.items()))
    assert merge_dotted({}, changes) == merge_dotted({}, backwards)


@pytest.mark.parametrize(
    "changes",
    [
        {"ppo": 2, "ppo.beta": 1},
        {"ppo.beta": 1, "ppo": 2},
    ],
)
def test_a_section_and_a_part_of_it(changes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="keep one of them"):
        merge_dotted({}, changes)


def test_another_regularizer_takes_nothing_along() -> None:
    base = {"regularizer": {"name": "wasserstein", "preset": "paper", "lam": 100.0, "k2": 128}}
    assert merge(base, {"regularizer": {"name": "reverse-kl"}}) == {"regularizer": {"name": "reverse-kl"}}
    assert merge(base, {"regularizer": {"preset": "semantic"}}) == {"regularizer": {"preset": "semantic"}}
    assert merge(base, {"regularizer": {"name": "wasserstein", "lam": 5.0}})["regularizer"]["k2"] == 128


def test_another_dataset_takes_its_files_along() -> None:
    base = {"data": {"format": "hh", "source": "a", "revision": "r", "columns": {"chosen": "good"}, "limit": 9}}
    assert merge(base, {"data": {"format": "tldr"}}) == {"data": {"format": "tldr", "limit": 9}}
    found = merge(base, {"data": {"source": "b"}})["data"]
    assert found == {"format": "hh", "source": "b", "columns": {"chosen": "good"}, "limit": 9}
    assert merge(base, {"data": {"format": "hh", "limit": 3}})["data"]["revision"] == "r"


def test_another_model_takes_its_revision_along() -> None:
    base = {"model": {"name": "a", "revision": "r", "precision": "bf16"}}
    assert merge(base, {"model": {"name": "b"}}) == {"model": {"name": "b", "precision": "bf16"}}
    assert set(RESETS) == {"regularizer", "data", "model"}


# Overrides and policies.


def test_overrides_are_above_the_file_and_the_policies() -> None:
    text = SMALL + "ppo: {beta: 0.1, gamma: 0.9}\npolicies:\n  a: {ppo: {beta: 0.2}}\n  b: {}\n"
    recipe = load_recipe(write(text))
    assert [recipe.policy(name).ppo["beta"] for name in ("a", "b")] == [0.2, 0.1]
    changed = load_recipe("mine.yaml", ["ppo.beta=5e-1", "seed=3", "data.source=x.jsonl"])
    assert [changed.policy(name).ppo["beta"] for name in ("a", "b")] == [0.5, 0.5]
    assert changed.policy("a").ppo["gamma"] == 0.9
    assert (changed.seed, changed.data.source) == (3, "x.jsonl")


def test_an_override_of_one_policy_is_of_that_one() -> None:
    text = SMALL + "ppo: {beta: 0.1}\npolicies:\n  a: {ppo: {beta: 0.2}}\n  b: {}\n"
    recipe = load_recipe(write(text), ["policies.a.ppo.beta=0.7"])
    assert [recipe.policy(name).ppo["beta"] for name in ("a", "b")] == [0.7, 0.1]


def test_the_last_of_two_overrides_wins() -> None:
    assert load_recipe(write(SMALL), ["seed=1", "seed=2"]).seed == 2


def test_an_override_may_add_a_policy_or_take_one_out() -> None:
    text = SMALL + "policies:\n  a: {}\n  b: {}\n"
    recipe = load_recipe(write(text), ["policies.c.regularizer.name=js", "policies.b=null"])
    assert recipe.policy_names == ["a", "c"]
    assert recipe.policy("c").regularizer.name == "js"


def test_changes_of_a_sweep_are_above_everything() -> None:
    recipe = load_recipe(write(SMALL + "policies: {a: {ppo: {beta: 0.2}}}\n"), ["ppo.beta=0.3"])
    assert recipe.policy("a", {"ppo.beta": 0.4}).ppo["beta"] == 0.4


def test_a_regularizer_override_reaches_the_policies_that_know_it() -> None:
    text = SMALL + "policies:\n  w: {regularizer: {preset: paper}}\n  kl: {regularizer: {name: rkl}}\n"
    recipe = load_recipe(write(text), ["regularizer.lam=7"])
    assert recipe.policy("w").regularizer.lam == 7.0


def test_a_recipe_without_policies_has_one() -> None:
    recipe = load_recipe(write(SMALL + "ppo: {beta: 0.3}\n"))
    assert recipe.policy_names == recipe.trained_policies == ["policy"]
    assert recipe.policy("policy").ppo == {"beta": 0.3}


def test_trained_policies_are_those_of_train() -> None:
    recipe = load_recipe(write(SMALL + "policies: {a: {}, b: {}}\ntrain: [b]\n"))
    assert (recipe.trained_policies, recipe.policy_names) == (["b"], ["a", "b"])


def test_a_policy_that_is_not_there() -> None:
    recipe = load_recipe(write(SMALL + "policies: {semantic: {}}\n"))
    with pytest.raises(RecipeError, match="recipe small: unknown policy semantics; did you mean semantic"):
        recipe.policy("semantics")


def test_a_policy_named_by_a_number_keeps_its_settings() -> None:
    assert load_recipe(write(SMALL + "policies: {1: {ppo: {beta: 0.7}}}\n")).policy("1").ppo == {"beta": 0.7}


def test_the_folder_is_the_output_with_the_name() -> None:
    assert load_recipe(write(SMALL)).folder == Path("runs/small")
    assert load_recipe("mine.yaml", ["output=~/x/{name}-2"]).folder == Path.home() / "x" / "small-2"


# Extending.


def test_a_recipe_builds_on_another_one() -> None:
    write(SMALL + "ppo: {beta: 0.1, gamma: 0.9}\npolicies: {a: {}, b: {}}\n", "base.yaml")
    recipe = load_recipe(write("extends: base.yaml\nname: top\nppo: {beta: 0.2}\npolicies: {b: null, c: {}}\n"))
    assert (recipe.name, recipe.ppo) == ("top", {"beta": 0.2, "gamma": 0.9})
    assert recipe.policy_names == ["a", "c"]


def test_the_base_is_looked_for_beside_the_recipe() -> None:
    write(SMALL + "seed: 1\n", "there/base.yaml")
    assert load_recipe(write("extends: base.yaml\nname: top\n", "there/top.yaml")).seed == 1


def test_the_base_beside_the_recipe_comes_before_the_working_folder() -> None:
    write(SMALL + "seed: 1\n", "there/base.yaml")
    write(SMALL + "seed: 2\n", "base.yaml")
    assert load_recipe(write("extends: base.yaml\nname: top\n", "there/top.yaml")).seed == 1


def test_a_fault_of_the_base_names_the_base() -> None:
    write(SMALL + "ppo:\n  betta: 1\n", "base.yaml")
    assert refusal("extends: base.yaml\nname: top\n").startswith("base.yaml, line 6: unknown setting ppo.betta")


def test_a_circle_is_refused() -> None:
    write("extends: mine.yaml\nname: b\n", "b.yaml")
    assert "mine.yaml extends itself, through mine.yaml -> b.yaml; break the circle" in refusal("extends: b.yaml\n")


def test_a_circle_through_other_folders_is_refused() -> None:
    name = write("extends: ../there/top.yaml\nname: a\n", "there/top.yaml")
    with pytest.raises(RecipeError, match="extends itself"):
        load_recipe(name)


def test_extends_takes_a_name() -> None:
    assert refusal("extends: [a, b]\n") == "mine.yaml, line 1: extends=['a', 'b'] must be the name of a recipe"


# Finding.


def test_shipped_recipes_are_found_by_name() -> None:
    assert set(shipped_recipes()) == {
        "apps-codegemma-7b", "hh-gemma-2b", "hh-qwen1.5-1.8b-chat", "hh-smollm2-135m", "tiny", "tldr-gemma-2b",
        "tldr-gemma-7b",
    }  # fmt: skip
    assert find_recipe("tiny") == shipped_recipes()["tiny"]
    write(SMALL, "tiny")
    assert find_recipe("tiny") == Path("tiny")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tinny", "there is no such file: unknown recipe tinny; did you mean tiny?"),
        ("gone.yaml", "there is no recipe file gone.yaml; `wpr recipes` lists the shipped ones"),
        ("../recipes/tiny", "there is no recipe file ../recipes/tiny; `wpr recipes` lists the shipped ones"),
        ("folder.yaml", "folder.yaml is a folder; name a recipe file"),
    ],
)
def test_recipes_that_are_not_there(name: str, told: str) -> None:
    Path("folder.yaml").mkdir()
    with pytest.raises(RecipeError) as caught:
        load_recipe(name)
    assert str(caught.value) == told


# Refusals. The recipe has four lines, so that what follows begins in line 5.


@pytest.mark.parametrize(
    ("text", "told"),
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
        ("policies:\n  a:\n    pppo: {}\n", "line 7: unknown setting policies.a.pppo; did you mean policies.a.ppo?"),
        ("sweeps:\n  s:\n    gird: {}\n", "line 7: unknown setting sweeps.s.gird; did you mean sweeps.s.grid?"),
        ("ppo.beta: 0.5\n", "line 5: unknown setting ppo.beta;"),
        ("1: 2\n", "line 5: unknown setting 1;"),
    ],
)
def test_unknown_keys_at_every_level(text: str, told: str) -> None:
    assert refusal(SMALL + text).startswith(f"mine.yaml, {told}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("  ppo:\n      betta: 1\n", "line 8: unknown setting"),
        ("  regularizer:\n      lamm: 1\n", "line 8: unknown setting"),
        ("  regularizer:\n      lam: -1\n", "line 7: "),
    ],
)
def test_faults_of_a_policy_are_told_with_the_policy_s_line(text: str, told: str) -> None:
    """Line 5 has `policies:`, line 6 the policy."""
    assert refusal(SMALL + "policies:\n  a:\n  " + text).startswith(f"mine.yaml, {told}")


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
    told = refusal(SMALL + "policies: {a: {}}\n", name)
    assert told.startswith(f"command line ({name}): unknown setting {name.partition('=')[0]}; did you mean ")


@pytest.mark.parametrize("text", ["seed", "=1", "--policy"])
def test_what_is_no_override(text: str) -> None:
    assert refusal(SMALL, text).startswith(f"command line: {text!r} is no setting; write key=value")


@pytest.mark.parametrize("name", ["name", "model", "data"])
def test_what_every_recipe_needs(name: str) -> None:
    text = "".join(line + "\n" for line in SMALL.splitlines() if not line.startswith(name))
    assert refusal(text) == f"recipe: {name} is missing; every recipe needs one"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed: one\n", "line 5: seed='one' must be a whole number"),
        ("seed: 1.5\n", "line 5: seed=1.5 must be a whole number"),
        ("sft: 3\n", "line 5: sft=3 must be settings, or null to leave the stage out"),
        ("sft: {learning_rate: no}\n", "line 5: sft.learning_rate='no' must be a number"),
        ("sft: {batch_size: 0}\n", "line 5: sft.batch_size must be 1 or more"),
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
        ("scorer: {kind: function}\n", "line 5: scorer.kind=function needs scorer.function"),
        ("scorer: {kind: code}\n", "line 5: scorer.kind=code needs problems with tests, data.format: apps (it is hh)"),
        ("scorer: {kind: human}\n", "line 5: scorer.kind='human' must be 'model' or 'code' or 'function'"),
        ("regularizer: {name: wassersten}\n", "line 5: regularizer: regularizer 'wassersten' is unknown"),
        ("regularizer: {lam: 0}\n", "line 5: regularizer: lam=0.0 must be a finite positive number"),
        ("sft: {batch_size: 8, gradient_accumulation_steps: 2}\n", "line 5: sft sets batch_size and gradient_acc"),
    ],
)
def test_values_that_make_no_sense(text: str, told: str) -> None:
    assert refusal(SMALL + text).startswith(f"mine.yaml, {told}")


@pytest.mark.parametrize("name", OWNED)
def test_what_the_pipeline_sets_itself(name: str) -> None:
    for section in ("sft", "ppo"):
        told = refusal(SMALL + f"{section}:\n  {name}: 1\n")
        assert told == f"mine.yaml, line 6: {section}.{name} cannot be set: {OWNED[name]}"


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
        "lam": 3.0,
    }
