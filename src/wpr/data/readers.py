"""Records from files: JSON Lines, JSON arrays, CSV and Parquet, one by one, each with the place where it stands.

Two kinds of faults. One of a single record (no JSON, bytes that are not UTF-8, a row of the wrong length) becomes a
`Record` with a ``fault``, and reading goes on. One of the file (missing, empty, a gzip stream that ends early) is a
`DataError`, since nobody knows what else is lost.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from wpr.data.rows import DataError, shown

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz")
"""How the names of readable files end."""

_POINTER = b"version https://git-lfs.github.com/spec"
_AGAIN = "download or copy it again"


@dataclass(frozen=True)
class Record:
    """One record: its values by column name, or what is wrong with it."""

    origin: str
    values: dict[str, Any]
    fault: str = ""


def is_readable(name: str) -> bool:
    """Whether the file's name ends in one of `SUFFIXES`."""
    return name.lower().endswith(SUFFIXES)


def read_records(path: Path, name: str) -> Iterator[Record]:
    """The records of a file in order; ``name`` is what errors and origins call it."""
    lower = path.name.lower()
    if not is_readable(lower):
        raise DataError(f"{name} is of no kind that can be read; known endings are {', '.join(SUFFIXES)}")
    try:
        with path.open("rb") as file:
            start = file.read(len(_POINTER))
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}; check data.source") from None
    if not start:
        raise DataError(f"{name} is empty (0 bytes); {_AGAIN}, or take it out of data.source")
    if start == _POINTER:
        raise DataError(f"{name} holds a Git LFS pointer, not the data; run `git lfs pull` where it was cloned")
    kind = lower.removesuffix(".gz").rpartition(".")[2]
    read = {"jsonl": _json_lines, "json": _json, "csv": _csv, "parquet": _parquet}[kind]
    count = 0
    for record in read(path, name):
        count += 1
        yield record
    if not count:
        raise DataError(f"{name} has no rows; {_AGAIN}, or take it out of data.source")


def describe(path: Path, name: str) -> dict[str, Any]:
    """Name, size and SHA-256 of a file."""
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum.update(block)
    return {"path": name, "bytes": path.stat().st_size, "sha256": checksum.hexdigest()}


def _lines(path: Path, name: str) -> Iterator[bytes]:
    """Lines with their ends, of a plain or gzip file, without a byte order mark."""
    count = 0
    compressed = path.name.lower().endswith(".gz")
    opened: IO[bytes] = gzip.open(path, "rb") if compressed else path.open("rb")  # type: ignore[assignment]  # noqa: SIM115
    with opened as file:
        try:
            for line in file:
                count += 1
                yield line.removeprefix(b"\xef\xbb\xbf") if count == 1 else line
        except EOFError:
            raise DataError(
                f"{name} is a truncated gzip file: its stream ends early, after line {count}; {_AGAIN}"
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{name} is a damaged gzip file: {error}, after line {count}; {_AGAIN}") from None
        except OSError as error:
            raise DataError(f"{name} cannot be read past line {count}: {error.strerror or error}") from None


def _json_lines(path: Path, name: str) -> Iterator[Record]:
    for number, line in enumerate(_lines(path, name), 1):
        if line.strip():  # blank lines, mostly at the end of a file, are no rows
            yield _json_record(line, f"{name}:{number}")


def _json_record(line: bytes, origin: str) -> Record:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return Record(origin, {}, f"byte {error.start + 1} of the line, 0x{line[error.start]:02x}, is not UTF-8")
    try:
        return _object(json.loads(text), origin)
    except (ValueError, RecursionError) as error:
        return Record(origin, {}, f"not JSON ({error}): {shown(text.strip())}")


def _object(value: Any, origin: str) -> Record:
    if isinstance(value, dict):
        return Record(origin, value)
    return Record(origin, {}, f"a JSON {type(value).__name__} where an object with named columns is needed")


def _json(path: Path, name: str) -> Iterator[Record]:
    """An array of objects; or JSON Lines by another name, told apart by the first character."""
    first = next((line.lstrip()[:1] for line in _lines(path, name) if line.strip()), b"")
    if first != b"[":
        yield from _json_lines(path, name)
        return
    content = b"".join(_lines(path, name))
    try:
        values = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} has a byte that is not UTF-8, 0x{content[error.start]:02x}, in line "
            f"{content.count(bytes([10]), 0, error.start) + 1}; convert the file to UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not JSON ({error}); an array must be whole to be read: {_AGAIN}") from None
    for number, value in enumerate(values, 1):
        yield _object(value, f"{name}:{number}")


def _csv(path: Path, name: str) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is for tables of numbers; a post may be longer
    # Undecodable bytes travel as surrogates, so that the row that holds them can be named.
    decoded = (line.decode(errors="surrogateescape") for line in _lines(path, name))
    rows = csv.reader(decoded, strict=True)
    start = 1
    header: list[str] | None = None
    while True:
        try:
            values = next(rows, None)
        except csv.Error as error:
            raise DataError(
                f"{name} is not CSV from line {start} on: {error}; look for a quotation mark that is not closed"
            ) from None
        origin, start = f"{name}:{start}", rows.line_num + 1
        if values is None:
            return
        if not values:
            continue
        if header is None:
            header = _header(values, name)
        else:
            yield _csv_record(header, values, origin)


def _header(values: list[str], name: str) -> list[str]:
    repeated = sorted({column for column in values if values.count(column) > 1})
    if repeated:
        raise DataError(
            f"{name} has the column {repeated[0]!r} {values.count(repeated[0])} times in its header; rename all but one"
        )
    return values


def _csv_record(header: list[str], values: list[str], origin: str) -> Record:
    if len(values) != len(header):
        return Record(origin, {}, f"{len(values)} fields where the header has {len(header)}")
    for column, value in zip(header, values, strict=True):
        for character in value:
            if "\udc80" <= character <= "\udcff":
                return Record(
                    origin, {}, f"column {column!r} holds the byte 0x{ord(character) - 0xDC00:02x}, not UTF-8"
                )
    return Record(origin, dict(zip(header, values, strict=True)))


def _parquet(path: Path, name: str) -> Iterator[Record]:
    try:
        import pyarrow  # type: ignore[import-untyped, unused-ignore]
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{name} needs pyarrow to be read; `pip install pyarrow`, or convert it to JSON Lines"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in _batch_rows(batch):
                    number += 1
                    origin = f"{name}:{number}"
                    yield Record(origin, {}, values) if isinstance(values, str) else Record(origin, values)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{name} is no whole Parquet file ({reason}), after row {number}; {_AGAIN}") from None


def _batch_rows(batch: Any) -> list[dict[str, Any] | str]:
    """The rows of a record batch; in place of one whose text is not UTF-8, the words that say so."""
    try:
        rows: list[dict[str, Any] | str] = batch.to_pylist()
        return rows
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [f"a text holds the byte 0x{error.object[error.start]:02x}, not UTF-8"]
        return [values for row in range(batch.num_rows) for values in _batch_rows(batch.slice(row, 1))]
