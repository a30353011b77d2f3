"""Files of responses: what is read back, and what each kind of damage is answered with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wpr.data.rows import DataError
from wpr.runs.responses import PARTIAL, Response, read_responses

HEADER = {"model": "m", "prompts": 2}
ROWS = [
    {"prompt_id": "a", "prompt": "Hi", "response": "Ho", "temperature": 0.5, "tokens": 2, "stopped": True},
    {
        "prompt_id": "b",
        "prompt": [{"role": "user", "content": "你好\u2028?"}],
        "response": "",
        "temperature": 0,
        "tokens": 0,
        "stopped": False,
    },
]


def write(folder: Path, lines: list[Any], end: str = "\n") -> Path:
    path = folder / "m-t0.5.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("\n".join(texts) + end, encoding="utf-8")
    return path


def test_reads_back(tmp_path: Path) -> None:
    """Line separators within a text are part of it: only line feeds end a line."""
    found = read_responses(write(tmp_path, [{"header": HEADER}, *ROWS]))
    assert found.header == HEADER
    assert [row.as_dict() for row in found.rows] == ROWS
    assert found.name == "m-t0.5"
    assert list(found.by_prompt()) == ["a", "b"]


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    found = read_responses(write(tmp_path, ["\ufeff" + json.dumps({"header": HEADER}), *ROWS]))
    assert (found.header, len(found.rows)) == (HEADER, 2)


def test_an_empty_file(tmp_path: Path) -> None:
    for content in ("", "\n \n", "\ufeff"):
        with pytest.raises(DataError, match="has no responses; make it anew with `wpr generate`"):
            read_responses(write(tmp_path, [content], end=""))


def test_files_from_elsewhere(tmp_path: Path) -> None:
    found = read_responses(write(tmp_path, [{"prompt_id": 7, "prompt": "Hi", "response": "Ho", "author": "x"}], end=""))
    assert found.rows == (Response("7", "Hi", "Ho"),)
    assert found.header == {}


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([{"header": HEADER}], "no responses"),
        ([{"header": HEADER}, ROWS[0]], "1 responses where its header says 2"),
        ([{"header": HEADER}, ROWS[0], ROWS[1], ROWS[1]], ":4 answers the prompt 'b' again, as line 3"),
        ([{"header": HEADER}, *ROWS, {"header": HEADER}], ":4 is a second header"),
        ([{"header": 3}, *ROWS], "header 3; it must be an object"),
        ([ROWS[0], '{"prompt_id": "b", "pro'], "cut off"),
        ([ROWS[0], "[1]"], ":2 is \\[1\\]; a line holds one object"),
        ([{"prompt_id": "b", "prompt": "x"}], "no 'response'"),
        ([ROWS[0] | {"response": 3}], "'response' is 3"),
        ([ROWS[0] | {"prompt": []}], "no messages"),
        ([ROWS[0] | {"prompt": [{"role": "user"}]}], "role and content"),
        ([ROWS[0] | {"prompt_id": None}], "prompt_id None"),
        ([ROWS[0] | {"temperature": -1}], "'temperature' is -1"),
        ([ROWS[0] | {"tokens": 1.5}], "'tokens' is 1.5"),
        ([ROWS[0] | {"stopped": "yes"}], "'stopped' is 'yes'"),
        (['{"prompt_id": "a", "prompt": "\\ud800", "response": ""}'], "surrogate"),
    ],
)
def test_damage_is_named(tmp_path: Path, lines: list[Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        read_responses(write(tmp_path, lines, end=""))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_responses(tmp_path / "x.jsonl")
    with pytest.raises(DataError, match="is a folder"):
        read_responses(tmp_path)
    (tmp_path / f"x.jsonl{PARTIAL}").write_text("")
    with pytest.raises(DataError, match="not finished"):
        read_responses(tmp_path / "x.jsonl")
    (tmp_path / "y.jsonl").write_bytes(b"{}\n\xff")
    with pytest.raises(DataError, match=":2 holds the byte 0xff"):
        read_responses(tmp_path / "y.jsonl")
