"""A table of the paper's layout from what its commands found: our number, its errors, and the paper's beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping as Map
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wpr.config.recipe_file import load_recipe
from wpr.data.rows import DataError
from wpr.findings import Cell, Figure, Finding, FindingError, load, shown
from wpr.reproduce.mapping import Item, Printed, load_mapping
from wpr.reproduce.steps import TRAINING, Options, finding_in, steps_of
from wpr.runs.responses import read_responses

KEYS = ("value", "error", "low", "high")


@dataclass(frozen=True)
class Measured:
    """One cell. error: standard error, over draws where a judge was asked. low, high: 95% interval."""

    row: str
    column: str
    value: Cell = None
    error: Cell = None
    low: Cell = None
    high: Cell = None
    paper: Cell = None
    paper_error: Cell = None
    missing: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return "-"
        text = shown(self.value)
        text += f" ±{_short(self.error)}" if self.error is not None else ""
        return text + (f" [{_short(self.low)}, {_short(self.high)}]" if self.low is not None else "")

    @property
    def printed(self) -> str:
        """What the paper has."""
        if self.paper is None:
            return "-"
        return f"{self.paper}" + (f" ±{self.paper_error}" if self.paper_error is not None else "")


def _short(cell: Cell) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else shown(cell)


def collect(item: Item, options: Options) -> tuple[Finding, list[dict[str, Any]]]:
    """The item as a finding, and its cells one by one. Cells whose numbers are not there are empty, and it says why."""
    text = [options_text(options)] if options.rehearses else []
    text += [item.note] if item.note else []
    if item.nothing is not None:
        return Finding(item.name, f"{item.id}: {item.title}", [*text, item.nothing], [], []), []
    text += _changes(item, options)
    settings = {key: str(value) for key, value in asdict(options).items()}
    title = f"{item.id}: {item.title}"
    if item.finding is not None:
        folder = Path(_filled(item.finding, _places(item, options)))
        try:
            found = load(finding_in(folder))
        except FindingError as error:
            return Finding(item.name, title, [*text, f"Not there yet: {error}"], [], [], settings=settings), []
        return Finding(item.name, title, text + found.text, found.columns, found.rows, found.figures, settings), []
    cells = {
        name: [_cell(item, name, column, number, options) for number, column in enumerate(item.columns)]
        for name in item.rows
    }
    measured = [cell for row in cells.values() for cell in row]
    text += _legend(measured)
    missing = list(dict.fromkeys(cell.missing for cell in measured if cell.missing))
    text += [f"Missing: {reason}" for reason in missing]
    has_paper = any(cell.paper is not None for cell in measured)
    columns = ["", *(name for column in item.columns for name in ([column, "paper"] if has_paper else [column]))]
    rows: list[list[Cell]] = [
        [name, *(part for cell in row for part in ([str(cell), cell.printed] if has_paper else [str(cell)]))]
        for name, row in cells.items()
    ]
    finding = Finding(item.name, title, text, columns, rows, _figures(item, options), settings)
    return finding, [asdict(cell) for cell in measured]


def _changes(item: Item, options: Options) -> list[str]:
    """Models that were not trained as these options say: numbers of a rehearsal must not pass for others."""
    found = [
        f"{step.run}: {text}"
        for step in steps_of(item, options)
        if step.kind in TRAINING and (step.run / "manifest.json").is_file()
        for text in step.changes
    ]
    if not found:
        return []
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return [
        f"MADE BY OTHER SETTINGS than this command's, so that the numbers are not what its title says: "
        f"{' | '.join(found[:3])}{more}. Give the options that the runs were made with, or another --runs."
    ]


def options_text(options: Options) -> str:
    """What a rehearsal's tables are, and are not."""
    parts = [f"{options.scale:g} of the paper's steps and prompts"] if options.scale != 1 else []
    parts += [f"the model {options.model} in place of the paper's"] if options.model else []
    parts += [f"dialogues of {options.data.name} in place of its data"] if options.data else []
    judge = "a reward model that was trained in the same run" if not options.judge else "another judge than the paper's"
    parts += [f"judged by {judge}"]
    parts += [f"changed: {' '.join(options.overrides)}"] if options.overrides else []
    return (
        f"REHEARSAL, no result: {'; '.join(parts)}. It shows that the commands run; nothing here says anything about "
        "the methods."
    )


