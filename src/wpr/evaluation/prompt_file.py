"""Prompts to be answered, from a file of any format that `wpr.data` reads, and as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wpr.data import DataSettings, Encoder, Row
from wpr.data.formats import make_row
from wpr.data.readers import read_records
from wpr.data.rows import BadRowError, DataError, shown
from wpr.evaluation.response_generation import EncodedPrompt
from wpr.runs.responses import prompt_id

IdRow = tuple[str, Row]
"""A row, and what files of responses call its prompt."""


def read_prompts(path: Path, settings: DataSettings, limit: int | None = None) -> tuple[list[IdRow], list[str]]:
    """The first ``limit`` prompts of a file, and remarks for the user.

    A record may name its prompt in a column ``prompt_id``. One that repeats an earlier prompt under the same name is
    left out. A file of responses will do: its prompts are taken, under their names.
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}; it must be 1 or more")
    found: dict[str, Row] = {}
    repeated = 0
    for record in read_records(path, str(path)):
        if limit is not None and len(found) == limit:
            break
        if record.fault:
            raise DataError(f"{record.origin}: {record.fault}; fix the line, or take it out")
        if isinstance(record.values.get("header"), dict) and "prompt" not in record.values:
            continue  # of a file of responses
        row, name = _row(record.values, record.origin, settings)
        if name in found:
            if prompt_id(row.prompt) != prompt_id(found[name].prompt):
                raise DataError(f"{record.origin} has the prompt_id {name!r} again; names must differ")
            repeated += 1
            continue
        found[name] = row
    if not found:
        raise DataError(f"{path} has no prompts; give each line a prompt: a text, or a list of chat messages")
    notes = [f"{repeated} prompts stand in {path} more than once and are answered once"] if repeated else []
    return list(found.items()), notes


def _row(values: dict[str, Any], origin: str, settings: DataSettings) -> tuple[Row, str]:
    try:
        row = make_row(values, origin, settings)
    except BadRowError as fault:
        raise DataError(f"{origin}: {fault}; fix the line, or choose another --format") from None
    if row is None:
        raise DataError(f"{origin} is no record of --format {settings.format}; take it out")
    given = values.get("prompt_id")
    if given is None:
        return row, prompt_id(row.prompt)
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise DataError(f"{origin} has the prompt_id {shown(given)}; it must be a text or a whole number")
    return row, str(given)


def as_asked(rows: Sequence[IdRow], encoder: Encoder) -> list[EncodedPrompt]:
    """Prompts as tokens."""
    return [EncodedPrompt(name, encoder.prompt_value(row), encoder.prompt(row)) for name, row in rows]
