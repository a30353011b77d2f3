"""The end of the page: the recipes in full, and what was wrong with the files."""

from __future__ import annotations

from collections.abc import Sequence

from wpr.report.markup import Content, Markup, coded, details, join, paragraph, tag
from wpr.report.section import ReportData, Section
from wpr.report.tables import Table
from wpr.runs.tolerant import ReadProblem

RECIPE = 60_000
"""Characters of a recipe that are shown."""


def recipe_section(findings: ReportData) -> Section:
    """The recipe of each run."""
    folded = []
    for run in findings.runs:
        if run.recipe_text is not None:
            text = run.recipe_text[:RECIPE]
            more = len(run.recipe_text) - len(text)
            rest = f"{more} more characters are in {run.path / 'recipe.yaml'}."
            note = paragraph(rest, class_="note") if more else None
            code = tag("pre", text, tabindex="0", role="region", aria_label=f"Recipe of {run.name}")
            folded.append(details(f"Recipe of {run.name}", code, note))
    body = join(*folded) if folded else paragraph("No run has a recipe that can be shown.", class_="empty")
    lead = coded("The resolved settings of each run: saved as a file, `wpr run FILE` repeats it.")
    return Section("recipe", "Recipe", lead, body)


def problem_section(findings: ReportData) -> Section:
    """What was found wrong while reading, all of it."""
    found = findings.problems.found
    table = Table("problems", "Problems", ["file", "what", "what to do"], [[p.file, p.what, p.remedy] for p in found])
    body = problem_list(found) if found else paragraph("All files were there and could be read.", class_="empty")
    lead = "What was missing, unfinished or damaged in the runs' folders, and what to do about it."
    return Section("problems", "Problems", lead, body, [table])


def problem_list(problems: Sequence[ReadProblem]) -> Markup:
    """Problems, one per line."""
    return tag("ul", *(tag("li", *_item(problem)) for problem in problems), class_="problems")


def problem_box(problems: Sequence[ReadProblem], most: int = 4) -> Markup | None:
    """The first problems in a box at the head of the page."""
    if not problems:
        return None
    more = len(problems) - most
    link = tag("a", f"{more} more are listed below", href="#problems")
    count = "1 problem was" if len(problems) == 1 else f"{len(problems)} problems were"
    return tag(
        "aside",
        tag("h2", f"{count} found while reading"),
        problem_list(problems[:most]),
        paragraph(link, ".") if more > 0 else None,
        class_="box",
        aria_label="Problems",
    )


def _item(problem: ReadProblem) -> list[Content]:
    return [
        tag("code", problem.file),
        f" {problem.what}. ",
        tag("span", coded(_sentence(problem.remedy)), class_="remedy"),
    ]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if not text.startswith("`") else f"{text}."
