"""All rows of a source, checked, with a fingerprint of what they say."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wpr.data.formats import make_row
from wpr.data.readers import describe, read_records
from wpr.data.rows import BadRowError, DataError, Row
from wpr.data.settings import DataSettings
from wpr.data.sources import find_files

_SHOWN = 5
"""Bad rows that an error spells out."""


@dataclass(frozen=True)
class Corpus:
    """What was read.

    rows, validation: of the training files and of the validation files, in their order.
    skipped: one message a bad row, where bad rows are skipped.
    fingerprint: SHA-256 over the content of all rows, whatever their order and wherever the files lie.
    files: name, bytes, SHA-256, rows, skipped rows, and rows of another task, of each file.
    """

    rows: list[Row]
    validation: list[Row]
    skipped: list[str]
    fingerprint: str
    files: list[dict[str, Any]]


def load_corpus(settings: DataSettings, seed: int = 0, offline: bool | None = None) -> Corpus:
    """Read every file of the source, and its validation files.

    seed: draws the rows where ``settings.limit`` is set.
    offline: see `find_files`.
    """
    found = find_files(settings, offline)
    files: list[dict[str, Any]] = []
    bad: list[tuple[str, str]] = []
    parts = []
    for given in (found.train, found.validation):
        rows: list[Row] = []
        for path, name in given:
            rows += _read(path, name, settings, files, bad)
        parts.append(rows)
    total = sum(len(rows) for rows in parts) + len(bad)
    if bad and settings.bad_rows == "stop":
        raise DataError(
            f"{len(bad):,} of {total:,} rows cannot be used: {_first(bad)}. Fix them, or set data.bad_rows: "
            "skip to go on without them"
        )
    if bad and total == len(bad):
        raise DataError(f"none of the {total:,} rows can be used: {_first(bad)}")
    for rows, given in zip(parts, (found.train, found.validation), strict=True):
        if given and not rows:
            names = ", ".join(name for _, name in given)
            reason = _first(bad) if bad else "all records are of another task"
            raise DataError(
                f"{names} gave no row for data.format {settings.format} ({reason}); check format and source"
            )
    train, validation = (_drawn(rows, settings.limit, seed) for rows in parts)
    return Corpus(
        train, validation, [f"{origin}: {fault}" for origin, fault in bad], fingerprint(train, validation), files
    )


def fingerprint(rows: list[Row], validation: list[Row]) -> str:
    """SHA-256 over the rows' digests in sorted order, training and validation apart."""
    total = hashlib.sha256()
    for part in (rows, validation):
        total.update(len(part).to_bytes(8, "big"))
        for digest in sorted(row.digest() for row in part):
            total.update(digest)
    return total.hexdigest()


def numbered_digests(rows: list[Row], salt: str) -> list[bytes]:
    """A digest for each row; equal rows are told apart by how many came before, so that none depends on the order."""
    seen: Counter[bytes] = Counter()
    digests = []
    for row in rows:
        digest = row.digest(salt)
        seen[digest] += 1
        digests.append(hashlib.sha256(digest + seen[digest].to_bytes(8, "big")).digest())
    return digests


def _read(
    path: Path, name: str, settings: DataSettings, files: list[dict[str, Any]], bad: list[tuple[str, str]]
) -> list[Row]:
    """The rows of one file; adds to ``files`` and ``bad``."""
    rows: list[Row] = []
    before, others = len(bad), 0
    for record in read_records(path, name):
        if record.fault:
            bad.append((record.origin, record.fault))
            continue
        try:
            row = make_row(record.values, record.origin, settings)
        except BadRowError as fault:
            bad.append((record.origin, str(fault)))
            continue
        if row is None:
            others += 1
        else:
            rows.append(row)
    files.append({**describe(path, name), "rows": len(rows), "skipped": len(bad) - before, "other_task": others})
    return rows


def _drawn(rows: list[Row], limit: int | None, seed: int) -> list[Row]:
    if limit is None or len(rows) <= limit:
        return rows
    digests = numbered_digests(rows, f"limit {seed}")
    kept = sorted(range(len(rows)), key=digests.__getitem__)[:limit]
    return [rows[i] for i in sorted(kept)]


def _first(bad: list[tuple[str, str]]) -> str:
    """The first bad rows, those with the same fault together."""
    together: dict[str, list[str]] = {}
    for origin, fault in bad[:_SHOWN]:
        together.setdefault(fault, []).append(origin)
    text = "; ".join(f"{', '.join(origins)}: {fault}" for fault, origins in together.items())
    return text + (f"; and {len(bad) - _SHOWN:,} more" if len(bad) > _SHOWN else "")
