"""What a finished run tells: a table a stage, and where its models are."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from wpr.atomic_io import write_atomically
from wpr.errors import UnavailableError
from wpr.pipeline.run import results_of
from wpr.pipeline.stage import is_main_process
from wpr.pipeline.sweep import as_csv, comparison
from wpr.report.comparisons import MEASURES, against_each_other, against_sft
from wpr.report.figures import Plots
from wpr.report.runs import read_one
from wpr.report.section import ReportData
from wpr.runs.tolerant import Problems, RunRecord

FEW = 4
"""Policies that get a column each."""

MOST_PAIRS = 15
"""With more comparisons than these, only those against SFT are printed."""


def show_results(results: dict[str, dict[str, Any]], folder: Path, console: Console) -> None:
    """Print what was measured; the policies' comparison, of all that the folder has, also goes to ``policies.csv``,
    and their training curves to ``curves.svg``.
    """
    if not is_main_process():
        return
    if "sft" in results and "after" in results["sft"]:
        before, after = results["sft"]["before"], results["sft"]["after"]
        console.print(f"sft: held-out perplexity {before['perplexity']:.4g} -> {after['perplexity']:.4g}")
    if "reward" in results and "held_out" in results["reward"]:
        held_out = results["reward"]["held_out"]
        console.print(
            f"reward: held-out accuracy {held_out['accuracy']:.3f} ± {held_out['accuracy_standard_error']:.3f} over "
            f"{held_out['pairs']} pairs, margin {held_out['margin']:.3f}, calibration error "
            f"{held_out['calibration_error']:.3f}",
            soft_wrap=True,
        )
    done = results_of(folder)
    if any(stage.startswith("ppo/") for stage in done):
        problems = Problems()
        run = read_one(folder, problems)
        assert run is not None  # it has results
        # Without what cannot be compared.
        own = {f"ppo/{policy.own_name}": policy.results for policy in run.policies}
        rows = comparison({stage: own.get(stage, found) for stage, found in done.items()}, run.monitors)
        write_atomically(folder / "policies.csv", as_csv(rows))
        done_ones = [policy for policy in run.policies if f"ppo/{policy.own_name}" in done]
        with suppress(UnavailableError):  # no log is left
            Plots(ReportData([dataclasses.replace(run, policies=done_ones)], problems), {}).curves().save(
                folder / "curves.svg"
            )
        mixed = [problem for problem in problems.of("manifest.json") if "not the same score" in problem.what]
        for problem in (*problems.of("metrics.jsonl"), *mixed):
            console.print(f"Note: {problem}", soft_wrap=True, markup=False)
        console.print(_policy_table(rows))
        _show_win_rates(run, console)
    console.print(f"everything is in {folder}", soft_wrap=True)


def _policy_table(rows: list[dict[str, Any]]) -> Table:
    """One row per policy; where there are few, one column per policy, which a narrow terminal can show too."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "policy"]
    if len(rows) <= FEW:
        table = Table("", *(str(row["policy"]) for row in rows), title="policies on held-out prompts")
        for name in names:
            table.add_row(name, *(_shown(row.get(name, "")) for row in rows))
        return table
    table = Table(title="policies on held-out prompts")
    for name in ("policy", *names):
        table.add_column(name, no_wrap=name == "policy", overflow="fold")
    for row in rows:
        table.add_row(*(_shown(row.get(name, "")) for name in ("policy", *names)))
    return table


def _show_win_rates(run: RunRecord, console: Console) -> None:
    """Who wins against whom on the held-out prompts, by gold where there is gold, else by the score; all of it also
    goes to ``win_rates.csv``.
    """
    found = {name: [*against_sft(run.policies, name), *against_each_other(run.policies, name)] for name in MEASURES}
    rows = [
        {"by": name, "policy": one.ours.name, "against": one.opponent, **dataclasses.asdict(one.result)}
        for name, comparisons in found.items()
        for one in comparisons
    ]
    if not rows:
        return
    write_atomically(run.path / "win_rates.csv", as_csv(rows))
    measure = rows[0]["by"]
    shown = found[measure]
    if len(shown) > MOST_PAIRS:
        shown = [one for one in shown if one.theirs is None]
    table = Table("policy", "against", "win rate", "95% interval", title=f"win rates on held-out prompts, by {measure}")
    for one in shown:
        result = one.result
        table.add_row(one.ours.name, one.opponent, f"{result.rate:.3f}", f"{result.low:.3f} to {result.high:.3f}")
    console.print(table)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
