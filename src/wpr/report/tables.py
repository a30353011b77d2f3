"""The numbers behind the page as tables: in the page below each chart, and as CSV files."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from wpr.findings import Cell, as_csv
from wpr.report.markup import Content, Markup, details, join, paragraph, scrolling, shown, tag

Item = TypeVar("Item")
ROWS_SHOWN = 60

Frame: TypeAlias = Any
"""A ``pandas.DataFrame``, or a ``list[dict[str, Cell]]`` where pandas is not installed."""


@dataclass(frozen=True)
class Table:
    """name: of its CSV file. title: what it holds. rows: cells in the order of ``columns``; None is an empty cell.
    digits: that the page shows of a number.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    digits: int = 3

    def as_html(self, marks: Mapping[str, Content] | None = None, class_: str = "") -> Markup:
        """A table that scrolls by itself. Of more than `ROWS_SHOWN` rows evenly spaced ones, with a word on it.

        marks: markup that stands for a text in the first column, as a policy's name with its colour.
        """
        rows = thinned(self.rows, ROWS_SHOWN)
        head = tag("tr", *(tag("th", column, scope="col") for column in self.columns))
        body = [tag("tr", *(self._cell(cell, index, marks or {}) for index, cell in enumerate(row))) for row in rows]
        note = None
        if len(rows) < len(self.rows):
            note = paragraph(
                f"{len(rows)} of {len(self.rows)} rows, evenly spaced. {self.name}.csv, written with --csv, has all.",
                class_="note",
            )
        table = tag("table", tag("caption", self.title), tag("thead", head), tag("tbody", *body))
        return join(scrolling(self.title, table, class_=class_), note)

    def _cell(self, cell: Cell, index: int, marks: Mapping[str, Content]) -> Markup:
        text = shown(cell, self.digits)
        if index == 0:
            return tag("th", marks.get(text, text), scope="row")
        return tag("td", text, class_=None if isinstance(cell, str) else "n")

    def folded(self, marks: Mapping[str, Content] | None = None) -> Markup:
        """The table, to be opened below a chart."""
        return details(f"Table: {self.title}", self.as_html(marks))


def as_frame(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Frame:
    """A table for Python: a pandas DataFrame, or a list of dicts where pandas is not installed."""
    records = [dict(zip(columns, row, strict=True)) for row in rows]
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        return records
    return pandas.DataFrame(records, columns=list(columns))


def thinned(items: Sequence[Item], most: int) -> Sequence[Item]:
    """At most so many, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def write_csv(tables: Sequence[Table], folder: Path) -> None:
    """Each table as a file of its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        (folder / f"{table.name}.csv").write_text(as_csv(table.columns, table.rows), encoding="utf-8", errors="replace")
