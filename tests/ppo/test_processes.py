"""Several processes: the same numbers as one, and DeepSpeed's sharding with saving and resuming."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.ppo.run import train, wide_policy

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "max_steps": 5,
    "num_minibatches": 2,
    "max_grad_norm": 100.0,
}  # two rollouts and a half; DeepSpeed's clip is another one

EVALUATION = {"eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 2}


def arguments(folder: Path, *extra: str, **settings: Any) -> list[str]:
    """A run's part of the command line."""
    return [str(folder), "--settings", json.dumps({**SETTINGS, **settings}), *extra]


def launch(*runs: list[str], program: str = "tests.ppo.run") -> None:
    """Two processes, with torchrun's module, on a free port; what they run, one after the other."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", program, *runs[0], *(part for each in runs[1:] for part in ("+", *each))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def metrics(folder: Path) -> list[dict[str, float]]:
    rows = json.loads((folder / "final_state.json").read_text())["log_history"]
    timing = ("seconds_", "peak_memory", "solver_iterations", "policy_grad_norm", "critic_grad_norm")
    kept = [{k: v for k, v in row.items() if not k.startswith(timing)} for row in rows if "loss" in row]
    kept[-1].update({k: v for row in rows for k, v in row.items() if k.startswith("eval_")})
    return kept


def assert_close(one: list[dict[str, float]], other: list[dict[str, float]], tolerance: float) -> None:
    assert len(one) == len(other) == 5
    for row, expected in zip(one, other, strict=True):
        assert row.keys() == expected.keys()
        for name in row:
            assert row[name] == pytest.approx(expected[name], abs=tolerance), (name, row["step"])


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """One process: this one."""
    folder = tmp_path_factory.mktemp("single")
    train(arguments(folder, per_device_train_batch_size=4, **EVALUATION))
    return metrics(folder)


LATER = {
    "per_device_train_batch_size": 4, "num_minibatches": 1, "save_strategy": "steps", "save_steps": 8, "max_steps": 10,
}  # fmt: skip


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of what two processes ran in one launch, for one test each."""
    folder = tmp_path_factory.mktemp("launched")
    launch(
        arguments(folder / "two", per_device_train_batch_size=2, **EVALUATION),
        arguments(folder / "later", "--prompts", "24", **LATER),
        arguments(folder / "part", "--prompts", "24", "--resume-from", str(folder / "later" / "checkpoint-8"), **LATER),
        arguments(folder / "silent", "--silent-rank", "1", per_device_train_batch_size=2, max_steps=2),
        arguments(folder / "sharded", "--sharded-draw"),
    )
    return folder


def test_two_processes_are_one(single: list[dict[str, float]], launched: Path) -> None:
    assert_close(metrics(launched / "two"), single, 1e-4)
    assert (
        "eval_score" in single[-1]
    )  # of five prompts: the last batch of two processes is filled up with prompts twice
    assert single[-1]["grad_norm"] > 0
    assert {row.get("score") for row in single if "score" in row} != {0.0}


def test_two_processes_resume_in_a_later_epoch(launched: Path) -> None:
    """24 prompts, 8 a rollout: the third epoch begins with step 7, and the checkpoint is in its middle."""
    whole, part = launched / "later", launched / "part"
    assert len(metrics(whole)) == 10
    assert metrics(whole) == metrics(part)
    finals = [json.loads((folder / "final.json").read_text()) for folder in (whole, part)]
    assert finals[0] == finals[1]


def test_one_process_without_any_response(launched: Path) -> None:
    """It has no solver to report of; the others' numbers are logged."""
    rows = json.loads((launched / "silent" / "final_state.json").read_text())["log_history"]
    assert rows[0]["empty_responses"] == 0.5
    assert rows[0]["solver_iterations"] > 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "adapter"])
def test_a_sharded_policy_is_drawn_from_as_if_whole(launched: Path, kind: str, rank: int) -> None:
    """FSDP 2's parts are gathered once, into a copy; processes then draw as many responses as they like."""
    whole, sharded = json.loads((launched / "sharded" / f"rank-{rank}.json").read_text())[kind]
    assert sharded == whole
    assert len(whole) > 5


def zero(stage: int) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


@pytest.mark.slow  # tests/pipeline/test_processes.py has stage 3 in the suite
@pytest.mark.parametrize("stage", [2, 3])
def test_zero(stage: int, single: list[dict[str, float]], tmp_path: Path) -> None:
    """Three steps and more, saved in the middle of a rollout, resumed; the same numbers as one process all the way.
    Under stage 3 the reference is sharded too. The resumed run draws from a whole copy of the policy.
    """
    pytest.importorskip("deepspeed")
    wide_policy().save_pretrained(tmp_path / "reference")
    settings = {
        "per_device_train_batch_size": 2, "deepspeed": zero(stage), "save_strategy": "steps", "save_steps": 3,
        **EVALUATION,
    }  # fmt: skip
    extra = ["--reference", str(tmp_path / "reference")]
    whole, part = tmp_path / "whole", tmp_path / "part"
    launch(arguments(whole, *extra, **settings))
    launch(arguments(part, *extra, "--copied", "--resume-from", str(whole / "checkpoint-3"), **settings))
    assert_close(metrics(whole), single, 1e-4)
    assert_close(metrics(part), metrics(whole), 1e-6)
    saved = AutoModelForCausalLM.from_pretrained(part)
    assert saved.lm_head.weight.shape == (40, 32)
    assert not (saved.lm_head.weight == wide_policy().lm_head.weight).all()
