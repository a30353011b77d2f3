"""Whole sources: bad rows, limits, fingerprints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data import files
from wpr.data import Corpus, DataError, DataSettings, load_corpus

BAD = {**files.HH, "rejected": files.HH["rejected"].replace("No.", "")}


def pairs(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(start, start + count)
    ]


def load(source: str, format: str = "preference", **settings: Any) -> Corpus:
    return load_corpus(DataSettings(format, source=source, **settings))


def test_bad_rows_stop_before_training(tmp_path: Path) -> None:
    source = files.json_lines(tmp_path / "hh.jsonl.gz", [files.HH, *[BAD] * 7, files.HH])
    with pytest.raises(DataError) as caught:
        load(source, "hh")
    message = str(caught.value)
    assert message.startswith(f"7 of 9 rows cannot be used: {source}:2, ")
    assert f"{source}:6: 'rejected' is empty; and 2 more. Fix them, or set data.bad_rows: skip" in message
    assert "\n" not in message


def test_bad_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    source = files.json_lines(tmp_path / "hh.jsonl.gz", [files.HH, BAD, files.HH])
    corpus = load(source, "hh", bad_rows="skip")
    assert [row.origin for row in corpus.rows] == [f"{source}:1", f"{source}:3"]
    assert corpus.skipped == [f"{source}:2: 'rejected' is empty"]
    assert (corpus.files[0]["rows"], corpus.files[0]["skipped"], corpus.files[0]["path"]) == (2, 1, source)


def test_nothing_but_bad_rows_stops_even_so(tmp_path: Path) -> None:
    source = files.json_lines(tmp_path / "hh.jsonl", [{"good": "a"}] * 3)
    with pytest.raises(DataError, match="none of the 3 rows can be used: .*no column 'chosen' .there are 'good'"):
        load(source, "hh", bad_rows="skip")
    good = files.json_lines(tmp_path / "good.jsonl", [files.HH])
    with pytest.raises(DataError, match="hh.jsonl gave no row for data.format hh .*no column 'chosen'"):
        load(good, "hh", bad_rows="skip", validation=source)


def test_a_truncated_gzip_stops_even_when_bad_rows_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "hh.jsonl.gz"
    files.json_lines(path, [files.HH] * 50)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="truncated gzip file: .* download or copy it again"):
        load(str(path), "hh", bad_rows="skip")


def test_news_are_counted(tmp_path: Path) -> None:
    corpus = load(files.parquet(tmp_path / "tldr.parquet", [files.TLDR, files.NEWS]), "tldr")
    assert (len(corpus.rows), corpus.skipped, corpus.files[0]["other_task"]) == (1, [], 1)
    only = files.parquet(tmp_path / "news.parquet", [files.NEWS])
    with pytest.raises(DataError, match="all records are of another task"):
        load(only, "tldr")


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    rows = pairs(20)
    one = load(files.json_lines(tmp_path / "here" / "a.jsonl", rows))
    moved = load(files.json_lines(tmp_path / "there" / "b.jsonl.gz", rows[::-1]))
    table = load(files.parquet(tmp_path / "c.parquet", rows))
    assert one.fingerprint == moved.fingerprint == table.fingerprint
    other = load(files.json_lines(tmp_path / "d.jsonl", [*rows[:-1], {**rows[-1], "chosen": "else"}]))
    assert other.fingerprint != one.fingerprint
    held = load(
        files.json_lines(tmp_path / "e.jsonl", rows[:10]),
        validation=files.json_lines(tmp_path / "f.jsonl", rows[10:]),
    )
    assert held.fingerprint != one.fingerprint


def test_limit_is_drawn_by_the_seed(tmp_path: Path) -> None:
    source = files.json_lines(tmp_path / "a.jsonl", pairs(50))
    shuffled = files.json_lines(tmp_path / "b.jsonl", pairs(50)[::-1])
    settings = DataSettings("preference", source=source, limit=10)
    one, again, other = (load_corpus(settings, seed) for seed in (0, 0, 1))
    assert len(one.rows) == 10
    assert one == again
    assert one.fingerprint != other.fingerprint
    assert load(shuffled, limit=10).fingerprint == one.fingerprint
    assert [row.origin for row in one.rows] != [row.origin for row in other.rows]
    assert len(load(source, limit=100).rows) == 50


def test_own_data_in_five_lines(tmp_path: Path) -> None:
    """As the documentation shows it: columns of a CSV file, with one kept for the reward."""
    (tmp_path / "mine.csv").write_text("question,good,bad,level\nWhat is 2+2?,Four.,Five.,3\n")
    names = {"prompt": "question", "chosen": "good", "rejected": "bad", "difficulty": "level"}
    row = load(str(tmp_path / "mine.csv"), columns=names).rows[0]
    assert (row.prompt, row.chosen, row.rejected, row.columns) == (
        "What is 2+2?",
        "Four.",
        "Five.",
        {"difficulty": "3"},
    )
    assert row.origin.endswith("mine.csv:2")
