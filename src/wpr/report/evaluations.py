"""Evaluations and analyses: every finding in the runs' folders, with its words, figures and table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from wpr.findings import Finding, found_in, slug
from wpr.report.markup import Content, Markup, coded, details, join, paragraph, tag
from wpr.report.plots import figure_panel
from wpr.report.section import ReportData, Section
from wpr.report.tables import Table
from wpr.runs.tolerant import RunRecord

TABLE_ROWS = 12
"""Longer tables are folded."""

DIGITS = 4
"""Of a finding's numbers, some of which lie close to each other; elsewhere the page has three."""

EMPTY = (
    "There are none yet: `wpr analyze all RUN` analyzes a run, `wpr generate` and `wpr judge` compare responses; "
    "what they find is shown here when the page is written again."
)


def evaluation_section(findings: ReportData) -> Section:
    """All findings, run by run."""
    parts: list[Markup] = []
    tables: list[Table] = []
    for name, finding in findings_by_name(findings).items():
        table = Table(f"finding-{name}", finding.title, finding.columns, finding.rows, DIGITS)
        parts.append(_shown(finding, name, table))
        tables += [table] if finding.rows else []
    if not parts:
        parts.append(paragraph(coded(EMPTY), class_="empty"))
    lead = (
        "What evaluations and analyses of these runs found, each with what was measured, the figures and the numbers. "
        "The files behind them are in the run's folders evaluations/ and analyses/."
    )
    return Section("findings", "Evaluations and analyses", lead, join(*parts), tables)


def findings_by_name(findings: ReportData) -> dict[str, Finding]:
    """All findings by the names of their files; of several runs, with the run's number, and its name in the titles."""
    found = {}
    several = len(findings.runs) > 1
    for number, run in enumerate(findings.runs):
        for finding in _of_run(run, findings):
            name = f"{slug(finding.name)}-{number}" if several else slug(finding.name)
            while name in found:  # an evaluation and an analysis of one name
                name += "-again"
            found[name] = replace(finding, title=f"{run.name}: {finding.title}") if several else finding
    return found


def _of_run(run: RunRecord, findings: ReportData) -> list[Finding]:
    def damaged(folder: Path, why: str) -> None:
        findings.problems.add(folder, why.removeprefix(f"{folder / 'finding.json'} "), "the other findings are shown")

    return found_in(run.path, damaged)


def _shown(finding: Finding, name: str, table: Table) -> Markup:
    figures = [figure_panel(figure, f"plot-{name}-{index}") for index, figure in enumerate(finding.figures)]
    grid = table.as_html() if 0 < len(table.rows) <= TABLE_ROWS else table.folded() if table.rows else None
    settings: Content = None
    if finding.settings:
        settings = details("Settings", Table("", "Settings", ["setting", "value"], _settings(finding)).as_html())
    return tag(
        "article",
        tag("h3", finding.title),
        *(paragraph(coded(sentence)) for sentence in finding.text),
        tag("div", *figures, class_="panels") if figures else None,
        grid,
        settings,
        class_="finding",
    )


def _settings(finding: Finding) -> list[list[str | float | None]]:
    return [[key, str(value)] for key, value in finding.settings.items()]
