"""The page as a test reads it."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from wpr.report import write_report

SECTIONS = [
    "summary", "training", "wins", "frontier", "findings", "costs", "responses", "tokens", "recipe", "problems",
]  # fmt: skip


class Page(HTMLParser):
    """The text a reader sees, the ids, and whether every element is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(self.source)
        assert not self.open, self.open
        self.text = " ".join(" ".join(self.words).split())
        assert len(self.ids) == len(set(self.ids)), "an id stands twice"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attributes if name == "id"]
        if tag != "br" and tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def data(self) -> dict[str, Any]:
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', self.source, re.S)
        assert found is not None
        return json.loads(found[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def report(*runs: Path, csv: Path | None = None) -> tuple[Page, list[str]]:
    output = runs[0].parent / "report.html"
    problems = write_report(runs, output, csv)
    return Page(output), problems


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
