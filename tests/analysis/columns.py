"""Columns of a finding's table, for tests."""

from __future__ import annotations

from typing import Any

from wpr.findings import Finding


def column(finding: Finding, name: str) -> list[Any]:
    return [row[finding.columns.index(name)] for row in finding.rows]
