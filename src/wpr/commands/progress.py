"""How a long command shows that it moves: a bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

SECONDS_A_LINE = 30.0


@contextmanager
def moving(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to be told of every so many steps done. The first call may bring those of an earlier process: they
    count as done, not as speed.
    """
    if sys.stderr.isatty():
        from wpr.transport.progress import progress_bar

        with progress_bar(title, total, enabled=True) as bar:
            yield bar.advance
        return
    yield _Lines(title, total).advance


class _Lines:
    def __init__(self, title: str, total: int) -> None:
        self.title, self.total = title, total
        self.done = 0
        self.before: int | None = None
        self.begun = self.told = time.monotonic()

    def advance(self, count: int) -> None:
        self.done += count
        if self.before is None:
            self.before = self.done
        now = time.monotonic()
        if now - self.told < SECONDS_A_LINE or self.done in (self.before, self.total):
            return
        self.told = now
        left = (now - self.begun) / (self.done - self.before) * (self.total - self.done)
        typer.echo(f"{self.title}: {self.done} of {self.total}, about {duration(left)} left", err=True)


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
