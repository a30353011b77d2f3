"""Records of every kind of file, and every way in which a file can be broken."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from tests.data import files
from wpr.data import DataError
from wpr.data.readers import Record, describe, read_records

ROWS = [{"prompt": "a\nb", "number": "1"}, {"prompt": 'c "d", e', "number": "2"}, {"prompt": "äöü 水", "number": "3"}]


def read(path: Path) -> list[Record]:
    return list(read_records(path, path.name))


def write(path: Path) -> None:
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        files.parquet(path, ROWS)
        return
    if name.endswith(".csv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, ["prompt", "number"])
            table.writeheader()
            table.writerows(ROWS)
    elif name.endswith(".jsonl"):
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), encoding="utf-8")
    else:
        path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(path.read_bytes()))


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "json", "json.gz", "csv", "csv.gz", "parquet"])
def test_every_kind_gives_the_same_rows(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    write(path)
    records = read(path)
    assert [record.values for record in records] == ROWS
    assert not any(record.fault for record in records)
    # In CSV the header is line 1, and the first row spans two lines.
    lines = [2, 4, 5] if "csv" in ending else [1, 2, 3]
    assert [record.origin for record in records] == [f"rows.{ending}:{line}" for line in lines]


def test_json_lines_under_another_name(tmp_path: Path) -> None:
    path = tmp_path / "batch.json"
    path.write_text('\n{"a": 1}\n{"a": 2}\n')
    assert [(r.origin, r.values) for r in read(path)] == [("batch.json:2", {"a": 1}), ("batch.json:3", {"a": 2})]


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n')
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfa,b\n1,2\n")
    assert read(tmp_path / "a.jsonl")[0].values == {"a": 1}
    assert read(tmp_path / "a.csv")[0].values == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"a": ', "not JSON"),
        (b"plain text", "not JSON (Expecting value"),
        (b"[1, 2]", "a JSON list where an object"),
        (b'{"a": "caf\xe9"}', "byte 11 of the line, 0xe9, is not UTF-8"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named_and_the_next_is_read(tmp_path: Path, line: bytes, fault: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + line + b'\n{"a": 2}\n')
    good, bad, next_ = read(path)
    assert (good.values, next_.values) == ({"a": 1}, {"a": 2})
    assert bad.origin == "rows.jsonl:3"
    assert fault in bad.fault
    assert len(bad.fault) < 300


def test_bad_rows_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'a,b\n1\n"x\ny",\xff\n1,2,3\n\n5,6\n')
    short, not_text, long, good = read(path)
    assert (short.origin, short.fault) == ("rows.csv:2", "1 fields where the header has 2")
    assert (not_text.origin, not_text.fault) == ("rows.csv:3", "column 'b' holds the byte 0xff, not UTF-8")
    assert (long.origin, long.fault) == ("rows.csv:5", "3 fields where the header has 2")
    assert (good.origin, good.values) == ("rows.csv:7", {"a": "5", "b": "6"})


def test_long_fields_of_csv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n" + "x" * 200_000)
    assert len(read(tmp_path / "a.csv")[0].values["a"]) == 200_000


def test_bad_text_in_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    text = pyarrow.array([b"good", b"caf\xe9", b"fine"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"a": text}), tmp_path / "a.parquet")
    first, bad, last = read(tmp_path / "a.parquet")
    assert (first.values, last.values) == ({"a": "good"}, {"a": "fine"})
    assert (bad.origin, bad.fault) == ("a.parquet:2", "a text holds the byte 0xe9, not UTF-8")


def broken_files() -> dict[str, tuple[bytes, str]]:
    lines = b"".join(b'{"a": "%d", "b": "%d"}\n' % (i, i * i) for i in range(20_000))
    packed = gzip.compress(lines)
    return {
        "empty.jsonl": (b"", "empty.jsonl is empty"),
        "blank.jsonl": (b"\n\n", "blank.jsonl has no rows"),
        "header.csv": (b"a,b\n", "header.csv has no rows"),
        "none.json": (b"[]", "none.json has no rows"),
        "cut.jsonl.gz": (packed[: len(packed) // 2], "truncated gzip file: its stream ends early, after line "),
        "not.jsonl.gz": (lines, "not.jsonl.gz is a damaged gzip file: Not a gzipped file"),
        "flipped.jsonl.gz": (packed[:5000] + b"\0\0\0\0" + packed[5004:], "flipped.jsonl.gz is a damaged gzip file"),
        "cut.json": (b'[{"a": 1}, {"a"', "cut.json is not JSON"),
        "latin.json": (b'[{"a":\n "caf\xe9"}]', "not UTF-8, 0xe9, in line 2"),
        "cut.parquet": (b"PAR1 and no end", "cut.parquet is no whole Parquet file"),
        "twice.csv": (b"a,b,a\n1,2,3\n", "twice.csv has the column 'a' 2 times in its header"),
        "open.csv": (b'a,b\n1,2\n"x,3\n4,5\n', "open.csv is not CSV from line 3 on"),
        "pointer.parquet": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        "rows.txt": (b"text", "rows.txt is of no kind that can be read"),
    }


@pytest.mark.parametrize("name", broken_files())
def test_a_broken_file_is_one_paragraph(tmp_path: Path, name: str) -> None:
    content, message = broken_files()[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_gzip_says_how_far_it_got(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(broken_files()["cut.jsonl.gz"][0])
    seen: list[Record] = []
    with pytest.raises(DataError) as caught:
        seen.extend(read_records(path, "cut.jsonl.gz"))
    assert f"after line {len(seen)};" in str(caught.value)
    assert len(seen) > 1000


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone.jsonl cannot be read: No such file"):
        read(tmp_path / "gone.jsonl")


def test_description_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"abc")
    assert describe(tmp_path / "a.csv", "a.csv") == {
        "path": "a.csv",
        "bytes": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
