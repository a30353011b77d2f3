"""The documentation's example rows are rows, and its settings are settings."""

from __future__ import annotations

import json
import re
from pathlib import Path

from wpr.data import DataSettings, LengthReport
from wpr.data.formats import make_row
from wpr.data.settings import FORMATS

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_an_example_row_of_each_format() -> None:
    examples = re.findall(r"^\*\*`([\w-]+)`\*\*.*?```json\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    assert [format for format, _ in examples] == list(FORMATS)
    for format, example in examples:
        assert make_row(json.loads(example), "docs:1", DataSettings(format)) is not None


def test_names_of_the_report() -> None:
    names = set(LengthReport(0, 0).as_dict())
    assert {"no_completion", "repeated", "ties", "end_inside"} <= names
    assert all(f"`{name}`" in PAGE for name in ("no_completion", "repeated", "ties", "end_inside"))
