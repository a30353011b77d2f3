"""What a person sees of a run, through a real rich console."""

from __future__ import annotations

import io
from pathlib import Path

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
