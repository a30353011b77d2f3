"""Answers on disk, one a line, each written through to the disk before anything else is done with it.

A line is never changed. A process that is killed can leave a last line that is cut off: it is removed when the file is
opened again. One process at a time writes to a file; its lock goes with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wpr.evaluation.judging.questions import JudgingError, Reply


def key_of(identity: Mapping[str, Any], asked: Any) -> str:
    """A fingerprint of a judge and of what it is asked: whatever decides the answer must be in one of them."""
    text = json.dumps([identity, asked], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class AnswerCache:
    """The answers of one file. notes: what was found damaged in it, in words."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self._replies: dict[str, Reply] = {}
        self._file: int | None = None

    @classmethod
    def look(cls, path: Path) -> AnswerCache:
        """The answers that are there, without a lock and without changing anything."""
        cache = cls(path)
        cache._read(path.read_bytes() if path.is_file() else b"")
        return cache

    @contextlib.contextmanager
    def writing(self) -> Iterator[AnswerCache]:
        """Open it for `put`, alone."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND: whatever happens, an answer that is in the file is not overwritten.
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JudgingError(
                    f"another process is asking judges with {self.path}; wait for it, or choose another folder"
                ) from None
            self._repair(self._file)
            yield self
        finally:
            os.close(self._file)  # and with it goes the lock
            self._file = None

    def get(self, key: str) -> Reply | None:
        """The answer of this key, if it ever came."""
        return self._replies.get(key)

    def __len__(self) -> int:
        return len(self._replies)

    def put(self, key: str, reply: Reply) -> None:
        """Keep an answer: it is on the disk when this returns."""
        if self._file is None:
            raise RuntimeError(f"{self.path} is not open for writing; use `with cache.writing():`")
        line = json.dumps({"key": key, **vars(reply), "at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}, ensure_ascii=True)
        rest = memoryview((line + "\n").encode("ascii"))
        while rest:
            rest = rest[os.write(self._file, rest) :]
        os.fsync(self._file)
        self._replies[key] = reply

    def _repair(self, file: int) -> None:
        """Read the file; see to what an interrupted write left behind its last line end."""
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        tail = content[whole:]
        if tail and _reply_in(tail) is not None:  # all but the line end
            os.write(file, b"\n")
            content += b"\n"
        elif tail:
            os.ftruncate(file, whole)
            self.notes.append(
                f"{self.path} ended in the middle of a line ({len(tail)} bytes, of an interrupted write); they were "
                "removed"
            )
        os.fsync(file)
        self._replies.clear()
        self._read(content)

    def _read(self, content: bytes) -> None:
        damaged = []
        *lines, _ = content.split(b"\n")  # behind the last line end: nothing, or a line that is being written
        for number, line in enumerate(lines, 1):
            found = _reply_in(line)
            if found is None:
                damaged.append(number)
            else:
                self._replies[found[0]] = found[1]
        if damaged:
            first = f"line {damaged[0]}" + (f" and {len(damaged) - 1} more" if len(damaged) > 1 else "")
            self.notes.append(f"{self.path}: {first} cannot be read; what was answered there is asked again")


def _reply_in(line: bytes) -> tuple[str, Reply] | None:
    """The key and the answer of a line; None if it is damaged."""
    try:
        row = json.loads(line)
        key, text = row["key"], row["text"]
        if not isinstance(key, str) or not isinstance(text, str):
            return None
        return key, Reply(text, row.get("prompt_tokens"), row.get("completion_tokens"), row.get("ended"))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
