"""Where a command's finding goes: to the run's folder or the one that was asked for, and to the screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from wpr.findings import Finding


def save_and_print(finding: Finding, folder: Path) -> None:
    """Save a finding with its figures, and print it."""
    from wpr.findings import as_text, save
    from wpr.report import draw_figure

    save(finding, folder, draw=draw_figure)
    typer.echo(as_text(finding))
    typer.echo(f"\nall of it is in {folder}")


def say(text: str) -> None:
    """A remark beside the results."""
    typer.echo(text, err=True)
