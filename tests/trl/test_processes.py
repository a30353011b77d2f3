"""Several processes: the same weights as one; killed and resumed: the same as uninterrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ppo.test_processes import ROOT, launch, zero
from tests.trl.run import policy, train

PROGRAM = "tests.trl.run"
BOTH = [("grpo", "reward"), ("grpo", "loss"), ("rloo", "reward"), ("rloo", "loss"), ("distillation", "loss")]
SETTINGS = {"max_steps": 4, "num_generations": 8, "max_grad_norm": 100.0, "learning_rate": 3e-3}


def arguments(folder: Path, algorithm: str, form: str, *extra: str, **changes: Any) -> list[str]:
    settings = {"per_device_train_batch_size": 8, **SETTINGS, **changes}
    if algorithm == "distillation":  # one completion a prompt
        del settings["num_generations"]
        settings["gradient_checkpointing"] = True
    return [str(folder), algorithm, form, "--settings", json.dumps(settings), *extra]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def rows(folder: Path) -> list[dict[str, float]]:
    history = json.loads((folder / "final_state.json").read_text())["log_history"]
    own = ("regularizer/", "reward", "loss", "entropy", "completions/")
    kept = [{k: v for k, v in row.items() if k.startswith(own)} for row in history if "loss" in row]
    kept[-1].update({k: v for row in history for k, v in row.items() if k.startswith("monitor/")})
    return kept


def assert_alike(one: Path, other: Path, tolerance: float) -> None:
    found, expected = rows(one), rows(other)
    assert len(found) == len(expected) == 4
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, abs=tolerance)
    moved = policy(numbered=True).state_dict()
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).abs().max() < tolerance, name
    assert max(float((a[name] - moved[name]).abs().max()) for name in a) > 50 * tolerance
    assert expected[-1]["regularizer/divergence"] > 0.01


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process: this one."""
    folder = tmp_path_factory.mktemp("single")
    for algorithm, form in BOTH:
        train(arguments(folder / f"{algorithm}-{form}", algorithm, form, "--numbered"))
    return folder


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of half the batch each, so that every group is spread over both."""
    folder = tmp_path_factory.mktemp("double")
    half = {"per_device_train_batch_size": 4}
    launch(*(arguments(folder / f"{a}-{form}", a, form, "--numbered", **half) for a, form in BOTH), program=PROGRAM)
    return folder


@pytest.mark.parametrize(("algorithm", "form"), BOTH)
def test_two_processes_are_one(algorithm: str, form: str, single: Path, double: Path) -> None:
    assert_alike(double / f"{algorithm}-{form}", single / f"{algorithm}-{form}", 1e-4)


def test_zero(single: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    settings = {"per_device_train_batch_size": 4, "deepspeed": zero(2)}
    kinds = BOTH[:2]
    launch(
        *(arguments(tmp_path / f"{a}-{form}", a, form, "--numbered", **settings) for a, form in kinds), program=PROGRAM
    )
    for algorithm, form in kinds:
        assert_alike(tmp_path / f"{algorithm}-{form}", single / f"{algorithm}-{form}", 1e-4)


def start(folder: Path, algorithm: str, form: str, *extra: str) -> subprocess.Popen[str]:
    saving = {"save_strategy": "steps", "save_steps": 2, "num_iterations": 2, "max_steps": 7, "top_k": 0}
    return subprocess.Popen(
        [sys.executable, "-m", PROGRAM, *arguments(folder, algorithm, form, *extra, **saving)], cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


@pytest.mark.parametrize(
    ("algorithm", "form"), [("grpo", "reward"), pytest.param("rloo", "loss", marks=pytest.mark.slow)]
)
def test_killed_and_resumed(algorithm: str, form: str, tmp_path: Path) -> None:
    """kill -9 after a checkpoint was written; its reference is the model before training, not the checkpoint's."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(killed, algorithm, form, "--pause", "0.5")
    while not (killed / "checkpoint-4" / "trainer_state.json").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (killed / "final_state.json").exists()
    finish(start(whole, algorithm, form))
    finish(start(killed, algorithm, form, "--resume"))
    assert rows(whole) == rows(killed)
    assert len(rows(whole)) == 7
    one, other = weights(whole), weights(killed)
    assert all(torch.equal(one[name], other[name]) for name in one)
