"""What a person sees of a run, through a real rich console."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.ppo import tiny
from wpr.ppo.console import ConsoleCallback


def shown(folder: Path, terminal: bool, **changes) -> str:
    trainer = tiny.trainer(folder, max_steps=3, log_completions=2, log_completions_steps=1, **changes)
    trainer.remove_callback(trainer.console)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    trainer.console = ConsoleCallback(console, bar=not trainer.args.disable_tqdm)
    trainer.add_callback(trainer.console)
    trainer.train()
    return console.file.getvalue()


def test_plain_lines_outside_a_terminal(tmp_path: Path) -> None:
    lines = shown(tmp_path, terminal=False, disable_tqdm=False).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["ppo step 1/3", "ppo step 2/3", "ppo step 3/3", "ppo step 3/3"]
    assert "score " in lines[0]
    assert "kl " in lines[0]
    assert "\x1b" not in "".join(lines)


def test_a_bar_and_a_table_in_a_terminal(tmp_path: Path) -> None:
    text = shown(tmp_path, terminal=True, disable_tqdm=False)
    assert "3/3" in text
    assert "responses at step 2" in text
    assert "ppo step 1/3" not in text


def test_no_bar_if_it_is_switched_off(tmp_path: Path) -> None:
    text = shown(tmp_path, terminal=True, disable_tqdm=True)
    assert "ppo step 1/3" in text
    assert "━━" in text  # the table stays


def test_brackets_in_texts_are_no_markup(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    row = {"prompt": "[INST] a [/INST]", "response": "list[int] [/b]", "score": 1.0, "penalty": 0.0, "kl": 0.0}
    ConsoleCallback(console).show([row, {**row, "prompt": [{"role": "user", "content": "[/x]"}]}], 3)
    assert "[INST] a [/INST]" in console.file.getvalue()
    assert "list[int] [/b]" in console.file.getvalue()


TRACKED = """
import json, sys
from tests.ppo import tiny
trainer = tiny.trainer(sys.argv[1], max_steps=2, log_completions=2, log_completions_steps=1, logging_steps=1,
                       report_to=[sys.argv[2]], project="wpr-test", run_name="tiny", trackio_static_space_id=False)
trainer.train()
if sys.argv[2] == "trackio":
    import trackio.sqlite_storage
    print("LOGS", json.dumps(trackio.sqlite_storage.SQLiteStorage.get_logs("wpr-test", "tiny"), default=str))
"""
COLUMNS = ["step", "prompt", "completion", "score", "penalty", "kl", "advantage", "finished"]


def tracked(folder: Path, tracker: str) -> str:
    """A run that reports to a tracker which keeps everything on this machine; what it printed."""
    places = {"TRACKIO_DIR": str(folder / "trackio"), "WANDB_DIR": str(folder), "WANDB_MODE": "offline"}
    finished = subprocess.run(
        [sys.executable, "-c", TRACKED, str(folder / "ppo"), tracker], capture_output=True, text=True,
        env=os.environ | places | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def expected(folder: Path, step: int) -> list[list[Any]]:
    path = folder / "ppo" / "completions" / f"step-{step:06d}.jsonl"
    return [list(json.loads(line).values()) for line in path.read_text().splitlines()]


@pytest.mark.needs("trackio")
def test_completions_in_trackio(tmp_path: Path) -> None:
    """Read back from Trackio's own database."""
    printed = tracked(tmp_path, "trackio")
    logs = json.loads(next(line for line in printed.splitlines() if line.startswith("LOGS ")).removeprefix("LOGS "))
    tables = [entry["completions"]["_value"] for entry in logs if "completions" in entry]
    assert [list(row) for row in tables[0]] == [COLUMNS] * 2
    assert [[list(row.values()) for row in table] for table in tables] == [expected(tmp_path, step) for step in (0, 1)]
    assert any("train/kl" in entry for entry in logs)


@pytest.mark.needs("wandb")
def test_completions_in_weights_and_biases(tmp_path: Path) -> None:
    """Offline: the tables lie in the run's folder."""
    tracked(tmp_path, "wandb")
    files = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/completions_*.table.json"))
    tables = [json.loads(path.read_text()) for path in files]
    assert [table["columns"] for table in tables] == [COLUMNS] * 2
    assert sorted(table["data"] for table in tables) == sorted(expected(tmp_path, step) for step in (0, 1))
