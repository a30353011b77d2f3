"""Sweeps: which policies, called what, with which changes; and the table that compares them."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from wpr.config.recipe import Recipe
from wpr.config.recipe_file import load_recipe
from wpr.errors import RecipeError
from wpr.pipeline.run import plan
from wpr.pipeline.sweep import as_csv, comparison, members

TEXT = """
extends: tiny
name: mine
train: [semantic]
sweeps:
  names: {policies: [semantic, rkl]}
  values: {policies: [rkl], grid: {ppo.beta: [0.1, 1e-3], ppo.gamma: [1, 0.9]}}
  bare: {grid: {ppo.beta: [0.5]}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    path = tmp_path_factory.mktemp("sweep") / "mine.yaml"
    path.write_text(TEXT)
    return load_recipe(str(path))


def test_policies_by_name(recipe: Recipe) -> None:
    assert members(recipe, "names", [], []) == {"semantic": {}, "rkl": {}}
    assert members(recipe, "names", ["rkl"], []) == {"rkl": {}}
    assert members(recipe, None, [], []) == {"semantic": {}}  # those that `wpr run` trains


def test_a_grid_is_every_combination(recipe: Recipe) -> None:
    assert members(recipe, "values", [], []) == {
        "rkl+beta=0.1+gamma=1": {"ppo.beta": 0.1, "ppo.gamma": 1},
        "rkl+beta=0.1+gamma=0.9": {"ppo.beta": 0.1, "ppo.gamma": 0.9},
        "rkl+beta=0.001+gamma=1": {"ppo.beta": 0.001, "ppo.gamma": 1},
        "rkl+beta=0.001+gamma=0.9": {"ppo.beta": 0.001, "ppo.gamma": 0.9},
    }
    assert list(members(recipe, "bare", [], [])) == ["semantic+beta=0.5"]
    assert list(members(recipe, "bare", ["rkl", "semantic"], [])) == ["rkl+beta=0.5", "semantic+beta=0.5"]


def test_a_grid_of_the_command_line(recipe: Recipe) -> None:
    found = members(recipe, None, ["rkl"], ["ppo.beta=1e-1,2", "regularizer.estimator=paper"])
    assert found == {
        "rkl+beta=0.1+estimator=paper": {"ppo.beta": 0.1, "regularizer.estimator": "paper"},
        "rkl+beta=2+estimator=paper": {"ppo.beta": 2, "regularizer.estimator": "paper"},
    }


def test_the_command_line_replaces_values_of_the_sweep(recipe: Recipe) -> None:
    found = members(recipe, "values", [], ["ppo.gamma=0.5"])
    assert list(found) == ["rkl+beta=0.1+gamma=0.5", "rkl+beta=0.001+gamma=0.5"]


def test_members_share_what_comes_before_ppo(recipe: Recipe) -> None:
    found = members(recipe, "values", [], [])
    stages = plan(recipe, list(found), found)
    assert [stage.name for stage in stages] == ["prepare", "sft", "reward", *(f"ppo/{name}" for name in found)]
    assert [stage.recipe.ppo["gamma"] for stage in stages[3:]] == [1.0, 0.9, 1.0, 0.9]
    assert len({str(stage.inputs) for stage in stages[3:]}) == 4


@pytest.mark.parametrize(
    ("sweep", "policies", "grid", "message"),
    [
        ("valuse", [], [], "recipe mine: unknown sweep valuse; did you mean values?"),
        (None, ["rlk"], [], "recipe mine: unknown policy rlk; did you mean rkl?"),
        (None, [], ["ppo.beta"], "--grid 'ppo.beta' must be key=value,value,..."),
        (None, [], ["ppo.beta="], "--grid 'ppo.beta=' must be key=value,value,..."),
        (None, [], ["sft.learning_rate=1,2"], "grpo, rloo and their settings; sft.learning_rate is none"),
        (None, [], ["seed=1,2"], "grpo, rloo and their settings; seed is none"),
    ],
)
def test_sweeps_that_are_refused(
    sweep: str | None, policies: list[str], grid: list[str], message: str, recipe: Recipe
) -> None:
    with pytest.raises(RecipeError) as caught:
        members(recipe, sweep, policies, grid)
    assert message in str(caught.value)


def test_a_grid_over_a_setting_that_is_not_there_names_the_grid(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match=r"ppo\.betta; did you mean ppo\.beta\?") as caught:
        members(recipe, None, ["rkl"], ["ppo.betta=1"])
    assert str(caught.value).startswith("the sweep's grid: ")  # no line of the file is at fault
    found = members(recipe, None, ["rkl"], ["ppo.beta=-1"])
    assert plan(recipe, list(found), found)[-1].recipe.ppo["beta"] == -1  # the value is its trainer's to refuse


def test_values_with_a_slash_make_no_folders_of_their_own(recipe: Recipe) -> None:
    for name in members(recipe, None, ["semantic"], ["regularizer.embeddings=a/b,c/../d"]):
        assert Path(name).name == name


RESULTS: dict[str, dict[str, Any]] = {
    "sft": {"after": {"loss": 1.0}},
    "ppo/rkl": {
        "before": {"score": 0.25, "kl": 0.0},
        "after": {"score": 1.5, "kl": 3.0, "divergence": 2.0, "entropy": 1.0, "response_length": 9.0},
        "win_rate_before": 0.75,
    },
    "ppo/rkl+beta=0.5": {"after": {"score": -1.0, "pass_at_1_all": 0.5, "pass_at_1_interview": 0.25}},
}


def test_a_row_for_each_policy() -> None:
    assert comparison(RESULTS) == [
        {"policy": "rkl", "score before": 0.25, "score": 1.5, "win rate": 0.75, "KL": 3.0, "divergence": 2.0,
         "entropy": 1.0, "length": 9.0},
        {"policy": "rkl+beta=0.5", "score": -1.0, "pass_at_1_all": 0.5, "pass_at_1_interview": 0.25},
    ]  # fmt: skip
    assert comparison({"sft": RESULTS["sft"]}) == []


def test_the_table_as_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(comparison(RESULTS)))))
    assert [row["policy"] for row in rows] == ["rkl", "rkl+beta=0.5"]
    assert [row["score"] for row in rows] == ["1.5", "-1.0"]
    assert [row["pass_at_1_all"] for row in rows] == ["", "0.5"]
    quoted = as_csv([{"policy": 'a,"b"', "score": 1.0}])
    assert next(csv.DictReader(io.StringIO(quoted)))["policy"] == 'a,"b"'
