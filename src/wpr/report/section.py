"""What the page consists of: sections, and what all of them are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from wpr.report.comparisons import SFT, held_out
from wpr.report.markup import Content, Markup
from wpr.report.tables import Table
from wpr.runs.tolerant import Problems, RunRecord


@dataclass(frozen=True)
class Section:
    """A part of the page.

    identifier: of its heading, for links. lead: a sentence on what the reader sees and how to read it. tables: go to
    CSV files. charts, studies: what the page's script draws from; charts by id.
    """

    identifier: str
    title: str
    lead: Content
    body: Markup
    tables: Sequence[Table] = ()
    charts: dict[str, Any] = field(default_factory=dict)
    studies: Sequence[dict[str, Any]] = ()


class ReportData:
    """What was read, and the policies' means on held-out prompts by policy: ``before`` and ``after`` training."""

    def __init__(self, runs: Sequence[RunRecord], problems: Problems) -> None:
        self.runs = runs
        self.problems = problems
        self.policies = [policy for run in runs for policy in run.policies]
        self.before = {policy.name: held_out(policy, "before") for policy in self.policies}
        self.after = {policy.name: held_out(policy, "after") for policy in self.policies}

    @property
    def gold(self) -> bool:
        """Whether any response was judged by a gold scorer."""
        return any(row.measured("gold") is not None for policy in self.policies for row in policy.responses)

    @property
    def monitors(self) -> list[str]:
        """Names of the scores that the runs watched beside gold."""
        return list(dict.fromkeys(name for run in self.runs for name in run.monitors))

    def starts(self) -> list[tuple[str, dict[str, float]]]:
        """The SFT model of each run with its means, where any of its policies has them."""
        found = []
        for run in self.runs:
            means = next((self.before[policy.name] for policy in run.policies if self.before[policy.name]), None)
            if means is not None:
                found.append((SFT if len(self.runs) == 1 else f"{run.name}: {SFT}", means))
        return found
