"""JSONL files that outlive whoever writes them: after ``kill -9`` the next process goes on.

`LogFile` is a file that one process at a time appends lines to. `Journal` is one that becomes a finished file:

    {"header": {...}}      what decides the lines; a process that would write others is refused
    {...}                  one result per line, on the disk before the next ones are begun

While it grows it is called ``NAME.partial``. When all is there, the lines move to ``NAME`` in one step, in their proper
order; so a file without that ending is whole.
"""

from __future__ import annotations

import fcntl
import json
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wpr.atomic_io import write_atomically
from wpr.data.rows import DataError, shown
from wpr.runs.fingerprints import differences

PARTIAL = ".partial"
"""Ends the name of a file that is still being written."""

IGNORED_KEYS = ("model", "versions", "device", "made")
"""Parts of a header that may change between two processes: weights go by their fingerprint, not by their place."""

REMEDY = "delete the line, or the file to start again"


class LogFile:
    """A file that one process at a time appends lines to; use it in ``with``.

    A line is on the disk when `write` returns, and never changed. The lock goes with the process, however that ends.
    A sudden end can leave a last line that is cut off: it is removed when the file is opened again. One that lacks its
    line end only is kept.

    in_use: what is raised where another process has the file.
    content: the lines that were there. removed: bytes of the line that was cut off.
    """

    def __init__(self, path: Path, in_use: Exception) -> None:
        self.path = path
        self.in_use = in_use
        self.content = b""
        self.removed = 0

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()
        try:
            self.content = self._repaired(self.path.read_bytes())
            self._take_up()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, text: str) -> None:
        """Put lines at the end, each with its line end, and return when the disk has them."""
        rest = memoryview(text.encode())
        while rest:
            rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())

    def _take_up(self) -> None:
        """Read what earlier processes left; for subclasses."""

    def _open(self) -> None:
        while True:
            # Every write goes to the end: whatever happens, a line that is in the file is not overwritten.
            self._file = self.path.open("ab", buffering=0)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever held it may have finished and removed it since it was opened here.
                if os.fstat(self._file.fileno()).st_ino == self.path.stat().st_ino:
                    return
            except BlockingIOError:
                self._file.close()
                raise self.in_use from None
            except FileNotFoundError:
                pass
            self._file.close()

    def _repaired(self, content: bytes) -> bytes:
        whole = content.rfind(b"\n") + 1
        tail = content[whole:]
        if not tail:
            return content
        if _is_object(tail):
            self.write("\n")
            return content + b"\n"
        self.removed = len(tail)
        self._file.truncate(whole)
        os.fsync(self._file.fileno())
        return content[:whole]


class Journal(LogFile):
    """A file that grows until it is finished.

    target: where the finished file will be. header: what decides the lines.
    restart: what to tell the user to do where a file was made by another header.
    check: refuses a line that the caller could not go on with, by a `DataError` that begins with the place it is given.
    rows: what is there, from earlier processes and this one.
    """

    def __init__(
        self,
        target: Path,
        header: Mapping[str, Any],
        restart: str,
        check: Callable[[dict[str, Any], str], object] = lambda row, where: None,
    ) -> None:
        path = target.with_name(target.name + PARTIAL)
        super().__init__(
            path, DataError(f"another process is writing {path}; wait for it, or write to another folder with -o")
        )
        self.target = target
        self.header = json.loads(json.dumps(header))  # as it will be read again
        self.restart = restart
        self.check = check
        self.rows: list[dict[str, Any]] = []

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Put results at the end, and return when the disk has them."""
        kept = [dict(row) for row in rows]
        self.write(_lines(kept))
        self.rows += kept

    def finish(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make the finished file of these lines and forget the growing one."""
        write_atomically(self.target, _lines([{"header": self.header}, *rows]))
        self.path.unlink(missing_ok=True)

    def _take_up(self) -> None:
        values = list(read_objects(self.content, self.path))
        if len(values) < 2:  # nothing was made by whatever the header says
            self._file.truncate(0)
            self.write(_lines([{"header": self.header}]))
            return
        (_, header), *rows = values
        refuse_other_header(self.path, header.get("header"), self.header, self.restart)
        for number, row in rows:
            try:
                self.check(row, f"{self.path}:{number}")
            except DataError as error:
                raise DataError(
                    f"{error}; delete the line, which is then made again, or the file to start again"
                ) from None
        self.rows = [row for _, row in rows]


def read_finished(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the lines of a finished file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    values = [row for _, row in read_objects(content, path)]
    if not values or not isinstance(values[0].get("header"), dict):
        raise DataError(f"{path} does not begin with a header; delete it, and run the command again")
    return values[0]["header"], values[1:]


def refuse_other_header(path: Path, found: Any, wanted: Mapping[str, Any], restart: str) -> None:
    """Refuse to go on with a file that was made otherwise, and say in what."""
    if not isinstance(found, dict):
        raise DataError(f"{path} does not begin with a header but with {shown(found)}; {restart}")
    changed = differences(_outcome_settings(found), _outcome_settings(wanted))
    if changed:
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise DataError(f"{path} was made otherwise ({'; '.join(changed[:5])}{more}); {restart}")


def lines_of(content: bytes) -> list[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers, without the byte order mark that an editor may have added."""
    lines = enumerate(content.removeprefix(BOM_UTF8).split(b"\n"), 1)
    return [(number, line) for number, line in lines if line.strip()]


def read_objects(content: bytes, path: Path, remedy: str = REMEDY) -> Iterator[tuple[int, dict[str, Any]]]:
    """The object of each line, with the line's number; `DataError` names the line that holds none."""
    for number, line in lines_of(content):
        try:
            values = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number} is damaged ({error}): {shown(line)}; {remedy}") from None
        if not isinstance(values, dict):
            raise DataError(f"{path}:{number} is {shown(values)}, no object; {remedy}")
        yield number, values


def _outcome_settings(header: Mapping[str, Any]) -> dict[str, Any]:
    return _set({name: value for name, value in header.items() if name not in IGNORED_KEYS})


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without None, which a setting that came later is in older headers."""
    kept = {name: value for name, value in values.items() if value is not None}
    return {name: _set(value) if isinstance(value, Mapping) else value for name, value in kept.items()}


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
