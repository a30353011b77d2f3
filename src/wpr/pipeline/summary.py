"""What a finished run tells: a table a stage, and where its models are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from wpr.pipeline.folder import write_atomically
from wpr.pipeline.run import results_of
from wpr.pipeline.stage import is_main_process
from wpr.pipeline.sweep import as_csv, comparison
from wpr.pipeline.training import read_metrics
from wpr.report.curves import policy_curves


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
    rows = comparison(results_of(folder))
    if rows:
        write_atomically(folder / "policies.csv", as_csv(rows))
        policies = [str(row["policy"]) for row in rows]
        metrics = {name: read_metrics(folder / "ppo" / name / "metrics.jsonl") for name in policies}
        write_atomically(folder / "curves.svg", policy_curves(metrics))
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = Table(title="policies on held-out prompts")
        for name in names:
            table.add_column(name, no_wrap=name == "policy", overflow="fold")
        for row in rows:
            table.add_row(*(_shown(row.get(name, "")) for name in names))
        console.print(table)
    console.print(f"everything is in {folder}", soft_wrap=True)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
