"""The page: sections put together in one HTML file that needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from wpr.report.appendix import problem_box, problem_section, recipe_section
from wpr.report.curves import training_section
from wpr.report.evaluations import evaluation_section, findings_by_name
from wpr.report.figures import Plots, write_figures
from wpr.report.frontier import frontier_section
from wpr.report.markup import DASH, Markup, join, paragraph, script_data, tag
from wpr.report.picture import converter
from wpr.report.runs import read_runs
from wpr.report.section import ReportData, Section
from wpr.report.side_by_side import response_section
from wpr.report.summary import summary_section
from wpr.report.tables import write_csv
from wpr.report.time_and_memory import cost_section
from wpr.report.token_view import token_section
from wpr.report.win_rates import win_rate_section
from wpr.report.wording import wording_section
from wpr.runs.tolerant import Problems
from wpr.runs.values import as_text

SECTIONS = (
    summary_section,
    wording_section,  # None where no policy has a word list
    training_section,
    win_rate_section,
    frontier_section,
    evaluation_section,
    cost_section,
    response_section,
    token_section,
    recipe_section,
    problem_section,  # last: the sections before it may find problems
)
SCRIPTS = ("elements.js", "charts.js", "responses.js", "tokens.js")


class ReportError(ValueError):
    """Nothing could be shown, or the page could not be written; the message says why and what to do."""

    exit_code = 2


def write_report(
    runs: Sequence[Path], output: Path, csv: Path | None = None, svg: Path | None = None, png: Path | None = None
) -> list[str]:
    """Write the page of these runs' folders to ``output``, its tables to the folder ``csv`` if one is given, and its
    figures to the folders ``svg`` and ``png``.

    Returns the problems that were found, which the page tells too. Raises `ReportError` if there is nothing to show.
    """
    if png is not None:
        converter()  # refused before anything is written
    problems = Problems()
    findings = ReportData(read_runs([Path(run) for run in runs], problems), problems)
    if not findings.runs:
        found = "; ".join(str(problem) for problem in problems.found) or "no run was given"
        raise ReportError(f"nothing to report: {found}")
    made = [make(findings) for make in SECTIONS]
    sections = [section for section in made if section is not None]
    page = render(findings, sections)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # Text of files may hold halves of characters, which cannot be written.
        output.write_text(page, encoding="utf-8", errors="replace")
        if csv is not None:
            write_csv([table for section in sections for table in section.tables], csv)
        if svg is not None or png is not None:
            pictures = Plots(findings, findings_by_name(findings)).all()
            for folder, ending in ((svg, "svg"), (png, "png")):
                if folder is not None:
                    write_figures(pictures, folder, ending)
    except OSError as error:
        where = error.filename or output
        raise ReportError(
            f"{where} cannot be written ({error.strerror}); choose another -o, --csv, --svg or --png"
        ) from None
    return [str(problem) for problem in problems.found]


def render(findings: ReportData, sections: Sequence[Section]) -> str:
    """The whole page as text."""
    style, script = _asset("report.css"), _script()
    # Only what stands here may run: whatever a run's files hold, the browser loads nothing and starts nothing else.
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    charts = {name: chart for section in sections for name, chart in section.charts.items()}
    studies = [study for section in sections for study in section.studies]
    title = " and ".join(dict.fromkeys(run.name for run in findings.runs))
    described = [as_text(run.recipe.get("description")) for run in findings.runs]
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{title} {DASH} wpr report"),
        tag("style", Markup(style)),
    )
    links = [tag("a", section.title, href=f"#{section.identifier}") for section in sections]
    body = join(
        tag("a", "Skip to the summary", href="#summary", class_="skip"),
        tag(
            "header",
            paragraph("wpr report", class_="kicker"),
            tag("h1", title),
            paragraph("; ".join(text for text in dict.fromkeys(described) if text), class_="subtitle"),
        ),
        tag("nav", *links, aria_label="Sections"),
        tag("main", problem_box(findings.problems.found), *(_section(section) for section in sections)),
        script_data("data", {"charts": charts, "studies": studies}),
        tag("script", Markup(script)),
    )
    page = tag("html", tag("head", head), tag("body", body), lang="en")
    return f"<!doctype html>\n{page}\n"


def _section(section: Section) -> Markup:
    heading = f"{section.identifier}-heading"
    return tag(
        "section",
        tag("h2", section.title, id=heading),
        paragraph(section.lead, class_="lead"),
        section.body,
        id=section.identifier,
        aria_labelledby=heading,
    )


def _asset(name: str) -> str:
    return (files("wpr.report") / "assets" / name).read_text(encoding="utf-8")


def _script() -> str:
    """All scripts in one function, so that they share names with each other and with nobody else."""
    return "(() => {\n'use strict';\n" + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();\n"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
