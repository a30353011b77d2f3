"""What an evaluation or an analysis found, in one shape that is saved, printed and drawn.

    finding = Finding(
        name="coherence",
        title="Coherence of the most likely candidates",
        text=["Mean distance between the ten most likely tokens, over 512 positions."],
        columns=["model", "distance"],
        rows=[["sft", 0.91], ["rkl", 0.88]],
        figures=[Figure("bars", "Distance", "model", "distance", [Series("distance", ["sft", "rkl"], [0.91, 0.88])])],
    )
    save(finding, run / "analyses" / finding.name, draw=wpr.report.draw_figure)

A finding's folder has ``finding.json``, from which `load` makes it again, ``table.csv``, one SVG (and one PNG) per
figure where ``draw`` (``draw_png``) is given, and beside them what its maker puts there (``data.jsonl``: the single
measurements behind it). Folders of a run, ``RUN/evaluations/NAME`` and ``RUN/analyses/NAME``, are found by `found_in`
and shown by ``wpr report``.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from wpr.atomic_io import write_atomically

logger = logging.getLogger(__name__)

FORMAT = 1
FOLDERS = ("evaluations", "analyses")
"""Of a run: where findings lie, each in a folder of its own."""

Kind = Literal["scatter", "lines", "bars", "histogram", "radar", "matrix"]
Cell = str | float | int | None


class FindingError(ValueError):
    """A finding that contradicts itself, or a file that holds none; the message says what to do."""

    exit_code = 2


@dataclass(frozen=True)
class Series:
    """Points of one name.

    x: numbers, or texts where they are categories (of bars and radars, and of lines over named things). Of a
    histogram: the left edges of its bins and, last, the right edge of the last bin, one more than ``y``. Of a matrix: a
    row, ``x`` the names of the columns.
    y: a value that is not a number leaves a gap. low, high: ends of each value's interval.
    joined: of a scatter, drawn as a line through its points, as a fit is, instead of as points.
    """

    name: str
    x: list[float] | list[str]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    joined: bool = False


@dataclass(frozen=True)
class Mark:
    """A straight line across a figure, with a word on it: at ``value`` of the axis."""

    value: float
    label: str
    axis: Literal["x", "y"] = "y"


@dataclass(frozen=True)
class Figure:
    """What a plot shows. name: of its file, made from the title if it is not given. note: how to read it.

    log_x, log_y: values at or below 0 are left out of a logarithmic axis. includes: values that a radar's rings reach
    whatever the data, such as the best score that there is.
    """

    kind: Kind
    title: str
    x_label: str
    y_label: str
    series: list[Series]
    log_x: bool = False
    log_y: bool = False
    marks: list[Mark] = field(default_factory=list)
    note: str = ""
    name: str = ""
    includes: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise FindingError(f"a figure of kind {self.kind!r} cannot be drawn; choose {', '.join(get_args(Kind))}")
        for one in self.series:
            edges = 1 if self.kind == "histogram" else 0
            counts = {"x": len(one.x) - edges, "low": len(one.low or one.y), "high": len(one.high or one.y)}
            wrong = [f"{count} {axis}" for axis, count in counts.items() if count != len(one.y)]
            if wrong:
                raise FindingError(
                    f"series {one.name!r} of figure {self.title!r} has {len(one.y)} y but {', '.join(wrong)}; give as "
                    f"many of each{' (x: one edge more)' if edges else ''}"
                )
        if not self.name:
            object.__setattr__(self, "name", slug(self.title))

    @property
    def categories(self) -> list[str] | None:
        """The names along the lower axis, each once, in the order in which series have them; None for numbers."""
        names = [value for one in self.series for value in one.x]
        if not any(isinstance(value, str) for value in names):
            return None
        return list(dict.fromkeys(str(value) for value in names))


@dataclass(frozen=True)
class Finding:
    """One result.

    name: of its folder. text: plain sentences on what was measured, what it says, and what to be careful about.
    columns, rows: its table; None is an empty cell. settings: what it was made with, to be repeated.
    """

    name: str
    title: str
    text: list[str]
    columns: list[str]
    rows: list[list[Cell]]
    figures: list[Figure] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or slug(self.name) != self.name:
            raise FindingError(
                f"{self.name!r} cannot name a finding's folder; use letters, digits, '.', '_' and '-', as "
                f"{slug(self.name) or 'coherence'!r}"
            )
        for number, row in enumerate(self.rows, 1):
            if len(row) != len(self.columns):
                raise FindingError(
                    f"row {number} of finding {self.name!r} has {len(row)} cells for {len(self.columns)} columns"
                )
        names = [figure.name for figure in self.figures]
        again = next((name for name in names if names.count(name) > 1), None)
        if again is not None:
            raise FindingError(f"two figures of finding {self.name!r} are called {again!r}; give each its own name")


def save(
    finding: Finding,
    folder: Path,
    draw: Callable[[Figure], str] | None = None,
    draw_png: Callable[[Figure], bytes] | None = None,
) -> Path:
    """Write the finding's files to ``folder``, which is made, and return its ``finding.json``, which is written last:
    where it stands, the others do too. draw, draw_png: make an SVG document, and a PNG file, of a figure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawings: dict[str, str | bytes] = {}
    for figure in finding.figures:
        drawings |= {} if draw is None else {f"{figure.name}.svg": draw(figure)}
        drawings |= {} if draw_png is None else {f"{figure.name}.png": draw_png(figure)}
    target = folder / "finding.json"
    for stale in _drawings_of(target) - drawings.keys():
        (folder / stale).unlink(missing_ok=True)
    for name, drawing in drawings.items():
        _write_whole(folder / name, drawing)
    _write_whole(folder / "table.csv", as_csv(finding.columns, finding.rows))
    text = json.dumps({"format": FORMAT} | _plain(asdict(finding)), indent=1, ensure_ascii=False, allow_nan=False)
    _write_whole(target, text + "\n")
    return target


