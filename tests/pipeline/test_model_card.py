"""The model card: a metadata block that parses, the numbers that were measured, and the recipe, to run again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from wpr.config.recipe_file import load_recipe
from wpr.pipeline.model_card import flatten, model_card

RESULTS: dict[str, Any] = {
    "rows": 120,
    "train": {"loss": 9.87654321},
    "before": {"loss": 2.0},
    "after": {"loss": 1.23456789, "score": float("nan")},
    "calibration": [{"pairs": 3}],
}


def card(stage: str, *changes: str) -> str:
    recipe = load_recipe("hh-gemma-2b", list(changes))
    return model_card(recipe.policy(stage[4:]) if stage.startswith("ppo/") else recipe, stage, RESULTS)


def front(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return found


@pytest.mark.parametrize(
    ("stage", "task"),
    [("sft", "text-generation"), ("reward", "text-classification"), ("ppo/rkl", "text-generation")],
)
def test_the_hub_s_block(stage: str, task: str) -> None:
    text = card(stage)
    assert text.startswith("---\n")
    assert front(text) == {
        "base_model": "google/gemma-2b",
        "library_name": "transformers",
        "tags": ["wpr", stage.partition("/")[0]],
        "pipeline_tag": task,
    }
    assert f"# hh-gemma-2b: {stage}\n" in text


def test_a_base_model_that_only_this_machine_has_is_not_named_to_the_hub(tmp_path: Path) -> None:
    assert "base_model" not in front(card("sft", f"model.name={tmp_path}"))


def test_what_was_measured() -> None:
    rows = dict(re.findall(r"^\| (\S+) \| (\S+) \|$", card("sft"), re.MULTILINE))
    assert rows == {"measure": "value", "rows": "120", "before.loss": "2", "after.loss": "1.235", "after.score": "nan"}


@pytest.mark.parametrize("stage", ["sft", "ppo/rkl"])
def test_the_recipe_in_the_card_runs_again(stage: str, tmp_path: Path) -> None:
    block = re.search(r"```yaml\n(.*?)```", card(stage, "seed=3", "description='a: b | c'"), re.DOTALL)
    assert block is not None
    path = tmp_path / "again.yaml"
    path.write_text(block[1])
    again = load_recipe(str(path))
    assert (again.seed, again.description) == (3, "a: b | c")
    if stage == "ppo/rkl":
        assert (again.ppo["beta"], again.regularizer.name) == (0.001, "reverse-kl")


def test_versions_are_named() -> None:
    assert f"torch {torch.__version__.partition('+')[0]}" in card("sft").split("## Versions")[1]


def test_nested_results_get_dotted_names() -> None:
    assert flatten({"a": 1, "b": {"c": {"d": 2.0}, "e": [1]}, "f": {}}) == {"a": 1, "b.c.d": 2.0}
