"""Files of prompts: names, repetitions, formats, faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ppo.tiny import tokenizer
from wpr.data import DataSettings, Encoder
from wpr.data.rows import DataError
from wpr.evaluation.prompt_file import as_asked, read_prompts

PROMPTS = DataSettings("prompts", template="text")


def write(folder: Path, rows: list[Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_names_come_from_the_content(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "w5"}]
    found, notes = read_prompts(write(tmp_path, [{"prompt": "w3"}, {"prompt": chat}, {"prompt": "w3"}]), PROMPTS)
    assert len(found) == 2
    assert notes == [f"1 prompts stand in {tmp_path / 'prompts.jsonl'} more than once and are answered once"]
    again, _ = read_prompts(write(tmp_path, [{"prompt": chat}, {"prompt": "w3"}]), PROMPTS)
    assert dict(again).keys() == dict(found).keys()
    assert [row.prompt for _, row in found] == ["w3", tuple(chat)]


def test_given_names_and_a_limit(tmp_path: Path) -> None:
    rows = [{"prompt": "w3", "prompt_id": 7}, {"prompt": "w3", "prompt_id": "b"}, {"prompt": "w4"}]
    found, _ = read_prompts(write(tmp_path, rows), PROMPTS, limit=2)
    assert [name for name, _ in found] == ["7", "b"]
    asked = as_asked(found, Encoder(tokenizer(), PROMPTS))
    assert [(one.prompt_id, one.prompt, one.input_ids) for one in asked] == [("7", "w3", [3]), ("b", "w3", [3])]


def test_a_file_of_responses_will_do(tmp_path: Path) -> None:
    rows = [{"header": {"prompts": 1}}, {"prompt_id": "a", "prompt": "w3", "response": "w4"}]
    found, _ = read_prompts(write(tmp_path, rows), PROMPTS)
    assert [name for name, _ in found] == ["a"]


def test_several_responses_to_a_prompt_are_one_prompt(tmp_path: Path) -> None:
    """PPO may answer a held-out prompt several times."""
    rows = [{"number": number, "prompt_id": "a", "prompt": "w3", "response": "w4"} for number in range(2)]
    found, notes = read_prompts(write(tmp_path, rows), PROMPTS)
    assert [name for name, _ in found] == ["a"]
    assert "1 prompts stand in" in notes[0]


def test_other_formats(tmp_path: Path) -> None:
    row = {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes", "rejected": "\n\nHuman: Hi\n\nAssistant: No"}
    found, _ = read_prompts(write(tmp_path, [row]), DataSettings("hh"))
    assert found[0][1].prompt == ({"role": "user", "content": "Hi"},)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "x"}], ":1: no column 'prompt'"),
        ([{"prompt": "w3"}, {"prompt": ""}], ":2: 'prompt' is empty"),
        ([{"prompt": "w3", "prompt_id": "a"}, {"prompt": "w4", "prompt_id": "a"}], ":2 has the prompt_id 'a' again"),
        ([{"prompt": "w3", "prompt_id": []}], "prompt_id \\[\\]"),
        ([{"header": {}}], "has no prompts"),
    ],
)
def test_faults(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_prompts(write(tmp_path, rows), PROMPTS)


def test_a_limit_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="limit is 0"):
        read_prompts(write(tmp_path, [{"prompt": "w3"}]), PROMPTS, limit=0)
