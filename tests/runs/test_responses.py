"""Files of responses: what is read back, and what each kind of damage is answered with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ppo.tiny import tokenizer
from wpr.data import DataSettings, Encoder
from wpr.data.rows import DataError
from wpr.runs.fingerprints import tokenizer_fingerprint
from wpr.runs.jsonl_log import PARTIAL
from wpr.runs.responses import (
    Response,
    prompt_id,
    prompt_text,
    read_responses,
    response_of,
    whose_tokens,
    with_tokens,
)

HEADER = {"model": "m", "prompts": 2}
ROWS = [
    {"number": 0, "prompt_id": "a", "prompt": "Hi", "response": "Ho", "response_ids": [5, 2], "length": 2,
     "finished": True, "temperature": 0.5},
    {"number": 1, "prompt_id": "b", "prompt": [{"role": "user", "content": "你好\u2028?"}], "response": "",
     "response_ids": [], "length": 0, "finished": False, "temperature": 0},
]  # fmt: skip


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


MEASURED = {
    "number": 3, "prompt_id": "c", "prompt": "Hi", "response": "Ho", "response_ids": [5, 2], "length": 2,
    "finished": True, "score": 1.5, "kl": float("inf"), "gold": 2.0, "divergences": {"semantic": 0.25},
    "columns": {"topic": "x"},
}  # fmt: skip
"""A line as PPO writes it."""


def test_what_was_measured_is_kept() -> None:
    found = response_of(MEASURED, "here")
    assert found.as_dict() == MEASURED
    assert (found.measured("score"), found.measured("kl"), found.measured("entropy")) == (1.5, None, None)
    assert found.drawn


def test_lines_of_earlier_releases(tmp_path: Path) -> None:
    """Without token ids, and with other names for a response's length and end; a file may have lines of both kinds."""
    old = {"prompt_id": "a", "prompt": "Hi", "response": "Ho", "temperature": 0.5, "tokens": 2, "stopped": True}
    found = read_responses(write(tmp_path, [{"header": HEADER}, old, ROWS[1]]))
    assert found.rows[0] == Response("a", "Hi", "Ho", length=2, finished=True, temperature=0.5)
    assert [row.drawn for row in found.rows] == [False, True]


def encoder() -> Encoder:
    return Encoder(tokenizer(), DataSettings("prompts", template="text"))


def test_tokens_are_those_that_were_drawn_where_the_file_has_them() -> None:
    drawn = Response("a", "w3 w4", "w5 w6", response_ids=[9, 9, 9], length=3, finished=True, drawn=True)
    bare = replace(drawn, response_ids=(), drawn=False)
    found = [with_tokens(row, encoder()) for row in (drawn, bare)]
    assert [list(row.prompt_ids) for row in found] == [[3, 4], [3, 4]]
    assert [list(row.response_ids) for row in found] == [[9, 9, 9], [5, 6, encoder().end_id]]
    assert whose_tokens(found[:1]) == "The responses' tokens are those that were drawn."
    assert "1 of 1 have as many tokens as when they were drawn" in whose_tokens(found)


def test_prompts_to_read_and_their_names() -> None:
    chat = [{"role": "user", "content": "Hi"}, {"content": "Ho"}]
    assert prompt_text(chat) == "user: Hi\n\nturn: Ho"
    assert Response("a", "Hi", "").prompt_text == "Hi"
    assert prompt_id("Hi") == prompt_id(chat[:1]) != prompt_id("Ho")


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    found = read_responses(write(tmp_path, ["\ufeff" + json.dumps({"header": HEADER}), *ROWS]))
    assert (found.header, len(found.rows)) == (HEADER, 2)


def test_an_empty_file(tmp_path: Path) -> None:
    for content in ("", "\n \n", "\ufeff"):
        with pytest.raises(DataError, match="has no responses; make it again with `wpr generate`"):
            read_responses(write(tmp_path, [content], end=""))


def test_files_from_elsewhere(tmp_path: Path) -> None:
    found = read_responses(write(tmp_path, [{"prompt_id": 7, "prompt": "Hi", "response": "Ho", "author": "x"}], end=""))
    assert found.rows == (Response("7", "Hi", "Ho"),)
    assert found.header == {}


@pytest.mark.parametrize(
    ("lines", "message"),
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
        ([{"header": HEADER}, ROWS[0] | {"length": 1.5}], "'length' is 1.5"),
        ([{"header": HEADER}, ROWS[0] | {"finished": "yes"}], "'finished' is 'yes'"),
        (
            [{"header": HEADER}, ROWS[0] | {"response_ids": [1, -2]}],
            r"'response_ids' is \[1, -2\]; it must be a list of token ids",
        ),
        ([{"header": HEADER}, ROWS[0] | {"number": True}], "'number' is True"),
        ([{"header": HEADER}, ROWS[0] | {"columns": 3}], "'columns' is 3; it must be an object"),
        (['{"prompt_id": "a", "prompt": "\\ud800", "response": ""}'], "surrogate"),
    ],
)
def test_damage_is_named(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
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


@pytest.mark.parametrize(
    "more",
    [{"number": "7"}, {"number": -1}, {"number": None}, {"length": 12.0}, {"finished": "stop"}, {"columns": ["a"]},
     {"divergences": 0.3}, {"response_ids": "1 2"}],
)  # fmt: skip
def test_columns_of_files_from_elsewhere_may_mean_something_else(tmp_path: Path, more: dict[str, Any]) -> None:
    row = {"prompt_id": "a", "prompt": "p", "response": "r"}
    (tmp_path / "x.jsonl").write_text(json.dumps(row | more))
    (found,) = read_responses(tmp_path / "x.jsonl").rows
    assert (found.number, found.length, found.finished, found.drawn) == (0, None, None, False)


def test_tokens_of_another_tokenizer_are_not_taken(tmp_path: Path) -> None:
    """They would be other words, or none at all."""
    encoder = Encoder(tokenizer(), DataSettings(format="prompts", template="text"))
    row = {"prompt_id": "a", "prompt": "w3 w4", "response": "w5 w6", "response_ids": [7, 8]}
    own = {"fingerprint": {"tokenizer": tokenizer_fingerprint(encoder.tokenizer)}}
    for header, ids, drawn in (
        (own, [7, 8], True),
        ({"fingerprint": {"tokenizer": "x"}}, [5, 6], False),
        ({}, [5, 6], False),
    ):
        (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, [*([{"header": header}] if header else []), row])))
        (found,) = read_responses(tmp_path / "x.jsonl").with_tokens(encoder)
        assert (list(found.response_ids), found.drawn) == (ids, drawn)
    outside = replace(found, response_ids=[7, 10_000], drawn=True)
    assert list(with_tokens(outside, encoder).response_ids) == [5, 6]