def _legend(cells: list[Measured]) -> list[str]:
    found = ["Cells: our number"]
    if any(cell.error is not None for cell in cells):
        found.append("± its standard error, over draws where a judge compared, as the paper has it")
    if any(cell.low is not None for cell in cells):
        found.append("[its 95% interval over prompts; of win rates, that with a tie counting half]")
    if any(cell.paper is not None for cell in cells):
        found.append("and what the paper prints")
    return [", ".join(found) + "."] if len(found) > 1 else []


def _places(item: Item, options: Options) -> dict[str, str]:
    return {"runs": str(options.runs), "item": item.name}


def _filled(text: str, places: Map[str, str]) -> str:
    for name, value in places.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def _cell(item: Item, row: str, column: str, number: int, options: Options) -> Measured:
    own = item.columns[column]
    source = load_mapping().sources[own["source"]]
    places = _places(item, options)
    places |= {key: _filled(value, places) for key, value in (own | item.rows[row]).items()}
    printed: Printed = item.paper[row][number] if row in item.paper else None
    paper, paper_error = printed if isinstance(printed, tuple) else (printed, None)
    try:
        values = _values(source, places)
        missing = ""
    except (FindingError, LookupError, OSError, DataError) as error:
        # A model is not compared with itself.
        itself = places.get("against", "").rpartition(":")[2] == places.get("row") and printed is None
        said = str(error.args[0]) if isinstance(error, LookupError) else str(error)
        values, missing = {}, "" if itself else said
    return Measured(row, column, **values, paper=paper, paper_error=paper_error, missing=missing)


def _values(source: Map[str, Any], places: Map[str, str]) -> dict[str, Cell]:
    """The numbers of a cell, by the names that `Measured` has."""
    if "setting" in source:
        value: Any = load_recipe(_filled(source["recipe"], places)).as_dict()
        for part in _filled(source["setting"], places).split("."):
            value = value[part]
        return {"value": value}
    if "example" in source:
        return {"value": _example(source, places)}
    folder = finding_in(Path(_filled(source["finding"], places)))
    found = load(folder)
    wanted = {column: _filled(value, places) for column, value in source["where"].items()}
    rows = [dict(zip(found.columns, row, strict=True)) for row in found.rows]
    rows = [row for row in rows if all(str(row.get(column)) == value for column, value in wanted.items())]
    for key, best in (("largest", max), ("smallest", min)):
        if key in source:
            column = _column(found, source[key])
            known = [(number, row) for row in rows if isinstance(number := row[column], int | float)]
            rows = [best(known, key=lambda pair: pair[0])[1]] if known else []
    if not rows:
        raise LookupError(f"{folder} has no row with {wanted}")
    names = {key: _filled(source[key], places) for key in KEYS if key in source}
    if names["value"] not in rows[0]:
        raise LookupError(f"{folder} has no column {names['value']!r}")
    times = source.get("times", 1)
    numbers = {key: rows[0].get(name) for key, name in names.items()}
    return {key: value * times if isinstance(value, float) else value for key, value in numbers.items()}


def _column(found: Finding, name: str) -> str:
    """The column of this name; of a win rate by a judge, with the judge behind it in brackets."""
    columns = [
        column for column in found.columns if column == name or re.fullmatch(rf"{re.escape(name)} \(.*\)", column)
    ]
    if not columns:
        raise LookupError(f"{found.name} has no column {name!r}")
    return columns[0]


def _example(source: Map[str, Any], places: Map[str, str]) -> str:
    """A part of the first comparison that a judge was asked about: the prompt, a response, or the verdict."""
    folder, part = Path(_filled(source["example"], places)), places["row"]
    with open(folder / "data.jsonl", encoding="utf-8") as file:
        line = next(file, "")
    try:
        first = json.loads(line)
    except ValueError:
        raise LookupError(
            f"{folder / 'data.jsonl'} has no comparison, or is damaged; remove it and judge again"
        ) from None
    if part == "judgment":
        named = {"ours": first["policy"], "theirs": first["against"]}
        return f"{named.get(first['winner'], first['winner'])}. {(first['texts'] or [''])[-1]}".strip()
    name = "paper" if part == "prompt" else part
    responses = read_responses(Path(_filled(source["responses"], places)) / f"{name}-t0.5.jsonl")
    found = responses.by_prompt()[first["prompt_id"]]
    return str(found.prompt if part == "prompt" else found.response)


def _figures(item: Item, options: Options) -> list[Figure]:
    if item.figures is None:
        return []
    try:
        return load(finding_in(Path(_filled(item.figures, _places(item, options))))).figures
    except FindingError:
        return []
