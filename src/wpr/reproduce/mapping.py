"""What `paper.yaml` says of every table and figure: commands, rows, columns, and the paper's own numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from wpr.config.typed import unknown
from wpr.config.yaml_file import read_yaml
from wpr.findings import slug

FILE = Path(__file__).parent / "paper.yaml"
BEYOND = "open:"
"""How the ids begin of what the paper leaves open; `all` leaves them out."""

Printed = float | tuple[float, float] | None
"""A number of the paper, with its error where it prints one; None where it prints none."""


@dataclass(frozen=True)
class Item:
    """A table or figure.

    id: its label in the paper. commands: of `wpr`, in order, as `paper.yaml` has them.
    rows: names to values for the places of sources, ``row`` among them. columns: names to a source and such values.
    paper: what the paper prints, by row, in the order of the columns.
    finding: folder whose table and figures are the item. figures: folder whose figures go with the table.
    nothing: why there is nothing to run.
    """

    id: str
    title: str
    commands: tuple[str, ...] = ()
    rows: dict[str, dict[str, str]] = field(default_factory=dict)
    columns: dict[str, dict[str, str]] = field(default_factory=dict)
    paper: dict[str, list[Printed]] = field(default_factory=dict)
    note: str = ""
    finding: str | None = None
    figures: str | None = None
    nothing: str | None = None

    @property
    def name(self) -> str:
        """For folders."""
        return slug(self.id)

    @property
    def recipes(self) -> list[str]:
        """Recipes that its commands train."""
        words = [command.split() for command in self.commands]
        return list(dict.fromkeys(own[1] for own in words if own[0] in ("run", "sft", "sweep")))


@dataclass(frozen=True)
class Mapping:
    """All of it. groups: lists of policies by name. sources: where a cell's number stands, by name."""

    items: dict[str, Item]
    groups: dict[str, list[str]]
    hardware: dict[str, str]
    sources: dict[str, dict[str, Any]]


@cache
def load_mapping() -> Mapping:
    """The paper's tables and figures, in its order."""
    values = read_yaml(FILE).values
    items = {label: _item(label, own) for label, own in values["items"].items()}
    return Mapping(items, values["groups"], values["hardware"], values["sources"])


def _item(label: str, own: dict[str, Any]) -> Item:
    rows = {str(name): {"row": row} if isinstance(row, str) else row for name, row in own.get("rows", {}).items()}
    paper = {
        str(name): [tuple(cell) if isinstance(cell, list) else cell for cell in cells]
        for name, cells in own.get("paper", {}).items()
    }
    taken = {key: own[key] for key in ("note", "finding", "figures", "nothing", "columns") if key in own}
    return Item(label, own["title"], tuple(own.get("commands", ())), rows, paper=paper, **taken)


def find_items(names: Sequence[str]) -> list[Item]:
    """Items by their labels, or by what follows the colon in them; ``all``: everything that the paper has."""
    items = load_mapping().items
    found: dict[str, Item] = {}
    for name in names:
        if name == "all":
            found |= {label: item for label, item in items.items() if not label.startswith(BEYOND)}
            continue
        labels = [label for label in items if name in (label, label.partition(":")[2])]
        if not labels:
            raise unknown(name, ["all", *items], lambda _: "the paper", kind="table or figure")
        found |= {label: items[label] for label in labels}
    return list(found.values())
