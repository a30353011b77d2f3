"""A progress bar on terminals, silence elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """What long computations report to."""

    def advance(self, amount: int) -> None: ...


class _Silent:
    def advance(self, amount: int) -> None:
        pass


@contextmanager
def progress_bar(title: str, total: int, *, enabled: bool) -> Iterator[Progress]:
    """A rich bar with the time left on standard error, if that is a terminal and ``enabled``."""
    if not (enabled and sys.stderr.isatty()):
        yield _Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as rich_bar:
        task = rich_bar.add_task(title, total=total)

        class _Bar:
            def advance(self, amount: int) -> None:
                rich_bar.advance(task, amount)

        yield _Bar()
