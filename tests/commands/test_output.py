"""What commands write beside their results: remarks, and lines that say how far they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wpr.commands import output
from wpr.findings import Finding, load


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test sets."""
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    return now


def test_remarks_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    output.say("one")
    output.note("two")
    assert capsys.readouterr() == ("", "one\nNote: two\n")


def test_a_finding_is_saved_with_its_rows_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding("name", "A title", ["Some words."], ["a"], [[1]])
    output.save_and_print(finding, tmp_path / "new", [{"a": "ä"}, {"a": 2}])
    assert load(tmp_path / "new") == finding
    assert [json.loads(line) for line in (tmp_path / "new/data.jsonl").read_text().splitlines()] == [
        {"a": "ä"},
        {"a": 2},
    ]
    printed = capsys.readouterr().out
    assert "A title" in printed
    assert printed.endswith(f"\nall of it is in {tmp_path / 'new'}\n")


def test_progress_without_a_terminal_is_a_line_now_and_then(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with output.show_progress("answers", 100) as advance:
        advance(40)  # an earlier process's
        for second, steps in ((10, 10), (31, 10), (40, 10), (62, 10), (93, 20)):
            clock[0] = second
            advance(steps)
    # 20 steps in 31 s, then 40 in 62 s; the last step is not worth a line.
    assert capsys.readouterr().err == ("answers: 60 of 100, about 62 s left\nanswers: 80 of 100, about 31 s left\n")


@pytest.mark.parametrize(("seconds", "text"), [(3.4, "3 s"), (89, "89 s"), (90, "2 min"), (5400, "1.5 h")])
def test_durations(seconds: float, text: str) -> None:
    assert output.duration(seconds) == text
