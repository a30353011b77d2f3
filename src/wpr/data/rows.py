"""What every dataset becomes: rows of a prompt, its completions, and the columns that rewards need."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, str]
"""One turn: ``{"role": "user" | "assistant" | "system", "content": text}``."""


class DataError(ValueError):
    """Data that cannot be used, in one paragraph: which file, row and value, what is allowed, and what to do."""


class BadRowError(Exception):
    """One record that makes no row. Whoever reads the file adds where it stands."""


@dataclass(frozen=True)
class Row:
    """One example.

    prompt: a dialogue that ends with a user turn, or the plain text that the model is to continue.
    chosen: the preferred (or only) completion: its content, without template or end token.
    rejected: the completion that lost the comparison.
    columns: what else rewards need, by name.
    origin: file and line, or file and row, as ``pairs.jsonl:17``. Not part of a row's identity.
    demonstrated: what SFT learns where that is not ``chosen``. more: what it learns besides.
    """

    prompt: tuple[Message, ...] | str
    chosen: str | None = None
    rejected: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    demonstrated: str | None = None
    more: tuple[str, ...] = ()

    def prompt_digest(self, salt: str = "") -> bytes:
        """SHA-256 of the prompt; a text counts as the user message that it becomes in a chat."""
        return _digest([salt, prompt_messages(self.prompt)])

    def digest(self, salt: str = "") -> bytes:
        """SHA-256 of all the content."""
        texts = [self.chosen, self.rejected, self.demonstrated, *self.more]
        return _digest([salt, prompt_messages(self.prompt), texts, dict(self.columns)])


def prompt_messages(prompt: tuple[Message, ...] | str) -> list[Message]:
    """A prompt as chat messages: a plain text is one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(turn) for turn in prompt]


def shown(value: Any, width: int = 60) -> str:
    """A value for an error message: as Python writes it, not longer than ``width``."""
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def checked_text(value: Any, name: str) -> str:
    """A value that must be text; a bad row if it is not, or if no tokenizer could take it."""
    if not isinstance(value, str):
        raise BadRowError(f"{name!r} is {shown(value)}, of type {type(value).__name__}; text is needed")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])
        raise BadRowError(f"{name!r} has half of a surrogate pair ({half}), which is no character") from None
    return value


def _digest(content: Any) -> bytes:
    # ASCII JSON can hold whatever a file held, lone surrogates too; dates and the like of Parquet go by their text.
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).digest()
