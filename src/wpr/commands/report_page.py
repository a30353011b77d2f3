"""`wpr report`: one page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wpr.commands.output import say

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, finished or not.")]
Page = Annotated[Path, typer.Option("--output", "-o", help="The page to write.")]
Tables = Annotated[Path | None, typer.Option("--csv", help="A folder for the tables, as CSV files.")]
Svg = Annotated[Path | None, typer.Option("--svg", help="A folder for the figures, as SVG files.")]
Png = Annotated[
    Path | None, typer.Option("--png", help="A folder for the figures, as PNG files; needs pip install 'wpr\\[plots]'.")
]


def report(
    runs: Runs, output: Page = Path("report.html"), csv: Tables = None, svg: Svg = None, png: Png = None
) -> None:
    """Write one page about runs: curves, win rates, cost, responses, and penalties token by token.

    [bold]Example[/bold]: wpr report runs/tiny runs/other -o report.html --csv tables --png figures
    """
    from wpr.report import write_report

    for problem in write_report(runs, output, csv, svg, png):
        say(f"note: {problem}")
    typer.echo(f"the page is in {output}")
