"""docs/analysis.md has an example and a paragraph for every analysis. (tests/docs runs and parses the examples.)"""

from __future__ import annotations

import re
from pathlib import Path

import typer

from wpr.commands.analyze import app

PAGE = (Path(__file__).parents[2] / "docs" / "analysis.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^wpr analyze (.+)$", PAGE, re.M)


def test_every_command_has_an_example_and_a_paragraph() -> None:
    names = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert {line.split()[0] for line in SHOWN} == names
    for name in names - {"all"}:
        assert re.search(rf"^## {name.replace('-', '[- ]')}$", PAGE, re.M | re.I), name
