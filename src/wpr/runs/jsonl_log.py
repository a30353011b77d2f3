"""A file that is written line by line and outlives whoever writes it: after ``kill -9`` the next process goes on.

    {"header": {...}}      what decides the lines; a process that would write others is refused
    {...}                  a result a line, on the disk before the next ones are begun

While it grows it is called ``NAME.partial``. When all is there, the lines move to ``NAME`` in one step, in their proper
order; so a file without that ending is whole.
"""

from __future__ import annotations

import fcntl
import json
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from wpr.atomic_io import write_atomically
from wpr.data.rows import DataError, shown
from wpr.runs.responses import PARTIAL

IGNORED_KEYS = ("model", "versions", "device", "made")
"""Parts of a header that may change between two processes: weights go by their fingerprint, not by their place."""


class Journal:
    """The file that grows, held by one process at a time; use it in ``with``.

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
        self.target = target
        self.path = target.with_name(target.name + PARTIAL)
        self.header = json.loads(json.dumps(header))  # as it will be read again
        self.restart = restart
        self.check = check
        self.rows: list[dict[str, Any]] = []

    def __enter__(self) -> Journal:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._open()
        try:
            self._take_up()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Put lines at the end, and return when the disk has them."""
        kept = [dict(row) for row in rows]
        self._write(kept)
        self.rows += kept

    def finish(self, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Make the finished file of these lines and forget the growing one."""
        write_lines(self.target, self.header, rows)
        self.path.unlink(missing_ok=True)
        return self.target

    def _open(self) -> None:
        while True:
            self._file = self.path.open("a+b")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever held it may have finished and removed it since it was opened here.
                if os.fstat(self._file.fileno()).st_ino == self.path.stat().st_ino:
                    return
            except BlockingIOError:
                self._file.close()
                raise DataError(
                    f"another process is writing {self.path}; wait for it, or write to another folder with -o"
                ) from None
            except FileNotFoundError:
                pass
            self._file.close()

    def _take_up(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]  # what follows was cut off by a sudden end
        values = _read_all(whole, self.path)
        if len(whole) < len(content):
            self._file.truncate(len(whole))
            os.fsync(self._file.fileno())
        if len(values) < 2:  # nothing was made by whatever the header says
            self._file.truncate(0)
            self._write([{"header": self.header}])
            return
        (_, header), *rows = values
        refuse_other_header(self.path, header.get("header"), self.header, self.restart)
        for number, row in rows:
            try:
                self.check(row, f"{self.path}:{number}")
            except DataError as error:
                raise DataError(
                    f"{error}; delete the line, which is then made again, or the file to start anew"
                ) from None
        self.rows = [row for _, row in rows]

    def _write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        self._file.flush()
        os.fsync(self._file.fileno())


def write_lines(path: Path, header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """A header and lines, as a file that is there as a whole or not at all."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in [{"header": header}, *rows])
    write_atomically(path, "".join(lines))


def read_lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the lines of a finished file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    values = [row for _, row in _read_all(content, path)]
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


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings that differ, dotted, as ``name: old -> new``."""
    found = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key}: {shown(before)} -> {shown(after)}")
    return found


def _outcome_settings(header: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in header.items() if name not in IGNORED_KEYS}


def _read_all(content: bytes, path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The lines that are not blank, with their numbers, without the byte order mark that an editor may have added."""
    lines = enumerate(content.removeprefix(BOM_UTF8).split(b"\n"), 1)
    return [(number, _read(line, path, number)) for number, line in lines if line.strip()]


def _read(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        values = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}:{number} is damaged ({error}): {shown(line)}; delete the line, or the file to start anew"
        ) from None
    if not isinstance(values, dict):
        raise DataError(f"{path}:{number} is {shown(values)}, no object; delete the line, or the file to start anew")
    return values
