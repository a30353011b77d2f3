"""Files of responses: what a model answered to each prompt, one response a line, and first how they were made.

    {"header": {"model": "runs/tiny/sft/model", "temperature": 0.5, "prompts": 64, ...}}
    {"prompt_id": "5c1f", "prompt": "...", "response": "...", "temperature": 0.5, "tokens": 31, "stopped": true}

`wpr generate` writes them, whole or not at all. Files from elsewhere may do without the header, and with ``prompt_id``,
``prompt`` and ``response`` alone. Responses of two files belong together where their ``prompt_id`` is the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wpr.data.rows import BadRowError, DataError, Message, checked_text, shown

PARTIAL = ".partial"
"""Ends the name of a file that is still being written."""


@dataclass(frozen=True)
class Response:
    """What a model answered to one prompt.

    prompt_id: names the prompt; the same in every file about it.
    prompt: a text that was continued, or the chat messages that were answered.
    temperature: that it was drawn at, 0 for the likeliest token each time. None in the next three: not told.
    tokens: its length, with the token that ended it.
    stopped: whether the model ended it; False where it was cut at the longest length allowed.
    """

    prompt_id: str
    prompt: str | list[Message]
    response: str
    temperature: float | None = None
    tokens: int | None = None
    stopped: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """As the file has it."""
        return dict(vars(self))


@dataclass(frozen=True)
class ResponseFile:
    """A file of responses that was read.

    header: how they were made, see `wpr.evaluation.generate`; empty where the file does not say.
    rows: in the order of the file, each ``prompt_id`` once.
    """

    path: Path
    header: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Response, ...] = ()

    @property
    def name(self) -> str:
        """What tables call it: the file's name without its ending."""
        return self.path.name.removesuffix(".jsonl")

    def by_prompt(self) -> dict[str, Response]:
        """Responses by ``prompt_id``, in their order."""
        return {row.prompt_id: row for row in self.rows}


@dataclass(frozen=True)
class Answer:
    """A response to one prompt, as text and as tokens.

    number: of the prompt. response_ids: with the token that ended it, if one did. length: tokens when it was drawn,
    where that is known. drawn: whether response_ids are what was drawn; else they were made of the text, which may have
    been drawn as other tokens.
    """

    number: int
    prompt: Any
    response: str
    prompt_ids: list[int]
    response_ids: list[int]
    score: float | None = None
    length: int | None = None
    drawn: bool = False


def drawn_at(header: Mapping[str, Any]) -> float | None:
    """The temperature that the header of a file of responses tells; None where it tells none."""
    sampling = header.get("sampling")
    told = sampling.get("temperature") if isinstance(sampling, Mapping) else header.get("temperature")
    return float(told) if isinstance(told, int | float) else None


def read_responses(path: Path | str) -> ResponseFile:
    """Read and check a file of responses; `DataError` names the file, the line and what is wrong with it."""
    path = Path(path)
    lines = _text(path).split("\n")
    header: dict[str, Any] = {}
    rows: list[Response] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        values = _object(line, f"{path}:{number}", last=number == len(lines))
        if "header" in values and "response" not in values:
            if rows or header:
                raise DataError(
                    f"{path}:{number} is a second header; files of responses cannot be joined end to end: pass them "
                    "one by one"
                )
            header = _header(values["header"], f"{path}:{number}")
            continue
        row = response_of(values, f"{path}:{number}")
        if row.prompt_id in seen:
            raise DataError(
                f"{path}:{number} answers the prompt {row.prompt_id!r} again, as line {seen[row.prompt_id]} does; a "
                "file holds one response a prompt: put the others into a file of their own"
            )
        seen[row.prompt_id] = number
        rows.append(row)
    if not rows:
        raise DataError(f"{path} has no responses; make it anew with `wpr generate`")
    wanted = header.get("prompts")
    if isinstance(wanted, int) and wanted != len(rows):
        raise DataError(
            f"{path} has {len(rows)} responses where its header says {wanted}; lines are missing: copy it again, or "
            "make it anew with `wpr generate`"
        )
    return ResponseFile(path, header, tuple(rows))


def _text(path: Path) -> str:
    if not path.is_file():
        if path.is_dir():
            raise DataError(f"{path} is a folder; name one file of responses (*.jsonl) in it")
        if path.with_name(path.name + PARTIAL).exists():
            raise DataError(
                f"{path} is not finished; run the same `wpr generate` again, which goes on where it stopped"
            )
        raise DataError(f"{path} does not exist; `wpr generate` writes files of responses to a run's generations/")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line} holds the byte 0x{error.object[error.start]:02x}, which is not UTF-8") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _object(line: str, where: str, last: bool) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        cut = "; the file was cut off: copy it again" if last else ""
        raise DataError(f"{where} is not JSON ({error}): {shown(line)}{cut}") from None
    if not isinstance(values, dict):
        raise DataError(f"{where} is {shown(values)}; a line holds one object with prompt_id, prompt and response")
    return values


def _header(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise DataError(f"{where} has the header {shown(values)}; it must be an object")
    return values


def response_of(values: Mapping[str, Any], where: str) -> Response:
    """A line's response, checked; `DataError` begins with ``where``."""
    for name in ("prompt_id", "prompt", "response"):
        if name not in values:
            raise DataError(f"{where} has no {name!r} (it has {', '.join(sorted(values))}); every response needs one")
    identity = values["prompt_id"]
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        raise DataError(f"{where} has the prompt_id {shown(identity)}; it must be a text or a whole number")
    try:
        return Response(
            str(identity),
            _prompt(values["prompt"]),
            checked_text(values["response"], "response"),
            _number(values, "temperature"),
            _whole(values, "tokens"),
            _truth(values, "stopped"),
        )
    except BadRowError as error:
        raise DataError(f"{where}: {error}") from None


def _prompt(value: Any) -> str | list[Message]:
    if not isinstance(value, list):
        return checked_text(value, "prompt")
    if not value:
        raise BadRowError("'prompt' has no messages")
    for turn in value:
        if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
            raise BadRowError(f"'prompt' has the turn {shown(turn)}; a turn is an object with role and content")
        for name in ("role", "content"):
            checked_text(turn[name], f"prompt.{name}")
    return value


def _number(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")):
        return None if value is None else float(value)
    raise BadRowError(f"{name!r} is {shown(value)}; it must be a number of 0 or more")


def _whole(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise BadRowError(f"{name!r} is {shown(value)}; it must be a whole number of 0 or more")


def _truth(values: Mapping[str, Any], name: str) -> bool | None:
    value = values.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise BadRowError(f"{name!r} is {shown(value)}; it must be true or false")
