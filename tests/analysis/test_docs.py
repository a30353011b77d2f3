"""docs/analysis.md: its Python runs, and the commands that it shows have the options that it gives them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from wpr.commands.analyze import app

PAGE = (Path(__file__).parents[2] / "docs" / "analysis.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^wpr analyze (.+)$", PAGE, re.M)


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(compile(code, "docs/analysis.md", "exec"), {})


@pytest.mark.parametrize("line", SHOWN)
def test_commands_are_understood(line: str) -> None:
    name, *arguments = shlex.split(line)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, arguments)
    assert context.params


def test_every_command_has_an_example_and_a_paragraph() -> None:
    names = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert {line.split()[0] for line in SHOWN} == names
    for name in names - {"all"}:
        assert re.search(rf"^## {name.replace('-', '[- ]')}$", PAGE, re.M | re.I), name
