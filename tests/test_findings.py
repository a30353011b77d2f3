"""Findings: what is saved is loaded again, contradictions are refused, damage is told and no more."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from wpr.findings import Figure, Finding, FindingError, Mark, Series, as_text, found_in, load, save, slug


def a_finding(name: str = "coherence") -> Finding:
    scatter = Series("tokens", [0.0, 1.5], [1.0, -2.0], low=[0.5, -3.0], high=[1.5, -1.0])
    return Finding(
        name,
        "Coherence",
        ["What was measured.", "What it says."],
        ["model", "distance", "positions"],
        [["sft", 0.25, 12], ['ékl, "b"', None, 3]],
        [
            Figure("scatter", "Each token", "KL", "W", [scatter], log_x=True, marks=[Mark(0.5, "half", "x")]),
            Figure("histogram", "Costs", "cost", "pairs", [Series("all", [0.0, 1.0, 2.0], [3.0, 4.0])], note="read so"),
            Figure("bars", "Means", "model", "d", [Series("d", ["sft", "kl"], [1.0, 2.0])]),
        ],
        {"top": 10, "path": "a/b"},
    )


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    finding = a_finding()
    path = save(finding, tmp_path / "x", draw=lambda figure: f"<svg>{figure.title}</svg>")
    assert path == tmp_path / "x" / "finding.json"
    assert load(tmp_path / "x") == finding
    assert (tmp_path / "x" / "Each-token.svg").read_text() == "<svg>Each token</svg>"
    with (tmp_path / "x" / "table.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [finding.columns, ["sft", "0.25", "12"], ['ékl, "b"', "", "3"]]
    left = {file.name for file in (tmp_path / "x").iterdir()}
    assert left == {"finding.json", "table.csv", "Each-token.svg", "Costs.svg", "Means.svg"}


def test_numbers_that_are_not_finite_become_gaps(tmp_path: Path) -> None:
    figure = Figure("lines", "L", "x", "y", [Series("a", [1.0, 2.0, 3.0], [math.nan, math.inf, 1.0])])
    save(replace(a_finding(), rows=[["sft", math.nan, 1]], figures=[figure]), tmp_path)
    json.loads((tmp_path / "finding.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    found = load(tmp_path)
    assert found.rows == [["sft", None, 1]]
    first, second, third = found.figures[0].series[0].y
    assert math.isnan(first)
    assert math.isnan(second)
    assert third == 1.0


def test_an_earlier_findings_drawings_go(tmp_path: Path) -> None:
    save(a_finding(), tmp_path, draw=lambda _: "<svg/>")
    (tmp_path / "mine.svg").write_text("kept")
    save(replace(a_finding(), figures=a_finding().figures[:1]), tmp_path, draw=lambda _: "<svg/>")
    assert sorted(file.name for file in tmp_path.glob("*.svg")) == ["Each-token.svg", "mine.svg"]


def test_a_drawing_that_fails_leaves_the_earlier_finding(tmp_path: Path) -> None:
    save(a_finding(), tmp_path, draw=lambda _: "<svg/>")

    def broken(_: Figure) -> str:
        raise RuntimeError("cannot draw")

    with pytest.raises(RuntimeError, match="cannot draw"):
        save(replace(a_finding(), title="new"), tmp_path, draw=broken)
    assert load(tmp_path) == a_finding()


def test_found_in_a_run_evaluations_first(tmp_path: Path) -> None:
    for folder, name in (("analyses", "b"), ("analyses", "a"), ("evaluations", "z")):
        save(a_finding(name), tmp_path / folder / name)
    assert [finding.name for finding in found_in(tmp_path)] == ["z", "a", "b"]
    assert found_in(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 1}', '{"format": 9}', "\x00", "[" * 100_000],
    ids=["empty", "cut", "list", "null", "no fields", "other format", "bytes", "deep"],
)
def test_damaged_findings_are_told_and_the_others_shown(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(a_finding("good"), tmp_path / "analyses" / "good")
    bad = tmp_path / "analyses" / "bad"
    bad.mkdir()
    (bad / "finding.json").write_text(text)
    message: list[tuple[Path, str]] = []
    found = found_in(tmp_path, lambda folder, why: message.append((folder, why)))
    assert [finding.name for finding in found] == ["good"]
    assert [folder for folder, _ in message] == [bad]
    assert "finding.json" in message[0][1]
    assert "again" in message[0][1] or "again" in message[0][1]
    found_in(tmp_path)
    assert "left out" in caplog.text


def test_a_file_with_wrong_parts_is_damaged(tmp_path: Path) -> None:
    save(a_finding(), tmp_path)
    whole = json.loads((tmp_path / "finding.json").read_text())
    for key, value in (
        ("rows", [[1]]),
        ("figures", [{}]),
        ("figures", 3),
        ("name", "../x"),
        ("text", None),
        ("rows", [[{}, 1, 2]]),
    ):
        (tmp_path / "finding.json").write_text(json.dumps(whole | {key: value}))
        with pytest.raises(FindingError):
            load(tmp_path)


def test_no_finding_is_told(tmp_path: Path) -> None:
    with pytest.raises(FindingError, match="holds no finding"):
        load(tmp_path)


def test_contradictions_are_refused() -> None:
    good = a_finding()
    with pytest.raises(FindingError, match="2 cells for 3 columns"):
        replace(good, rows=[["a", 1.0]])
    with pytest.raises(FindingError, match=r"'\.\./x' cannot name"):
        replace(good, name="../x")
    with pytest.raises(FindingError, match="are called 'Costs'"):
        replace(good, figures=[good.figures[1], good.figures[1]])
    with pytest.raises(FindingError, match="has 1 y but 2 x"):
        Figure("lines", "t", "x", "y", [Series("s", [1.0, 2.0], [1.0])])
    with pytest.raises(FindingError, match="one edge more"):
        Figure("histogram", "t", "x", "y", [Series("s", [1.0, 2.0], [1.0, 1.0])])
    with pytest.raises(FindingError, match="'pie' cannot be drawn"):
        Figure("pie", "t", "x", "y", [])  # type: ignore[arg-type]


def test_text_for_a_terminal() -> None:
    lines = as_text(a_finding()).splitlines()
    assert lines[0] == "Coherence"
    assert "What it says." in lines
    assert lines[-3:] == [
        "model     distance  positions",
        "sft           0.25         12",
        'ékl, "b"         -          3',
    ]
    assert as_text(replace(a_finding(), rows=[])).endswith("What it says.")


def test_slugs_are_safe_names() -> None:
    assert slug("KL against W (a token)") == "KL-against-W-a-token"
    assert slug("../../etc/passwd") == "etc-passwd"
    assert slug("a.b_c-9") == "a.b_c-9"
