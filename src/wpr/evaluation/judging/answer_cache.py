"""Answers on disk, one per line, each written through to the disk before anything else is done with it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wpr.evaluation.judging.questions import JudgingError, Reply
from wpr.runs.jsonl_log import LogFile, lines_of


def key_of(identity: Mapping[str, Any], asked: Any) -> str:
    """A fingerprint of a judge and of what it is asked: whatever decides the answer must be in one of them."""
    text = json.dumps([identity, asked], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class AnswerCache:
    """The answers of one file, and those of others that are only read. notes: what was found damaged, in words."""

    def __init__(self, path: Path, others: Sequence[Path] = ()) -> None:
        self.path = path
        self.notes: list[str] = []
        self._replies: dict[str, Reply] = {}
        self._log: LogFile | None = None
        self._others = [AnswerCache.look(other) for other in others if other != path]
        self.notes += [note for other in self._others for note in other.notes]

    @classmethod
    def look(cls, path: Path, others: Sequence[Path] = ()) -> AnswerCache:
        """The answers that are there, without a lock and without changing anything."""
        cache = cls(path, others)
        content = path.read_bytes() if path.is_file() else b""
        cache._read(content[: content.rfind(b"\n") + 1])  # what follows may be a line that is being written
        return cache

    @contextlib.contextmanager
    def writing(self) -> Iterator[AnswerCache]:
        """Open it for `put`, alone."""
        in_use = f"another process is asking judges with {self.path}; wait for it, or choose another folder"
        with LogFile(self.path, JudgingError(in_use)) as self._log:
            if self._log.removed:
                self.notes.append(
                    f"{self.path} ended in the middle of a line ({self._log.removed} bytes, of an interrupted write); "
                    "they were removed"
                )
            self._read(self._log.content)
            try:
                yield self
            finally:
                self._log = None

    def get(self, key: str) -> Reply | None:
        """The answer of this key, if it ever came."""
        everywhere = (self._replies, *(other._replies for other in self._others))
        return next((replies[key] for replies in everywhere if key in replies), None)

    def __len__(self) -> int:
        return len(self._replies)

    def put(self, key: str, reply: Reply) -> None:
        """Keep an answer: it is on the disk when this returns."""
        if self._log is None:
            raise RuntimeError(f"{self.path} is not open for writing; use `with cache.writing():`")
        row = {"key": key, **vars(reply), "at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        self._log.write(json.dumps(row, ensure_ascii=True) + "\n")
        self._replies[key] = reply

    def _read(self, content: bytes) -> None:
        """Take the answers of these lines; what was answered in a damaged one is asked again."""
        self._replies.clear()
        damaged = []
        for number, line in lines_of(content):
            try:
                row = json.loads(line)
                key, text = row["key"], row["text"]
                if not isinstance(key, str) or not isinstance(text, str):
                    raise TypeError
                reply = Reply(text, row.get("prompt_tokens"), row.get("completion_tokens"), row.get("ended"))
            except (ValueError, KeyError, TypeError, RecursionError):
                damaged.append(number)
                continue
            self._replies[key] = reply
        if damaged:
            first = f"line {damaged[0]}" + (f" and {len(damaged) - 1} more" if len(damaged) > 1 else "")
            self.notes.append(f"{self.path}: {first} cannot be read; what was answered there is asked again")