def load(folder: Path) -> Finding:
    """The finding that `save` wrote to ``folder``."""
    path = folder / "finding.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise FindingError(
                f"{path} has format {found['format']}, this release reads format {FORMAT}; make it again"
            )
        return Finding(
            name=str(found["name"]),
            title=str(found["title"]),
            text=[str(sentence) for sentence in found["text"]],
            columns=[str(column) for column in found["columns"]],
            rows=[[_cell(cell) for cell in row] for row in found["rows"]],
            figures=[_figure(figure) for figure in found["figures"]],
            settings=dict(found["settings"]),
        )
    except FileNotFoundError:
        raise FindingError(f"{path} is missing: {folder} holds no finding") from None
    except FindingError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FindingError(
            f"{path} is damaged ({type(error).__name__}: {error}); run the command that wrote it again"
        ) from None


def found_in(
    run: Path, report: Callable[[Path, str], None] | None = None, kinds: Sequence[str] = FOLDERS
) -> list[Finding]:
    """The findings in a run's folder, evaluations first, each kind by name.

    report: called for each that cannot be read, with its folder and the reason; otherwise a warning is logged.
    """
    findings = []
    for folder in (path.parent for kind in kinds for path in sorted((run / kind).glob("*/finding.json"))):
        try:
            findings.append(load(folder))
        except (FindingError, OSError) as error:
            if report is None:
                logger.warning("a finding is left out: %s", error)
            else:
                report(folder, str(error))
    return findings


def as_csv(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table as comma-separated text, numbers in full."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def as_text(finding: Finding) -> str:
    """The finding to read in a terminal: title, sentences, and the table in columns."""
    head = [finding.title, "", *finding.text]
    if not finding.rows:
        return "\n".join(head)
    cells = [finding.columns, *([shown(cell) for cell in row] for row in finding.rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(finding.columns))]
    numeric = [all(not isinstance(row[column], str) for row in finding.rows) for column in range(len(widths))]
    lines = [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([*head, "", *lines])


def shown(cell: Cell) -> str:
    """A cell to read: four digits of a number, whole numbers in full, a dash for nothing."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    return str(cell) if isinstance(cell, int) or not math.isfinite(cell) else f"{cell:.4g}"


def slug(text: str) -> str:
    """A text as a file's name: letters, digits, ``.``, ``_`` and ``-``, and no dot at the start."""
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip("-.")


def _figure(found: Mapping[str, Any]) -> Figure:
    """A figure as the file has it, its gaps as NaN."""
    series = [
        Series(
            str(one["name"]),
            _positions(one["x"]),
            _gaps(one["y"]) or [],
            _gaps(one["low"]),
            _gaps(one["high"]),
            bool(one["joined"]),
        )
        for one in found["series"]
    ]
    return Figure(**{**found, "series": series, "marks": [Mark(**mark) for mark in found["marks"]]})


def _positions(values: Sequence[Any]) -> list[float] | list[str]:
    return [str(value) for value in values] if any(isinstance(value, str) for value in values) else _gaps(values) or []


def _gaps(values: Sequence[float | None] | None) -> list[float] | None:
    return None if values is None else [math.nan if value is None else float(value) for value in values]


def _cell(value: Any) -> Cell:
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"a cell is a {type(value).__name__}")


def _plain(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite become null, things that it does not know their text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def _drawings_of(path: Path) -> set[str]:
    """Files that an earlier finding at the same place may have drawn."""
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
        return {f"{slug(figure['name'])}.{ending}" for figure in figures for ending in ("svg", "png")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _write_whole(path: Path, content: str | bytes) -> None:
    """What no UTF-8 can express, as half of a character that a model broke off, becomes a question mark."""
    write_atomically(path, content.encode(errors="replace") if isinstance(content, str) else content)
