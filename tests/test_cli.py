"""The `wpr` command as users meet it: help, completion, exit codes, signals, stages one by one, changed settings."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests.pipeline.command import SMALL, Here, content, environment, manifest, results, start, statuses
from wpr.cli import app

COMMANDS = [
    "run",
    "quickstart",
    "sft",
    "reward",
    "ppo",
    "sweep",
    "recipes",
    "report",
    "judge",
    "doctor",
    "advise",
    "geometry build",
    "geometry show",
    "generate",
    "mt-bench",
    "pass-at-1",
    "push",
    "reproduce",
]


@pytest.fixture
def owned(whole_run: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    shutil.copytree(whole_run, tmp_path / "run")
    return tmp_path / "run"


# Words.


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(here: Here, command: str) -> None:
    finished = here.succeeds(*command.split(), "--help")
    assert "Usage: wpr " + command in finished.stdout
    assert "Example" in finished.stdout
    assert len(re.findall(rf"\bwpr {command}\b", finished.stdout)) >= 2  # usage, and an example of it


def test_help_without_a_command_and_version(here: Here) -> None:
    finished = here("--help")
    assert finished.code == 0
    for command in COMMANDS:
        assert command.split()[0] in finished.stdout
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", here.succeeds("--version").stdout)


def test_every_option_is_described() -> None:
    def described(command: Any, path: str) -> int:
        if hasattr(command, "commands"):
            return sum(described(part, f"{path} {name}") for name, part in command.commands.items())
        for parameter in command.params:
            words = (getattr(parameter, "help", None) or "").split()
            assert len(words) > 1, f"{path} {parameter.name} is not described"
            assert words[0] not in ("Of", "As", "At", "For", "No"), f"{path} {parameter.name}: a verb or a noun first"
        return len(command.params)

    assert described(typer.main.get_command(app), "wpr") > 100


@pytest.mark.parametrize("command", ["judge", "mt-bench"])
def test_judges_are_named_alike(here: Here, command: str) -> None:
    message = here.succeeds(command, "--help").stdout
    judge = message[message.index("─ The judge ─") : message.index("─ Requests to a server ─")]
    for option in ("--judge", "-j", "--base-url", "--function", "--key-variable", "--set"):
        assert option in judge


@pytest.mark.parametrize("arguments", [["frob"], ["run"], ["run", "tiny", "--frob"], ["geometry", "show"]])
def test_usage_errors(here: Here, arguments: list[str]) -> None:
    finished = here(*arguments)
    assert finished.code == 2
    assert "Usage: wpr" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_completion_of_recipe_names() -> None:
    wpr = Path(sys.executable).with_name("wpr")
    if not wpr.exists():
        pytest.skip(f"there is no {wpr}; install the package to test its script")
    for words, index, expected in (
        ("wpr run t", 2, ["tiny", "tldr-gemma-2b", "tldr-gemma-7b"]),
        ("wpr re", 1, ["recipes", "report", "reproduce", "reward"]),
    ):
        asked = environment(_WPR_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(index))
        found = subprocess.run([wpr], env=asked, capture_output=True, text=True)
        assert sorted(found.stdout.split()) == expected, found.stderr


def test_recipes_are_listed_and_shown(here: Here) -> None:
    assert "tldr-gemma-2b" in here.succeeds("recipes").stdout
    shown = here.succeeds("recipes", "tiny").stdout
    assert shown.startswith("# The whole pipeline")
    assert "\nname: tiny\n" in shown


def test_a_shown_recipe_can_be_run_as_a_file(here: Here, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(here.succeeds("recipes", "tiny").stdout)
    plans = [here.succeeds("run", name, "--dry-run").stdout for name in ("tiny", str(tmp_path / "mine.yaml"))]
    assert plans[0] == plans[1]


def test_doctor(here: Here) -> None:
    message = here.succeeds("doctor", "tiny").stdout
    for part in ("torch", "transformers", "code sandbox", "made by the prepare stage"):
        assert part in message
    assert "billion parameters" in here.succeeds("doctor", "tldr-gemma-7b").stdout


# A run.


def test_output_in_files_is_clean(whole_run: Path) -> None:
    stdout, stderr = ((whole_run.parent / name).read_text() for name in ("stdout", "stderr"))
    for noise in ("\r", "it/s", "examples/s", "Warning", "WARNING", "LOAD REPORT", "\x1b", "Traceback"):
        assert noise not in stdout + stderr
    assert stdout.startswith("sft: held-out perplexity ")
    assert stdout.endswith("everything is in run\n")
    assert "…" not in stdout, "a table was cut to the width of a terminal"
    for line in stderr.splitlines():
        assert re.match(r"(prepare|sft|reward|ppo/rkl)(:| step )", line), line


def test_log_has_commands_and_what_libraries_said(whole_run: Path) -> None:
    log = (whole_run / "run.log").read_text()
    assert "INFO wpr.pipeline.run: wpr run tiny" in log
    assert "sft: " in log
    assert "LOAD REPORT" in log  # transformers': the reward model's head is new
    assert [command["command"].split()[:3] for command in manifest(whole_run)["commands"]] == [["wpr", "run", "tiny"]]


def test_dry_run_starts_and_writes_nothing(here: Here, tmp_path: Path) -> None:
    here.monkeypatch.chdir(tmp_path)
    message = here.succeeds("run", "tiny", *SMALL, "--dry-run").stdout
    assert "to do" in message
    assert "max_steps: 2" in message
    assert list(tmp_path.iterdir()) == []


def test_signals_and_two_runs_at_once(here: Here, tmp_path: Path) -> None:
    """Ctrl-C in SFT, a kill in PPO, a second run meanwhile; the same command then goes on to the end.

    The stages are long enough to be still under way when a busy machine gets round to the signal.
    """
    output = tmp_path / "run"
    longer = ("sft.max_steps=60", "sft.save_steps=5", "ppo.max_steps=20", "ppo.save_steps=5")
    command = ("run", "tiny", *SMALL, *longer, f"output={output}")
    for number, word, line, stage in (
        (signal.SIGINT, "Interrupted", "sft step 2/", "sft"),
        (signal.SIGTERM, "Terminated", "ppo/rkl step 1/", "ppo/rkl"),
    ):
        process = start(*command, cwd=tmp_path)
        assert process.stderr is not None
        seen = ""
        for text in process.stderr:
            seen += text
            if text.startswith(line):
                break
        if number == signal.SIGTERM:
            process.send_signal(signal.SIGSTOP)  # it must still be there when the second one comes
            second = here(*command)
            assert second.code == 2
            assert f"another process is writing to {output}; wait for it" in second.error
            process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 128 + number, seen + rest
        assert f"\n{word}. What is complete is kept: the same command goes on from the last checkpoint.\n" in rest
        assert "Traceback" not in seen + rest
        record = manifest(output)["stages"][stage]
        assert (record["status"], record["error"]) == ("interrupted", None)
    finished = here.succeeds(*command)
    assert "sft: done before" in finished.stderr
    assert "ppo/rkl: going on" in finished.stderr
    assert [results(output)[stage]["steps"] for stage in ("sft", "ppo/rkl")] == [60, 20]


def test_a_second_run_of_the_same_seed_is_the_same_and_another_is_not(
    here: Here, whole_run: Path, tmp_path: Path
) -> None:
    here.monkeypatch.chdir(tmp_path)  # paths are relative to where the command is run
    here.succeeds("run", "tiny", *SMALL, "output=again")
    assert results(tmp_path / "again") == results(whole_run)
    here.succeeds("run", "tiny", *SMALL, "output=other", "seed=1")
    assert results(tmp_path / "other")["ppo/rkl"]["after"] != results(whole_run)["ppo/rkl"]["after"]
    assert results(tmp_path / "other")["sft"]["after"] != results(whole_run)["sft"]["after"]


# Stages one by one, and changed settings.


def test_stages_one_by_one(here: Here, whole_run: Path, tmp_path: Path) -> None:
    settings = ("tiny", *SMALL, f"output={tmp_path / 'run'}")
    finished = here("ppo", *settings)
    assert finished.code == 2
    assert "ppo/rkl needs sft, which" in finished.error
    assert "run it first (`wpr sft ...`)" in finished.error
    here.succeeds("sft", *settings)
    assert statuses(tmp_path / "run") == {"prepare": "done", "sft": "done"}
    finished = here("ppo", *settings)
    assert finished.code == 2
    assert "ppo/rkl needs reward, which" in finished.error
    here.succeeds("reward", *settings)
    here.succeeds("ppo", *settings)
    assert results(tmp_path / "run") == results(whole_run)


def test_changed_settings_are_refused_and_leave_the_folder_as_it_was(here: Here, owned: Path) -> None:
    before = content(owned)
    for change, stage, message in (
        ("ppo.beta=0.2", "ppo/rkl", "ppo.beta: 0.05 -> 0.2"),
        ("sft.learning_rate=1e-3", "sft", "sft.learning_rate: 0.005 -> 0.001"),
        ("seed=3", "prepare", "seed: 0 -> 3"),
        ("data.max_prompt_tokens=60", "sft", "data.settings.max_prompt_tokens: 64 -> 60"),
    ):
        finished = here("run", "tiny", *SMALL, f"output={owned}", change)
        assert finished.code == 2
        assert f"{stage} in {owned} was made by other settings: {message}" in finished.error
        assert "--on-change restart" in finished.error
        assert content(owned) == before


def test_settings_without_effect_on_the_outcome_may_change(here: Here, owned: Path) -> None:
    finished = here.succeeds("run", "tiny", *SMALL, f"output={owned}", "sft.logging_steps=7", "ppo.save_total_limit=1")
    assert finished.stderr.count("done before") == 4


def test_changed_settings_kept(here: Here, owned: Path) -> None:
    weights = (owned / "ppo/rkl/model/model.safetensors").read_bytes()
    finished = here.succeeds("run", "tiny", *SMALL, f"output={owned}", "ppo.beta=0.2", "--on-change", "keep")
    assert "ppo/rkl: kept, although its settings have changed (ppo.beta: 0.05 -> 0.2)" in finished.stderr
    assert (owned / "ppo/rkl/model/model.safetensors").read_bytes() == weights


def test_changed_settings_restart_the_stage_and_those_that_build_on_it(here: Here, owned: Path) -> None:
    old = (owned / "reward/model/model.safetensors").read_bytes()
    finished = here.succeeds(
        "run", "tiny", *SMALL, f"output={owned}", "reward.learning_rate=1e-4", "--on-change", "restart"
    )
    assert "sft: done before" in finished.stderr
    moved = sorted(path.name.rsplit("-", 2)[0] for path in (owned / "old").iterdir())
    assert moved == ["ppo-rkl", "reward"]
    kept = next((owned / "old").glob("reward-*")) / "model" / "model.safetensors"
    assert kept.read_bytes() == old != (owned / "reward/model/model.safetensors").read_bytes()
    assert set(statuses(owned).values()) == {"done"}
    assert manifest(owned)["recipe"]["reward"]["learning_rate"] == 1e-4


def test_sweep(here: Here, owned: Path) -> None:
    grid = ("--grid", "ppo.beta=0.1,0.3")
    settings = ("tiny", *SMALL, f"output={owned}", "--policy", "rkl", *grid)
    finished = here.succeeds("sweep", *settings)
    assert [line.split(",")[0] for line in (owned / "policies.csv").read_text().splitlines()] == [
        "policy", "rkl", "rkl+beta=0.1", "rkl+beta=0.3",
    ]  # fmt: skip
    assert "rkl+beta=0.3" in finished.stdout
    found = manifest(owned)["stages"]
    assert [found[f"ppo/rkl+beta={beta}"]["inputs"]["ppo"]["beta"] for beta in (0.1, 0.3)] == [0.1, 0.3]
    assert here.succeeds("sweep", *settings).stderr.count("done before") == 5


def test_geometry(here: Here, whole_run: Path, tmp_path: Path) -> None:
    model, file = str(whole_run / "sft" / "model"), str(tmp_path / "geometry.safetensors")
    assert f"written to {file}" in here.succeeds("geometry", "build", model, "-o", file).stdout.replace("\n", "")
    message = here.succeeds("geometry", "show", model, "-f", file, "-w", "red").stdout
    assert "euclidean cost" in message
    assert "\nred: " in message
    for arguments, part in (
        (
            ["build", model, "--neighbours", "4000", "-o", file],
            "--neighbours=4000 exceeds the other tokens of the vocabulary",
        ),
        (["build", model, "--metric", "manhattan", "-o", file], "--metric='manhattan' must be euclidean or cosine"),
        (["build", model, "--scale", "big", "-o", file], "--scale='big' must be a number or median-nn or none"),
    ):
        finished = here("geometry", *arguments)
        assert finished.code == 2
        assert part in finished.error
