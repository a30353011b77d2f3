"""The page's charts as figures of their own: SVG documents that a notebook shows and a paper takes, or PNG files."""

from __future__ import annotations

import difflib
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from wpr.errors import OptionError, UnavailableError
from wpr.findings import Figure, Finding, Mark, Series, slug
from wpr.report.axes import CHARACTER, HEIGHT, LEFT, WIDTH
from wpr.report.charts import Chart, Line, end_mark
from wpr.report.comparisons import MEASURES, PolicyComparison, against_each_other, against_sft
from wpr.report.curves import training_charts
from wpr.report.frontier import frontier_charts
from wpr.report.markup import Markup, join, tag
from wpr.report.picture import Picture
from wpr.report.plots import document, draw_figure
from wpr.report.section import ReportData
from wpr.report.win_rates import PAIRS

LEGEND, PANEL = 18, HEIGHT + 14
"""Heights of a line of the legend, and of a chart with a title of two lines."""

LONGEST_TITLE = 38


class Plots:
    """The figures of runs, each a `Picture`: ``run.plot.frontier()``."""

    def __init__(self, data: ReportData, findings: Mapping[str, Finding]) -> None:
        self._data = data
        self._findings = findings

    def curves(self, *metrics: str) -> Picture:
        """Metrics over training, one chart each: those named, such as ``"score", "kl"``; else the report's."""
        known = {name for policy in self._data.policies for line in policy.lines for name in line} - {"step"}
        for name in metrics:
            check_name(name, known, "metric of the training logs")
        charts = training_charts(self._data, metrics or None)
        _need(charts, "there is no training log to draw yet")
        names = [Line(one.name, (), one.colour, one.dash) for one in self._data.policies if one.lines]
        return Picture(_panels(list(charts.values()), [(_sample(line), line.name) for line in names]))

    def frontier(self, x: str | None = None, y: str | None = None) -> Picture:
        """Reward against divergence: each policy's way through training and, as a mark, where it ended on held-out
        prompts. x, y: only the charts with this across (``kl``, ``divergence_semantic``, ``score``) and this upwards
        (``gold``, ``score``, a monitor).
        """
        charts = frontier_charts(self._data)
        _need(charts, "no policy has both a score and a divergence")
        for value, place, axis in ((x, 0, "x"), (y, 1, "y")):
            if value is not None:
                check_name(value, {key[place] for key in charts}, f"{axis} of the frontier")
        kept = [chart for (across, upwards), chart in charts.items() if x in (None, across) and y in (None, upwards)]
        _need(
            kept, f"the frontier has no chart of {y} over {x}; it has " + ", ".join(f"{b} over {a}" for a, b in charts)
        )
        ends = {line.name: line for chart in kept for line in chart.lines}
        return Picture(_panels(kept, [(_sample(line, marked=True), line.name) for line in ends.values()], columns=2))

    def win_rates(self, by: str | None = None) -> Picture:
        """Each policy against the SFT model and against each other, with 95% intervals. by: ``gold`` or ``score``; None
        takes gold where there is gold.
        """
        measured = [name for name in MEASURES if against_sft(self._data.policies, name)]
        _need(measured, "no two models answered the same held-out prompts with scores")
        if by is not None:
            check_name(by, measured, "score that win rates can be by")
        return Picture(draw_figure(win_rate_figure(self._data, by or measured[0])))

    def finding(self, name: str) -> Picture:
        """The figures of an evaluation or an analysis, such as ``geometry``, side by side."""
        check_name(name, self._findings, "evaluation or analysis")
        figures = self._findings[name].figures
        _need(figures, f"{name} has no figure; its table is in run.table({name!r})")
        return Picture(_side_by_side([draw_figure(figure) for figure in figures]))

    def all(self) -> dict[str, Picture]:
        """Every figure that there is, by name; of findings each figure by itself."""
        found = {}
        for name in ("curves", "frontier", "win_rates"):
            try:
                found[name] = getattr(self, name)()
            except UnavailableError:  # a run that has not come so far
                continue
        for name, finding in self._findings.items():
            found |= {f"{slug(name)}-{one.name}": Picture(draw_figure(one)) for one in finding.figures}
        return found


