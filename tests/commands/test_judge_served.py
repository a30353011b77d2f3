"""`wpr judge` with a real OpenAI-compatible server: `transformers serve` and small local models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.judging.asked import KEY, lines_of, response_files
from tests.evaluation.judging.served import model_that_says, serving, story_model
from tests.pipeline.command import Here
from wpr.findings import load

pytest.importorskip("fastapi", reason="transformers serve needs transformers[serving]")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> object:
    with serving(tmp_path_factory.mktemp("server") / "log") as found:
        yield found


def test_a_model_that_always_says_a_is_exposed(
    here: Here, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    model = model_that_says("A", tmp_path / "says-a")
    files = response_files(tmp_path, 12)
    command = [
        "judge", *map(str, files), "--judge", str(model), "--base-url", address, "--rubric", "summary", "--all",
        "--both-orders", "--set", "max_tokens=1", "--concurrency", "4", "-o", str(tmp_path / "out"), "-y",
    ]  # fmt: skip
    finished = here.succeeds(*command)
    table = {row[0]: row[1] for row in load(tmp_path / "out").rows}
    assert (table["comparisons"], table["answered and read"], table["unreadable"]) == (24, 24, 0)
    assert (table["win rate"], table["position bias"]) == (0.5, 1.0)
    assert "Warning: the judge prefers place A." in finished.stdout
    assert int(table["tokens out"] or 0) == 24
    assert "to be sent: 0 requests" in here.succeeds(*command).stderr


def test_a_model_that_knows_nothing_of_letters_is_counted_as_such(here: Here, address: str, tmp_path: Path) -> None:
    model = story_model(tmp_path / "stories")
    rubric = tmp_path / "short.yaml"
    rubric.write_text('answer: letter\nuser: "{prompt} A: {response_a} B: {response_b} Which one?"\n')
    files = response_files(tmp_path, 3)
    here.succeeds(
        "judge", *map(str, files), "--judge", str(model), "--base-url", address, "--rubric", str(rubric), "--all",
        "--set", "max_tokens=12", "-o", str(tmp_path / "out"), "-y",
    )  # fmt: skip
    rows = lines_of(tmp_path / "out" / "data.jsonl")
    assert [row["status"] for row in rows] == ["unreadable"] * 3
    assert all(len(row["texts"]) == 2 and row["texts"][0].strip() for row in rows)  # it said something, twice


def test_a_model_that_is_not_there(here: Here, address: str, tmp_path: Path) -> None:
    files = response_files(tmp_path, 60)
    finished = here(
        "judge", *map(str, files), "--judge", str(tmp_path / "nothing"), "--base-url", address, "-o",
        str(tmp_path / "out"), "-y", "--attempts", "1",
    )  # fmt: skip
    assert finished.code == 1
    assert "comparisons have no answer (HTTP 500: Internal Server Error (attempt 1 of 1))" in finished.stderr
