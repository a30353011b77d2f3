"""A run's log file, and in it what the libraries below have to say, so that the command's own lines stay readable."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
"""What the hub's client (and with it transformers) and datasets read when they are imported."""

PRINTING = ("transformers", "datasets", "DeepSpeed")
"""Loggers that print by themselves; DeepSpeed's does so to standard output, among what the command prints."""

PACKAGE = Path(__file__).parent.parent


def no_bars_in_files() -> None:
    """Bars are for terminals: in a file every redrawing is a line. Call it before the libraries are imported."""
    if not sys.stderr.isatty():
        for name in BARS:
            os.environ.setdefault(name, "1")


@contextmanager
def log_to(path: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """Write this package's log and the libraries' warnings to ``path`` (None: nowhere); ``say`` this package's own
    warnings too.
    """
    handler: logging.Handler = logging.NullHandler() if path is None else RunLogHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    teller = _Teller(say)
    root, own = logging.getLogger(), logging.getLogger("wpr")
    level, shows = own.level, warnings.showwarning
    own.setLevel(logging.INFO)
    own.addHandler(teller)
    root.addHandler(handler)
    warnings.showwarning = _log_warning
    try:
        with _through_root():
            yield
    finally:
        warnings.showwarning = shows
        root.removeHandler(handler)
        own.removeHandler(teller)
        own.setLevel(level)
        handler.close()


class RunLogHandler(logging.FileHandler):
    """A log file whose own faults, such as a full disk, are not told: the run's next file meets the same fault."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Say nothing; the default prints a traceback for every line."""

    def close(self) -> None:
        """Close the file, whether or not its last lines can be written."""
        try:
            super().close()
        except OSError:
            self.stream = None


class _Teller(logging.Handler):
    """Says warnings. Errors are not said here: they are raised, and told by whoever catches them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            self.say(f"Note: {record.getMessage()}")


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """In place of `warnings.showwarning`: this package's warnings are said, others' are logged."""
    name = "wpr" if Path(filename).is_relative_to(PACKAGE) else "py.warnings"
    logging.getLogger(name).warning("%s", message)


@contextmanager
def _through_root() -> Iterator[None]:
    """Let the libraries that print their messages hand them to the root logger instead."""
    for name in ("transformers", "datasets"):  # they set up their loggers when they are imported
        with suppress(ImportError):
            importlib.import_module(name)
    before = []
    for logger in map(logging.getLogger, PRINTING):
        before.append((logger, logger.handlers[:], logger.propagate))
        logger.handlers.clear()
        logger.propagate = True
        logger.addFilter(_hand_on)
    try:
        yield
    finally:
        for logger, handlers, propagate in before:
            logger.removeFilter(_hand_on)
            logger.handlers[:] = handlers or logger.handlers
            logger.propagate = propagate and logger.propagate


def _hand_on(record: logging.LogRecord) -> bool:
    """A filter for a logger that a library has not set up yet: its handlers, when they come, get nothing."""
    logging.getLogger().handle(record)
    return False
