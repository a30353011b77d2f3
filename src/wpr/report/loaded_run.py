"""A run for Python: ``wpr.load_run(path)`` reads its folder and hands out tables, responses, figures and models.

It shows what `wpr report` shows, from the same records: `RunRecord` and `Policy` are what was read, `Response` is a
response, `Finding` an evaluation or analysis, `FinishedRun` what has the models. Nothing is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from wpr.errors import RunFolderError
from wpr.findings import Cell, Finding, found_in
from wpr.report.figures import Plots, check_name
from wpr.report.markup import join, paragraph, tag
from wpr.report.page import write_report
from wpr.report.runs import read_one
from wpr.report.section import ReportData
from wpr.report.summary import headline
from wpr.report.tables import Frame, as_frame
from wpr.report.win_rates import win_rate_table
from wpr.runs.finished_run import REFERENCE, FinishedRun
from wpr.runs.responses import Response
from wpr.runs.tolerant import Policy, Problems, ReadProblem, RunRecord
from wpr.runs.values import as_text, mapping


def load_run(path: str | Path) -> LoadedRun:
    """The run in the folder ``path``, finished or not; what is missing or damaged is in its ``problems``, and a warning
    says so. `RunFolderError` where it is not a run folder.
    """
    problems = Problems()
    record = read_one(Path(path).expanduser(), problems)
    if record is None:
        raise RunFolderError("; ".join(str(problem) for problem in problems.found))
    run = LoadedRun(record, problems)
    if run.problems:
        more = len(run.problems) - 1
        rest = f"; {more} more {'is' if more == 1 else 'are'} in run.problems" if more else ""
        warnings.warn(f"{run.problems[0]}{rest}", stacklevel=2)
    return run


class LoadedRun:
    """What a run's folder has.

    record: as it was read. name: of the folder. path: where it is. policies: by name, in the order of training, also
    those that are not finished. evaluations, analyses: findings of `wpr judge`, `wpr analyze` and their like, by name.
    plot: its figures.

    Tables are pandas DataFrames, or lists of dicts where pandas is not installed.
    """

    def __init__(self, record: RunRecord, problems: Problems) -> None:
        self.record = record
        self.name = record.name
        self.path = record.path
        self.policies: dict[str, Policy] = {policy.own_name: policy for policy in record.policies}
        self._problems = problems
        self.evaluations = self._found("evaluations")
        self.analyses = self._found("analyses")
        self._data = ReportData([record], problems)
        self.plot = Plots(self._data, self.findings)

    @property
    def problems(self) -> list[ReadProblem]:
        """What is missing, unfinished or damaged, and what to do about it."""
        return self._problems.found

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The settings that the run was made with, all of them; empty where its manifest is lost."""
        return self.record.recipe

    @property
    def stages(self) -> dict[str, str]:
        """Status of each stage: done, running, failed or interrupted."""
        return {name: as_text(mapping(one).get("status")) or "unknown" for name, one in self.record.stages.items()}

    @property
    def findings(self) -> dict[str, Finding]:
        """Evaluations and analyses together."""
        return self.evaluations | self.analyses

    @property
    def results(self) -> Frame:
        """A row per policy, and one for the SFT model: means over held-out responses. Divergences are per token."""
        rows = [(name, self._data.after[policy.name]) for name, policy in self.policies.items()]
        rows += self._data.starts()
        columns = list(dict.fromkeys(name for _, found in rows for name in found))
        return as_frame(["policy", *columns], [[name, *(found.get(one) for one in columns)] for name, found in rows])

    @property
    def win_rates(self) -> Frame:
        """Each policy against the SFT model and against each other on held-out prompts, by gold and by score, with
        their 95% intervals.
        """
        table = win_rate_table(self._data)
        return as_frame(table.columns, table.rows)

    def metrics(self, policy: str | None = None) -> Frame:
        """The training logs: a row per logged step, with all that was logged. policy: only this one's."""
        chosen = self.policies if policy is None else {policy: self._policy(policy)}
        columns = list(dict.fromkeys(key for one in chosen.values() for line in one.lines for key in line))
        rows: list[list[Cell]] = [
            [name, *(line.get(key) for key in columns)] for name, one in chosen.items() for line in one.lines
        ]
        return as_frame(["policy", *columns], rows)

    def responses(self, policy: str = REFERENCE) -> list[Response]:
        """The policy's responses to held-out prompts; of ``"sft"``, those of the model that policies started from."""
        if policy == REFERENCE and policy not in self.policies:
            return next((one.before for one in self.policies.values() if one.before), [])
        return self._policy(policy).responses

    def table(self, finding: str) -> Frame:
        """The table of an evaluation or an analysis."""
        check_name(finding, self.findings, f"evaluation or analysis of {self.path}")
        found = self.findings[finding]
        return as_frame(found.columns, found.rows)

    @cached_property
    def models(self) -> FinishedRun:
        """What loads the run's models and tokenizer: ``run.models.load("sum")``. It is strict: it needs the manifest
        and a finished SFT model.
        """
        return FinishedRun(self.path)

    def report(self, path: str | Path = "report.html") -> Path:
        """Write the run's page, as `wpr report` does."""
        write_report([self.path], Path(path))
        return Path(path)

    def _policy(self, name: str) -> Policy:
        check_name(name, self.policies, f"policy of {self.path}")
        return self.policies[name]

    def _found(self, kind: str) -> dict[str, Finding]:
        def damaged(folder: Path, why: str) -> None:
            self._problems.add(folder, why.removeprefix(f"{folder / 'finding.json'} "), "it is left out")

        return {finding.name: finding for finding in found_in(self.path, damaged, [kind])}

    def __repr__(self) -> str:
        policies = ", ".join(
            name if (status := self.stages.get(f"ppo/{name}")) == "done" else f"{name} ({status or 'unknown'})"
            for name in self.policies
        )
        wrong = f", {len(self.problems)} problems" if self.problems else ""
        return f"<run {self.name} in {self.path}: policies {policies or 'none'}{wrong}>"

    def _repr_html_(self) -> str:
        items = (tag("li", str(problem)) for problem in self.problems)
        return join(
            paragraph(tag("b", self.name), f" in {self.path}. {as_text(self.recipe.get('description'))}"),
            headline(self._data).as_html(),
            tag("ul", *items) if self.problems else None,
        )
