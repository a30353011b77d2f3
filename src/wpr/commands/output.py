"""What commands write: findings to folders and to the screen, remarks and progress to standard error."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from wpr.findings import Finding

# A file has no width: tables are written whole to it.
out = Console(soft_wrap=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
err = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)

SECONDS_PER_LINE = 30.0
"""How often a command that moves says so where there is no terminal."""


def save_and_print(
    finding: Finding, folder: Path, rows: Iterable[Mapping[str, Any]] | None = None, png: bool = False
) -> None:
    """Save a finding with its figures, as PNG too if asked, and the rows behind it as ``data.jsonl``; print it."""
    from wpr.atomic_io import write_atomically
    from wpr.findings import as_text, save
    from wpr.report import Picture, draw_figure

    if rows is not None:
        write_atomically(folder / "data.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    save(finding, folder, draw_figure, (lambda figure: Picture.of(figure).png()) if png else None)
    typer.echo(as_text(finding))
    typer.echo(f"\nall of it is in {folder}")


def say(text: str) -> None:
    """Print a line beside the results."""
    typer.echo(text, err=True)


def note(text: str) -> None:
    """Print a remark beside the results."""
    say(f"Note: {text}")


@contextmanager
def show_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with the time left on a terminal, a line now and then elsewhere; yields what is called with steps done.

    The first call may bring those of an earlier process: they count as done, not as speed.
    """
    if sys.stderr.isatty():
        from wpr.transport.progress import progress_bar

        with progress_bar(title, total, enabled=True) as bar:
            yield bar.advance
        return
    yield _ProgressLines(title, total).advance


class _ProgressLines:
    def __init__(self, title: str, total: int) -> None:
        self.title, self.total = title, total
        self.done = 0
        self.before: int | None = None
        self.begun = self.printed = time.monotonic()

    def advance(self, count: int) -> None:
        self.done += count
        if self.before is None:
            self.before = self.done
        now = time.monotonic()
        if now - self.printed < SECONDS_PER_LINE or self.done in (self.before, self.total):
            return
        self.printed = now
        left = (now - self.begun) / (self.done - self.before) * (self.total - self.done)
        say(f"{self.title}: {self.done} of {self.total}, about {duration(left)} left")


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
