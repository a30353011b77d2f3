"""What the page consists of: sections, and what all of them are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from wpr.report.comparisons import MEASURES, SCORES, SFT, held_out
from wpr.report.markup import Content, Markup
from wpr.report.tables import Table
from wpr.runs.tolerant import Problems, RunRecord
from wpr.runs.values import as_text, mapping

if TYPE_CHECKING:
    from wpr.report.word_lists import ForbiddenWords


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

    @property
    def measures(self) -> dict[str, str]:
        """What responses are judged by, with what the score is the score of."""
        kinds = {as_text(mapping(run.recipe.get("scorer")).get("kind")) for run in self.runs}
        titles = {SCORES.get(kind, MEASURES["score"]) for kind in kinds}
        return MEASURES | {"score": titles.pop() if len(titles) == 1 else "score"}

    @cached_property
    def word_lists(self) -> list[ForbiddenWords]:
        """The lists of forbidden words that policies were trained on."""
        from wpr.report.word_lists import read_word_lists  # which needs this module

        return read_word_lists(self.policies, self.problems)

    @cached_property
    def studies(self) -> tuple[list[dict[str, Any]], int]:
        """Studies of the token view, and how many more do not fit on the page."""
        from wpr.report.token_view import studies_on_page  # as above

        return studies_on_page(self)

    def starts(self) -> list[tuple[str, dict[str, float]]]:
        """The SFT model of each run with its means, where any of its policies has them."""
        found = []
        for run in self.runs:
            means = next((self.before[policy.name] for policy in run.policies if self.before[policy.name]), None)
            if means is not None:
                found.append((SFT if len(self.runs) == 1 else f"{run.name}: {SFT}", means))
        return found