def check_name(name: str, known: Collection[str], kind: str) -> None:
    """Refuse a name that is not known, with the nearest one that is."""
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(sorted(known)) or 'none'}"
        raise OptionError(f"{name!r} is no {kind}; {hint}")


def write_figures(pictures: Mapping[str, Picture], folder: Path, ending: str) -> None:
    """Each picture as a file of its name: ``svg`` or ``png``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        picture.save(folder / f"{name}.{ending}")


def win_rate_figure(data: ReportData, measure: str) -> Figure:
    """Win rates by a measure, in percent."""
    sft, others = against_sft(data.policies, measure), against_each_other(data.policies, measure)[:PAIRS]
    series = [_rates("against SFT", {one.ours.name: one for one in sft})]
    if others:
        series.append(_rates("against each other", {f"{one.ours.name} over {one.opponent}": one for one in others}))
    title = f"Win rate on held-out prompts, by the {data.measures[measure]}"
    return Figure("bars", title, "", "%, with its 95% interval", series, marks=[Mark(50.0, "50%")])


def _rates(name: str, found: Mapping[str, PolicyComparison]) -> Series:
    results = [one.result for one in found.values()]
    rate, low, high = ([100 * getattr(one, end) for one in results] for end in ("rate", "low", "high"))
    return Series(name, list(found), rate, low, high)


def _panels(charts: Sequence[Chart], names: Sequence[tuple[Markup, str]], columns: int = 3) -> str:
    """Charts side by side under one legend, as an SVG document."""
    columns = min(columns, len(charts))
    width = columns * WIDTH
    drawn, at, line = [], float(LEFT), 0
    for sample, name in names:
        needed = 44 + CHARACTER * len(name)
        if at > LEFT and at + needed > width:
            at, line = float(LEFT), line + 1
        drawn.append(tag("g", sample, transform=f"translate({at:.1f},{14 + LEGEND * line})"))
        drawn.append(tag("text", name, x=f"{at + 30:.1f}", y=18 + LEGEND * line))
        at += needed
    top = 10 + LEGEND * (line + 1)
    for index, chart in enumerate(charts):
        row, column = divmod(index, columns)
        lines = textwrap.wrap(chart.title, LONGEST_TITLE)
        heading = [
            tag("text", text, x=LEFT, y=18 - 14 * below, class_="t") for below, text in enumerate(reversed(lines))
        ]
        body = join(*heading, chart.area.grid(chart.x_label), *chart.drawn)
        moved = f"translate({column * WIDTH},{top + PANEL - HEIGHT + row * PANEL})"
        drawn.append(tag("g", body, transform=moved))
    height = math.ceil(len(charts) / columns) * PANEL + top
    described = " ".join(chart.description for chart in charts)
    return document(join(*drawn), width, height, 2 if columns == 1 else 1, described)


def _sample(line: Line, marked: bool = False) -> Markup:
    """How a line, or a policy's mark, looks, before its name."""
    return end_mark(line, 18, 0) if marked else tag("path", d="M0 0H24", class_=f"line {line.looks}")


def _side_by_side(documents: Sequence[str]) -> str:
    """Documents of figures as one."""
    if len(documents) == 1:
        return documents[0]
    columns = min(2, len(documents))
    rows = [documents[start : start + columns] for start in range(0, len(documents), columns)]
    drawn, y = [], 0
    for row in rows:
        placed = [_placed(one, column * WIDTH, y) for column, one in enumerate(row)]
        drawn += [markup for markup, _ in placed]
        y += max(height for _, height in placed)
    return document(join(*drawn), columns * WIDTH, y)


def _placed(drawing: str, x: int, y: int) -> tuple[Markup, int]:
    """A document within another one, at the size that it was drawn in, and its height."""
    head, rest = drawing.split(">", 1)
    box = head.split('viewBox="', 1)[1].split('"', 1)[0]
    height = int(box.split()[3])
    opening = f'<svg viewBox="{box}" x="{x}" y="{y}" width="{WIDTH}" height="{height}" class="wpr-plot">'
    return Markup(opening + rest), height


def _need(found: Collection[object], why: str) -> None:
    if not found:
        raise UnavailableError(why)
