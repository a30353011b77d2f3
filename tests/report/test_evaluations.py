"""The section of findings: all of them, from several runs, damaged ones told, text never more than text."""

from __future__ import annotations

from pathlib import Path

from tests.report.reading import report, table
from tests.report.run_folder import write_run
from tests.report.some_findings import HARMLESS, figures, write_findings
from wpr.findings import Finding, save


def test_without_findings_the_page_says_how_to_make_some(whole: Path) -> None:
    page, _ = report(whole)
    assert "wpr analyze all RUN" in page.text


def test_every_finding_is_shown(owned: Path, tmp_path: Path) -> None:
    write_findings(owned)
    page, problems = report(owned, csv=tmp_path / "csv")
    assert problems == []
    for words in ("Of all kinds", "One sentence.", "How to read it.", *(figure.title for figure in figures())):
        assert words in page.text
    assert [row["rate"] for row in table(tmp_path / "csv" / "finding-similarity.csv")] == ["0.25", ""]
    assert "Table: Judge" in page.text, "a long table is folded"
    assert page.text.index("Judge") < page.text.index("Of all kinds"), "evaluations come first"


def test_numbers_have_the_digits_of_the_terminal_and_commands_are_code(owned: Path) -> None:
    message = ["Run `wpr generate` first.", "A model wrote ` by itself, and `a` too."]
    save(
        Finding("close", "Close", message, ["model", "distance"], [["a", 3.30512], ["b", 3.31444]]),
        owned / "analyses" / "c",
    )
    page, _ = report(owned)
    assert "3.305" in page.text
    assert "3.314" in page.text
    assert "Run <code>wpr generate</code> first." in page.source
    assert "A model wrote <code> by itself, and </code>a` too." in page.source


def test_text_of_findings_is_only_text(owned: Path) -> None:
    write_findings(owned)
    page, _ = report(owned)
    assert "<script>alert" not in page.source
    assert HARMLESS in page.text


def test_findings_of_two_runs_are_told_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_findings(write_run(tmp_path / name, prompts=4, steps=5))
    page, _ = report(tmp_path / "one", tmp_path / "two", csv=tmp_path / "csv")
    assert "one: Of all kinds" in page.text
    assert "two: Of all kinds" in page.text
    assert (tmp_path / "csv" / "finding-similarity-0.csv").exists()
    assert (tmp_path / "csv" / "finding-similarity-1.csv").exists()


def test_a_damaged_finding_is_a_problem_and_no_more(owned: Path) -> None:
    write_findings(owned)
    (owned / "evaluations" / "judge" / "finding.json").write_text("{")
    page, problems = report(owned)
    assert len(problems) == 1
    assert "evaluations/judge" in problems[0]
    assert "damaged" in problems[0]
    assert "Of all kinds" in page.text
