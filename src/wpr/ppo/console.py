"""How a run shows itself: a rich progress bar in a terminal, plain lines elsewhere, and sampled responses as a
table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

SHOWN = (
    "score", "kl", "divergence", "entropy", "response_length", "eos_fraction", "beta", "loss", "approx_kl", "accuracy",
    "margin", "eval_loss", "eval_score", "eval_kl", "eval_accuracy",
)  # fmt: skip
"""Metrics beside the bar, and on plain lines; the rest is in the log history and the trackers."""


_CELL = str | int | float | None
"""What a tracker's table shows as it is; a conversation is written as JSON."""


class ConsoleCallback(TrainerCallback):  # type: ignore[misc]
    """Progress of a run, on the main process."""

    def __init__(self, console: Console | None = None, bar: bool = True, title: str = "ppo") -> None:
        self.title = title
        self.console = console or Console(stderr=True, force_jupyter=False)  # in a notebook plain lines too
        self.bar = bar and self.console.is_terminal
        self.progress: Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the bar at the step that the run starts or resumes from."""
        if not state.is_world_process_zero or not self.bar:
            return
        self.progress = Progress(
            TextColumn(self.title),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=self.console,
        )
        self.progress.start()
        self.task = self.progress.add_task(self.title, total=state.max_steps, completed=state.global_step, metrics="")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if self.progress is not None:
            self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Show the metrics."""
        if not state.is_world_process_zero or not logs:
            return
        shown = "  ".join(f"{name} {logs[name]:.4g}" for name in SHOWN if isinstance(logs.get(name), int | float))
        if not shown:
            shown = "  ".join(f"{name} {value:.4g}" for name, value in logs.items() if isinstance(value, int | float))
        if self.progress is not None:
            self.progress.update(self.task, metrics=shown)
        else:
            self.console.print(
                f"{self.title} step {state.global_step}/{state.max_steps}  {shown}", soft_wrap=True, highlight=False
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the bar as it stands."""
        self.close()

    def close(self) -> None:
        """Stop the bar, also when training ends in an error."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

    def show(self, rows: list[dict[str, Any]], step: int) -> None:
        """Responses as a table, above the bar."""
        if not self.console.is_terminal:
            return
        table = Table(title=f"responses at step {step}", show_lines=True)
        for name in ("prompt", "response", "score", "penalty", "kl"):
            table.add_column(name, overflow="fold")
        for row in rows:
            text = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1].get("content", "")
            numbers = ["" if row[name] is None else f"{row[name]:.3g}" for name in ("score", "penalty", "kl")]
            table.add_row(Text(text[-300:]), Text(row["response"][:500]), *numbers)  # brackets are no markup
        (self.progress.console if self.progress is not None else self.console).print(table)


def write_completions(rows: list[dict[str, Any]], folder: Path, step: int) -> Path:
    """Responses as JSON lines in ``completions/step-<step>.jsonl``; a resumed run writes the same file again."""
    folder = folder / "completions"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows), encoding="utf-8")
    return path


def report_completions(rows: list[dict[str, Any]], report_to: Sequence[str]) -> None:
    """Send sampled responses to those of the trackers ``report_to`` that take tables, Weights & Biases and Trackio.

    As TRL's trainers do: a table ``completions`` with its columns ``step``, ``prompt``, ``completion`` and
    ``advantage``; in place of a column per reward function it has all that the rows have.
    """
    columns = {"response": "completion"}
    names = [columns.get(name, name) for name in rows[0]]
    data = [[value if isinstance(value, _CELL) else json.dumps(value, ensure_ascii=False, default=str)
             for value in row.values()] for row in rows]  # fmt: skip
    if "wandb" in report_to:
        import wandb

        if wandb.run is not None:
            # With the step's metrics, which come later and count its steps.
            wandb.log({"completions": wandb.Table(columns=names, data=data)}, commit=False)
    if "trackio" in report_to:
        import trackio

        trackio.log({"completions": trackio.Table(columns=names, data=data)})
