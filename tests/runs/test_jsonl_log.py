"""Files that grow: what a sudden end leaves is gone on with, what others made is refused."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from wpr.data.rows import DataError
from wpr.runs.jsonl_log import Journal, read_finished

HEADER = {"sampling": {"temperature": 0.5, "top_k": 0}, "seed": 0, "model": "a"}


def journal(folder: Path, header: dict[str, Any] = HEADER) -> Journal:
    return Journal(folder / "x.jsonl", header, "remove it")


def test_goes_on_and_finishes(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        first.append([{"n": 2}, {"n": "\u2028é"}])
    with journal(tmp_path) as second:
        assert second.rows == [{"n": 2}, {"n": "\u2028é"}]
        second.append([{"n": 1}])
        assert not (tmp_path / "x.jsonl").exists()
        second.finish(second.rows[::-1])
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]
    header, rows = read_finished(tmp_path / "x.jsonl")
    assert header == HEADER
    assert rows == [{"n": 1}, {"n": "\u2028é"}, {"n": 2}]


BOTH = [{"n": 1}, {"n": "äää"}]


@pytest.mark.parametrize(
    ("cut", "kept"), [(1, BOTH), *((cut, BOTH[:1]) for cut in range(2, 18)), (18, []), (25, []), (26, []), (90, [])]
)
def test_a_line_that_was_cut_off_is_forgotten(tmp_path: Path, cut: int, kept: list[Any]) -> None:
    """Wherever the writing stopped, within the header too. A line that lacks its end only is kept."""
    with journal(tmp_path) as first:
        first.append([{"n": 1}, {"n": "äää"}])
    path = tmp_path / "x.jsonl.partial"
    whole = path.read_bytes()
    assert len(whole) > 90
    path.write_bytes(whole[:-cut])
    with journal(tmp_path) as second:
        assert second.rows == kept
        second.append([{"n": 3}])
    with journal(tmp_path) as third:
        assert third.rows == [*kept, {"n": 3}]


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        first.append([{"n": 1}, {"n": 2}])
    path = tmp_path / "x.jsonl.partial"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{oops", lines[2]]) + "\n")
    with pytest.raises(DataError, match=r"partial:2 is damaged"), journal(tmp_path):
        pass
    path.write_text(json.dumps([1]) + "\n")
    with pytest.raises(DataError, match="no object"), journal(tmp_path):
        pass


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    """An editor put it there."""
    with journal(tmp_path) as first:
        first.append([{"n": 1}])
    path = tmp_path / "x.jsonl.partial"
    path.write_bytes(BOM_UTF8 + path.read_bytes())
    with journal(tmp_path) as second:
        assert second.rows == [{"n": 1}]
        second.append([{"n": 2}])
    with journal(tmp_path) as third:
        third.finish(third.rows)
    finished = tmp_path / "x.jsonl"
    finished.write_bytes(BOM_UTF8 + finished.read_bytes())
    assert read_finished(finished) == (HEADER, [{"n": 1}, {"n": 2}])


def test_a_line_that_cannot_be_gone_on_with_is_named(tmp_path: Path) -> None:
    def check(row: dict[str, Any], where: str) -> None:
        if "id" not in row:
            raise DataError(f"{where} has no id")

    with journal(tmp_path) as first:
        first.append([{"id": 1}, {"n": 2}])
    path = tmp_path / "x.jsonl.partial"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n\n", 1))  # blank lines are counted
    before = path.read_bytes()
    message = r"partial:4 has no id; delete the line, which is then made again, or the file to start again$"
    with pytest.raises(DataError, match=message), Journal(tmp_path / "x.jsonl", HEADER, "remove it", check):
        pass
    assert path.read_bytes() == before


def test_another_header_is_refused_with_the_difference(tmp_path: Path) -> None:
    with journal(tmp_path, HEADER | {"seed": 7}):
        pass
    with journal(tmp_path) as first:  # nothing was made with the other seed
        first.append([{"n": 1}])
    changed = {"sampling": {"temperature": 0.7, "top_k": 0}, "seed": 0, "model": "b"}
    with (
        pytest.raises(DataError, match=r"sampling\.temperature: 0\.5 -> 0\.7\); remove it"),
        journal(tmp_path, changed),
    ):
        pass
    with journal(tmp_path, HEADER | {"model": "elsewhere"}):  # the same weights, at another place
        pass


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with journal(tmp_path), pytest.raises(DataError, match="another process is writing"), journal(tmp_path):
        pass
    with journal(tmp_path):
        pass


def test_a_setting_that_came_later_is_none_in_older_headers(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        first.append([{"n": 1}])
    later = HEADER | {"adapter": None, "sampling": {"temperature": 0.5, "top_k": 0, "min_p": None}}
    with journal(tmp_path, later) as second:
        assert second.rows == [{"n": 1}]
    with pytest.raises(DataError, match=r"adapter: not set -> 'x'\)"), journal(tmp_path, HEADER | {"adapter": "x"}):
        pass
