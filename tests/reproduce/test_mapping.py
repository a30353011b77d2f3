"""Every table and figure of the paper has its commands, and these are commands that `wpr` has."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import typer.main

import wpr
from wpr.cli import app
from wpr.config.recipe_file import load_recipe
from wpr.errors import RecipeError
from wpr.reproduce import find_items, load_mapping
from wpr.reproduce.mapping import BEYOND
from wpr.reproduce.needs import needs_of
from wpr.reproduce.steps import TRAINING, Options, Step, steps_of

# As the paper's source labels them, in its order; parts of a figure go with the figure.
LABELS = [
    "fig:motivation", "fig:temp", "fig:overview", "tab:main", "tab:7b", "tab:qwen", "tab:mt_bench", "tab:apps",
    "tab:abl", "fig:sens_beta", "fig:penalty", "tab:corr_bert", "tab:semantic", "fig:casestudy", "tab:ppo-hparams",
    "tab:beta", "tab:f_div", "fig:sinkhorn_converge", "fig:truncation_k2", "tab:embedding", "tab:analysis_k_2",
    "tab:analysis_lambda", "tab:wallclock", "tab:gpu", "tab:example_tldr", "tab:example_hh",
]  # fmt: skip
ITEMS = load_mapping().items


@cache
def steps(label: str) -> list[Step]:
    """As a user with a server's judge has them."""
    return steps_of(ITEMS[label], Options(judge=("--judge", "gpt-4o"), questions=Path("question.jsonl")))


def test_every_table_and_figure_is_there() -> None:
    assert [label for label in ITEMS if not label.startswith(BEYOND)] == LABELS
    assert [item.id for item in find_items(["all"])] == LABELS


def test_items_are_found_by_label_or_its_end() -> None:
    assert [item.id for item in find_items(["main", "tab:main", "fig:temp"])] == ["tab:main", "fig:temp"]
    with pytest.raises(RecipeError, match="did you mean tab:mt_bench"):
        find_items(["tab:mtbench"])


@pytest.mark.parametrize("label", ITEMS)
def test_an_item_says_where_its_numbers_are(label: str) -> None:
    """Rows and columns with sources that are known, a finding, or why there is nothing; the paper's numbers fit."""
    item = ITEMS[label]
    assert sum([bool(item.columns), item.finding is not None, item.nothing is not None]) == 1
    assert all(column["source"] in load_mapping().sources for column in item.columns.values())
    assert set(item.paper) in (set(), set(item.rows))
    assert all(len(cells) == len(item.columns) for cells in item.paper.values())
    assert all(name in load_mapping().hardware for name in item.recipes)


@pytest.mark.parametrize("label", ITEMS)
def test_commands_are_ones_that_wpr_has(label: str) -> None:
    """Parsed by the command itself, which refuses options that it does not know."""
    for step in steps(label):
        command, words = typer.main.get_command(app), list(step.words)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context("wpr", words)


@pytest.mark.parametrize("label", ITEMS)
def test_policies_are_the_recipe_s_and_trained_before_they_are_used(label: str) -> None:
    trained: dict[str, set[str]] = {}
    for step in steps(label):
        names = {stage.name.removeprefix("ppo/") for stage in step.stages if stage.name.startswith("ppo/")}
        own = trained.setdefault(str(step.run), set())
        own |= names
        if step.kind not in TRAINING:
            assert set(step.policies) <= own, step
            assert own, step
        for folder, name in re.findall(r"(\S+):(\w+)", " ".join(step.words)) if step.kind == "judge" else []:
            assert name == "sft" or name in trained[folder]


def test_what_a_cell_reads_is_what_a_command_writes() -> None:
    """Every source's folder is the result of one of the item's commands."""
    checked = 0
    for label, item in ITEMS.items():
        results = {str(step.result) for step in steps(label)}
        for column in item.columns.values():
            source = load_mapping().sources[column["source"]]
            for row in item.rows.values():
                places = {"runs": "runs", "item": item.name} | column | row
                text = source.get("finding") or source.get("example")
                if text is not None:
                    for name, value in places.items():
                        text = text.replace(f"{{{name}}}", value)
                    assert str(Path(text)) in results, (label, text)
                    checked += 1
    assert checked > 100


def test_the_paper_s_betas_are_the_recipes() -> None:
    for row, cells in ITEMS["tab:beta"].paper.items():
        policy = ITEMS["tab:beta"].rows[row]["row"]
        for recipe, printed in zip(("tldr-gemma-2b", "hh-gemma-2b"), cells[2:], strict=True):
            assert load_recipe(recipe).policy(policy).ppo["beta"] == printed


@pytest.mark.parametrize("label", ["tab:beta", "open:target-rewrite", "open:target-hh"])
def test_a_rehearsal_has_two_values_of_every_sweep(label: str) -> None:
    options = Options(model="models/none", scale=0.01, data=Path("none.jsonl"))
    sweeps = [step for step in steps_of(ITEMS[label], options) if step.kind == "sweep"]
    for step in sweeps:
        sweep = step.recipe.sweeps[step.words[2]]
        assert [len(values) for values in sweep.grid.values() if len(values) > 1] == [2]
        trained = [stage for stage in step.stages if stage.name.startswith("ppo/")]
        assert len(trained) == 2 * len(step.policies or sweep.policies)
    assert sweeps


def test_a_rehearsal_leaves_prepared_data_its_model() -> None:
    """Sentences are cut to what their model's tokenizer makes of them; with another's template none would be left."""
    options = Options(model="models/none", scale=0.01, data=Path("none.jsonl"))
    prepared, other = (steps_of(ITEMS[label], options)[0].recipe for label in ("open:target-rewrite", "tab:apps"))
    assert prepared.model.name == "{prepare}/model"
    assert other.model.name == "models/none"


def test_the_size_of_a_prepared_model_is_not_that_of_the_rehearsal_s() -> None:
    pico = str(Path(wpr.__file__).parent / "pico")
    options = Options(model=pico, scale=0.01, data=Path("none.jsonl"))
    unknown = {
        label: needs_of(steps_of(ITEMS[label], options), options).unknown
        for label in ("open:target-rewrite", "tab:qwen")
    }
    assert unknown == {"open:target-rewrite": ("{prepare}/model",), "tab:qwen": ()}


@pytest.mark.parametrize(("overrides", "unsafe"), [((), False), (("scorer.unsafe=True",), True)])
def test_programs_that_train_without_isolation_are_measured_so(overrides: tuple[str, ...], unsafe: bool) -> None:
    first, *_, last = steps_of(ITEMS["tab:apps"], Options(overrides=overrides))
    assert first.recipe.scorer is not None
    assert first.recipe.scorer.unsafe is unsafe
    assert ("--unsafe" in last.words) is unsafe
