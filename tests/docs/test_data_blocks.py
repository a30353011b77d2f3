"""YAML and JSON of the pages: recipes and parts of recipes can be loaded, the rest is read by what it is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, all_blocks
from wpr.config.recipe_file import load_recipe
from wpr.evaluation.judging.rubric import read_rubric

RUBRICS = ("docs/judging.md",)
ELSEWHERE = {"docs/generation.md": "tests/evaluation/mt_bench/test_mt_bench.py"}
"""Pages whose YAML is no recipe: rubrics of judges, and what another test reads."""


@pytest.mark.parametrize(
    "block", [one for one in all_blocks("yaml") if one.page not in (*RUBRICS, *ELSEWHERE)], ids=str
)
def test_recipes(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a recipe stands on top of the tiny one."""
    monkeypatch.chdir(tmp_path)
    lines = block.code.splitlines()
    base = [
        line for line in ("extends: tiny", "name: example") if not any(x.startswith(line.split()[0]) for x in lines)
    ]
    (tmp_path / "my.yaml").write_text("\n".join([*base, *lines]) + "\n", encoding="utf-8")
    recipe = load_recipe("my.yaml")
    given = [line.partition(":")[0] for line in lines if line and not line[0].isspace()]
    assert all(hasattr(recipe, name) for name in given if name != "extends")


@pytest.mark.parametrize("block", [one for one in all_blocks("yaml") if one.page in RUBRICS], ids=str)
def test_rubrics(block: Block) -> None:
    assert read_rubric(block.code, "page", "page").answer == "letter"


def test_what_another_test_reads() -> None:
    for page, test in ELSEWHERE.items():
        assert [one for one in all_blocks("yaml") if one.page == page]
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("block", all_blocks("json"), ids=str)
def test_rows(block: Block) -> None:
    """tests/data/test_docs.py makes rows of them."""
    assert isinstance(json.loads(block.code), dict)
