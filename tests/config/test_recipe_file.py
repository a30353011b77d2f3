"""Recipe files: overrides, policies, recipes that build on others, and those that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.recipes import SMALL, refusal, write
from wpr.config.recipe_file import find_recipe, load_recipe, shipped_recipes
from wpr.errors import RecipeError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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
    assert recipe.policy("c").regularizer.name == "jensen-shannon"


def test_changes_of_a_sweep_are_above_everything() -> None:
    recipe = load_recipe(write(SMALL + "policies: {a: {ppo: {beta: 0.2}}}\n"), ["ppo.beta=0.3"])
    assert recipe.policy("a", {"ppo.beta": 0.4}).ppo["beta"] == 0.4


SUM = "regularizer:\n  - {name: reverse-kl}\n  - {name: semantic, weight: 4, lam: 10}\n"


def test_a_list_is_a_sum_of_regularizers() -> None:
    text = SMALL + SUM + "policies:\n  sum: {}\n  alone: {regularizer: {name: rkl}}\n"
    recipe = load_recipe(write(text))
    parts = recipe.policy("sum").regularizer.parts
    assert [(part.name, part.weight) for part in parts] == [("reverse-kl", 1.0), ("wasserstein", 4.0)]
    assert parts[1].settings().lam == 10
    assert recipe.policy("alone").regularizer.name == "reverse-kl"
    assert recipe.policy("sum").as_dict()["regularizer"][1]["weight"] == 4.0
    line = ["regularizer=[{name: fkl}, {name: paper, weight: 2}]"]
    assert [part.name for part in load_recipe(write(SMALL), line).regularizer.parts] == ["forward-kl", "wasserstein"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SUM.replace("weight: 4", "weight: -4"), "weight=-4.0 of semantic must be a finite positive number"),
        (SUM.replace("weight: 4", "weigth: 4"), "unknown setting regularizer.1.weigth; did you mean"),
        ("regularizer: []\n", "regularizer: a sum of nothing"),
        ("regularizer: [reverse-kl]\n", "regularizer.0 is 'reverse-kl'; it takes settings"),
        (SUM + "policies: {a: {regularizer: {weight: 3}}}\n", "regularizer.weight is set, but regularizer is a list"),
    ],
)
def test_sums_that_are_refused(text: str, message: str) -> None:
    assert message in refusal(SMALL + text)


def test_a_setting_of_a_sum_on_the_command_line() -> None:
    """It goes to the part that has it, also where the sum is the default."""
    for text in (SMALL + SUM, SMALL, SMALL + "policies: {a: {ppo: {beta: 0.1}}}\n"):
        recipe = load_recipe(write(text), ["regularizer.lam=3"])
        found = recipe.policy(recipe.policy_names[0]).regularizer
        assert [part.name for part in found.parts] == ["reverse-kl", "wasserstein"]
        assert found.parts[1].settings().lam == 3.0
        assert found.parts[1].weight == 4.0
    message = "regularizer.weight is set, but regularizer is a list .* of which 2 parts have it: which one is meant"
    with pytest.raises(RecipeError, match=message):
        load_recipe(write(SMALL + SUM), ["regularizer.weight=3"])


def test_another_regularizer_replaces_the_default_sum() -> None:
    assert load_recipe(write(SMALL), ["regularizer.name=paper"]).regularizer.preset == "paper"


def test_a_regularizer_override_reaches_the_policies_that_know_it() -> None:
    text = SMALL + "policies:\n  w: {regularizer: {preset: paper}}\n  kl: {regularizer: {name: rkl}}\n"
    recipe = load_recipe(write(text), ["regularizer.lam=7"])
    assert recipe.policy("w").regularizer.settings().lam == 7.0


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
    sweeps = "sweeps: {all: {policies: [a]}, old: {policies: [b]}}\n"
    write(SMALL + "ppo: {beta: 0.1, gamma: 0.9}\npolicies: {a: {}, b: {}}\n" + sweeps, "base.yaml")
    changes = "ppo: {beta: 0.2}\npolicies: {b: null, c: {}}\nsweeps: {old: null}\n"
    recipe = load_recipe(write(f"extends: base.yaml\nname: top\n{changes}"))
    assert (recipe.name, recipe.ppo) == ("top", {"beta": 0.2, "gamma": 0.9})
    assert recipe.policy_names == ["a", "c"]
    assert list(recipe.sweeps) == ["all"]


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
        "apps-codegemma-7b", "hh-gemma-2b", "hh-qwen1.5-1.8b-chat", "hh-smollm2-135m", "quickstart",
        "quickstart-quick", "rewrite", "rewrite-smollm2-135m", "stories", "tiny", "tldr-gemma-2b", "tldr-gemma-7b",
    }  # fmt: skip
    assert find_recipe("tiny") == shipped_recipes()["tiny"]
    write(SMALL, "tiny")
    assert find_recipe("tiny") == Path("tiny")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tinny", "tinny is not a file here: unknown recipe tinny; did you mean tiny?"),
        ("gone.yaml", "there is no recipe file gone.yaml; `wpr recipes` lists the shipped ones"),
        ("../recipes/tiny", "there is no recipe file ../recipes/tiny; the shipped recipe is tiny"),
        ("folder.yaml", "folder.yaml is a folder; name a recipe file"),
    ],
)
def test_recipes_that_are_not_there(name: str, message: str) -> None:
    Path("folder.yaml").mkdir()
    with pytest.raises(RecipeError) as caught:
        load_recipe(name)
    assert str(caught.value) == message


# Words to avoid, by the name that users type.

BARE = SMALL.removesuffix("reward: {}\n")


def test_a_setting_of_a_rule_says_which_rule_it_is() -> None:
    given = {
        "words=w.txt": "words",
        "preferred=w.txt": "words",
        "grade=6": "reading-level",
        "spelling=british": "spelling",
    }
    for setting, kind in given.items():
        assert load_recipe(write(SMALL), [f"scorer.{setting}"]).scorer.kind == kind
    assert load_recipe(write(SMALL)).scorer.kind == "model"


def test_words_by_their_other_name() -> None:
    recipe = load_recipe(write(BARE + "reward: {words: a.txt, preferred: b.txt}\n"))
    assert (recipe.scorer.kind, recipe.scorer.words, recipe.scorer.preferred) == ("words", "a.txt", "b.txt")
    assert recipe.reward is None
    changed = load_recipe("mine.yaml", ["reward.words=c.txt"])
    assert (changed.scorer.words, changed.scorer.preferred) == ("c.txt", "b.txt")
    trained = load_recipe(write(BARE + "reward: {batch_size: 4, words: a.txt}\n"))
    assert (trained.reward, trained.scorer.words) == ({"batch_size": 4}, "a.txt")
    assert load_recipe(write(SMALL), ["reward.words=a.txt", "reward=null"]).scorer.words == "a.txt"


def test_errors_name_the_line_of_the_other_name() -> None:
    both = BARE + "scorer: {words: a.txt}\nreward: {words: b.txt}\n"
    message = "reward.words is another name of scorer.words, which is set too; keep one"
    assert refusal(both) == f"mine.yaml, line 5: {message}"
    assert refusal(BARE + "reward: {words: 3}\n").startswith("mine.yaml, line 4: scorer.words=3 must be text or null")
    assert "command line (reward.words=[1]): scorer.words=[1] must be" in refusal(SMALL, "reward.words=[1]")
    assert "unknown setting reward.wordz" in refusal(SMALL, "reward.wordz=a.txt")


def test_another_kind_of_scorer_takes_nothing_of_the_old_one() -> None:
    write(SMALL + "scorer: {kind: function, function: a:b}\n", "base.yaml")
    recipe = load_recipe(write("extends: base.yaml\nscorer: {kind: words, words: w.txt}\n"))
    assert (recipe.scorer.function, recipe.scorer.words) == (None, "w.txt")
