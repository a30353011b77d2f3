"""docs/runs.md: its Python runs, and what it lists is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import wpr
from wpr.report.figures import Plots

PAGE = (Path(__file__).parents[2] / "docs" / "runs.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
RUNS = [block for block in BLOCKS if "wpr.run(" in block]


def test_the_examples_run(whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").symlink_to(whole_run)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in BLOCKS:
        if block not in RUNS:
            exec(compile(block, "docs/runs.md", "exec"), names)
    assert (tmp_path / "frontier.svg").read_text().startswith("<svg")
    assert len(names["log"]) == 2  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_recipe_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, wpr.LoadedRun] = {}
    for block in RUNS:
        exec(compile(block, "docs/runs.md", "exec"), names)  # type: ignore[arg-type]
    run = names["run"]
    assert list(run.policies) == ["rkl"]
    assert run.recipe["ppo"]["beta"] == 0.02
    assert run.metrics("rkl")["step"].max() == 4


def test_what_is_listed_is_there(whole_run: Path) -> None:
    run = wpr.load_run(whole_run)
    table = PAGE[PAGE.index("| | is |") : PAGE.index("**Tables are")]
    listed = re.findall(r"run\.(\w+)", table)
    assert len(listed) > 12
    assert [name for name in listed if not hasattr(run, name)] == []
    assert set(re.findall(r"run\.plot\.(\w+)", PAGE)) == {name for name in vars(Plots) if not name.startswith("_")}
