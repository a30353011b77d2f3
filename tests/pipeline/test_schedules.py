"""The learning rates that are drawn, against those that a training logged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pipeline.command import SMALL, Here
from wpr.config.recipe_file import load_recipe
from wpr.pipeline.estimates import planned_steps
from wpr.pipeline.run import plan
from wpr.pipeline.schedules import learning_rates, schedule_figure


@pytest.mark.parametrize("name", ["sft", "reward", "ppo/rkl"])
def test_what_is_drawn_is_what_training_does(name: str, whole_run: Path) -> None:
    """Step by step."""
    stage = next(one for one in plan(load_recipe("tiny", list(SMALL))) if one.name == name)
    steps = planned_steps(stage.recipe, name.partition("/")[0])
    rates = learning_rates(stage, steps)
    lines = [json.loads(line) for line in (whole_run / name / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line["learning_rate"] for line in lines if "learning_rate" in line}
    assert len(rates) == steps == max(logged)
    assert len(set(rates)) > 1  # a schedule, no constant
    assert [logged[step] for step in range(1, steps + 1)] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("tldr-gemma-2b", {"sft": 111, "reward": 581, "ppo": 145}),
        ("hh-gemma-2b", {"sft": 132, "reward": 701, "ppo": 175}),
        ("tldr-gemma-7b", {"sft": 146, "reward": 291, "ppo": 145}),
        ("apps-codegemma-7b", {"sft": 733, "ppo": 250}),
    ],
)
def test_the_steps_of_the_paper_s_recipes(name: str, steps: dict[str, int]) -> None:
    recipe = load_recipe(name)
    assert {kind: planned_steps(recipe, kind) for kind in steps} == steps
    figure = schedule_figure(name, plan(recipe))
    assert figure is not None
    assert [len(one.y) for one in figure.series] == list(steps.values())
    assert all(max(one.y) == 1 and one.y[-1] < 0.02 for one in figure.series)


def test_the_command_draws_them(here: Here, tmp_path: Path) -> None:
    text = here.succeeds("doctor", "hh-gemma-2b", "--learning-rates", str(tmp_path / "new" / "rates.svg")).stdout
    assert f"learning rates: {tmp_path / 'new' / 'rates.svg'}" in text
    assert "<svg" in (tmp_path / "new" / "rates.svg").read_text()
    unknown = here("doctor", "hh-gemma-2b", "data.source=mine.jsonl", "--learning-rates", str(tmp_path / "x.svg"))
    assert unknown.code == 2
    assert "the number of its steps is known only of the hub's data" in unknown.error
