"""ReportData of every kind of figure, for the page's tests."""

from __future__ import annotations

import math
from pathlib import Path

from wpr.findings import Figure, Finding, Mark, Series, save
from wpr.report import draw_figure

HARMLESS = '<script>alert("no")</script>&'


def figures() -> list[Figure]:
    names = ["writing", "reasoning", "math", "coding"]
    ends = {"low": [0.4, 0.5, 0.6, 0.1], "high": [0.6, 0.7, 0.9, 0.3]}
    fit = Series("fit", [0.0, 2.0], [0.0, 3.0], joined=True)
    halves = [Mark(0.5, "no difference")]
    by_name = [Series("a", names, [0.5, math.nan, 0.7, 0.2], **ends), Series("b", names, [0.1, 0.2, 0.3, 0.4])]
    bars = [Series("a", names, [0.5, 0.6, -0.7, 0.2], **ends)]
    histogram = [Series("a", [0.0, 1.0, 2.0], [0.25, 0.75])]
    radar = [Series("a", names, [5.0, 7.0, 2.0, 9.0]), Series("b", names, [4.0, 1.0, 2.0, 3.0])]
    errors = [Series("a", [1.0, 10.0, 100.0], [1.0, 1e-3, 0.0])]
    return [
        Figure("scatter", "Points", "KL", "W", [Series("a", [0.1, 2.0], [1.0, 3.0]), fit]),
        Figure("lines", "Errors", "iterations", "error", errors, log_x=True, log_y=True),
        Figure("lines", "By name", "model", "rate", by_name, marks=halves),
        Figure("bars", "Bars", "model", "rate", bars, marks=[Mark(0.5, "half")], note="How to read it."),
        Figure("histogram", "Histogram", "cost", "share", histogram, marks=[Mark(1.5, "floor", "x")]),
        Figure("radar", "Radar", "category", "score", radar),
        Figure("matrix", "Matrix", "", "cost", radar),
    ]


def write_findings(run: Path) -> None:
    """Two findings, an evaluation and an analysis, one of them with text that wants to be more than text."""
    rows: list[list[str | float | int | None]] = [["a", 0.25, 3], ["b", None, 4]]
    whole = Finding(
        "similarity", "Of all kinds", ["One sentence.", "Another."], ["model", "rate", "n"], rows, figures()
    )
    save(whole, run / "analyses" / "similarity", draw_figure)
    long = [[f"{HARMLESS} {i}", float(i)] for i in range(100)]
    figure = Figure(
        "bars", HARMLESS, HARMLESS, HARMLESS, [Series(HARMLESS, [HARMLESS], [1.0])], note=HARMLESS, name="x"
    )
    evil = Finding("judge", f"Judge {HARMLESS}", [HARMLESS], [HARMLESS, "n"], long, [figure], {HARMLESS: HARMLESS})
    save(evil, run / "evaluations" / "judge", draw_figure)
