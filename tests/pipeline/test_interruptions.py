"""`wpr run` killed in every stage and run again: the same models and metrics as a run that nobody disturbed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wpr.pipeline.training import model_metrics, read_metrics

SMALL = [
    "prepare.options.pairs=400",
    "sft.num_train_epochs=6",
    "sft.save_steps=4",
    "sft.logging_steps=3",  # not the saving's rhythm: what is gathered between logs must survive too
    "reward.num_train_epochs=6",
    "reward.save_steps=4",
    "reward.logging_steps=3",
    "ppo.max_steps=15",
    "ppo.save_steps=2",
    "ppo.logging_steps=3",
    "ppo.batch_size=16",
    "ppo.num_minibatches=2",
    "evaluation.prompts=12",
]
STAGES = ("sft", "reward", "ppo/rkl", "ppo/semantic")
TRL = [
    *SMALL,
    "prepare.options.pairs=120",  # prompts for three rollouts: the fourth is of another epoch
    "sft.max_steps=2",
    "reward.max_steps=2",
    "policies.rkl.trainer=grpo",
    "policies.semantic.trainer=rloo",
    "ppo.responses_per_prompt=4",
    "ppo.ppo_epochs=2",  # four steps per rollout, so that some checkpoints fall into the middle of one
    "ppo.normalize_rewards=true",
]


def start(output: Path, settings: list[str] = SMALL) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "wpr", "run", "tiny", f"output={output}", *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def finish(output: Path, settings: list[str] = SMALL) -> str:
    process = start(output, settings)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    return stdout


def kill_in(output: Path, stage: str, step: int, settings: list[str] = SMALL) -> None:
    """Start the run and kill it once ``stage`` has logged ``step``, with a second or more of the stage to go: a busy
    machine is slow to pass the line on.
    """
    process = start(output, settings)
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith(f"{stage} step {step}/"):
            process.send_signal(signal.SIGKILL)
            break
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, "".join(seen)


def facts(output: Path) -> dict[str, Any]:
    """All that must not depend on interruptions: results, metrics, weights, responses."""
    manifest = json.loads((output / "manifest.json").read_text())
    found: dict[str, Any] = {}
    for stage in STAGES:
        assert manifest["stages"][stage]["status"] == "done"
        folder = output / stage
        weights = (folder / "model" / "model.safetensors").read_bytes()
        found[stage] = {
            "results": manifest["stages"][stage]["results"],
            "weights": hashlib.sha256(weights).hexdigest(),
            "metrics": [(row["step"], model_metrics(row)) for row in read_metrics(folder / "metrics.jsonl")],
        }
        if stage.startswith("ppo"):
            found[stage]["responses"] = (folder / "responses.jsonl").read_text()
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(output)
    return output


MOMENTS = {"sft": 9, "reward": 6, "ppo/rkl": 6, "ppo/semantic": 3}


@pytest.mark.parametrize(
    "stages", [("reward", "ppo/semantic"), pytest.param(tuple(MOMENTS), marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_killed_in_stages(undisturbed: Path, tmp_path: Path, stages: tuple[str, ...]) -> None:
    output = tmp_path / "run"
    for stage in stages:
        step = MOMENTS[stage]
        kill_in(output, stage, step)
        statuses = {name: record["status"] for name, record in manifest_of(output)["stages"].items()}
        assert statuses[stage] == "running"
    finish(output)
    assert_alike(output, undisturbed)


@pytest.mark.slow  # tests/trl/test_processes.py kills one in the suite
def test_policies_of_trl_killed(tmp_path: Path) -> None:
    """GRPO, then RLOO, in the middle of a rollout whose completions are used up later."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(whole, TRL)
    kill_in(killed, "ppo/rkl", 6, TRL)
    kill_in(killed, "ppo/semantic", 12, TRL)
    finish(killed, TRL)
    assert_alike(killed, whole)


def assert_alike(output: Path, undisturbed: Path) -> None:
    disturbed, expected = facts(output), facts(undisturbed)
    for stage in STAGES:
        for subject, value in expected[stage].items():
            assert disturbed[stage][subject] == value, f"{stage}: {subject}"
    assert expected["sft"]["metrics"], "nothing was compared"


def manifest_of(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "manifest.json").read_text())
    return found


def test_done_stages_are_skipped(undisturbed: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("model.safetensors")}
    seconds = {name: record["seconds"] for name, record in manifest_of(undisturbed)["stages"].items()}
    finish(undisturbed)
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("model.safetensors")} == before
    assert {name: record["seconds"] for name, record in manifest_of(undisturbed)["stages"].items()} == seconds
