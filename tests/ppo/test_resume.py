"""Killed and resumed runs end bit for bit where an uninterrupted one does."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ppo import tiny
from wpr.ppo.checkpoints import damage, last_complete_checkpoint

ROOT = Path(__file__).parents[2]
NOT_COMPARED = ("seconds_", "peak_memory", "train_", "total_flos")

# Checkpoints fall into the middle of rollouts (4 steps each) and between logs; everything that has a state is on.
SETTINGS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_minibatches": 2, "ppo_epochs": 2,
    "max_steps": 30, "save_strategy": "steps", "save_steps": 3, "logging_steps": 2, "normalize_rewards": True,
    "target_divergence": 0.01, "update_kl_limit": 0.05, "save_total_limit": 2,
}  # fmt: skip


def launch(folder: Path, *extra: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.ppo.run", str(folder), "--settings", json.dumps(SETTINGS), *extra]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


def kill_while_training(process: subprocess.Popen[str], step: int, delay: float) -> None:
    """kill -9, so many seconds after the metrics of a step were printed."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"ppo step {step}/"):
            break
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()


def compared(folder: Path) -> list[dict[str, Any]]:
    rows = json.loads((folder / "final_state.json").read_text())["log_history"]
    kept = [{k: v for k, v in row.items() if not k.startswith(NOT_COMPARED)} for row in rows]
    return [row for row in kept if "loss" in row]


def test_killed_twice_and_resumed(tmp_path: Path) -> None:
    whole = launch(tmp_path / "whole")
    chance = random.Random(time.time_ns())
    # Any moment of the steps after these, far enough apart that a killed run has not got to the next, nor to the end.
    moments = [(step, chance.uniform(0, 0.25)) for step in map(chance.choice, ((2, 4), (12, 14)))]
    for step, delay in moments:
        resume = ["--resume"] if last_complete_checkpoint(tmp_path / "killed") else []
        process = launch(tmp_path / "killed", "--pause", "0.05", *resume)
        kill_while_training(process, step, delay)
        assert not (tmp_path / "killed" / "final.json").exists(), moments
    finish(whole)
    resume = ["--resume"] if last_complete_checkpoint(tmp_path / "killed") else []
    finish(launch(tmp_path / "killed", *resume))
    one, other = compared(tmp_path / "whole"), compared(tmp_path / "killed")
    assert len(one) == 15
    assert one == other, moments
    finals = [json.loads((tmp_path / name / "final.json").read_text()) for name in ("whole", "killed")]
    assert finals[0] == finals[1], moments


def run(folder: Path, resume: bool = False, **changes: Any):
    trainer = tiny.trainer(folder, regularizer="semantic", **{**SETTINGS, **changes})
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def test_every_checkpoint_leads_to_the_same_end(tmp_path: Path) -> None:
    """In one process, from every checkpoint of a run: the middle of a rollout, its end, before and after a log."""
    whole = run(tmp_path / "whole", max_steps=12, save_total_limit=None, lr_scheduler_type="constant")
    expected = whole.model.state_dict()
    for step in (3, 6, 9, 12):
        folder = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        again = run(folder, resume=True, max_steps=12, lr_scheduler_type="constant")
        assert again.state.global_step == 12
        for name, tensor in again.model.state_dict().items():
            assert torch.equal(tensor, expected[name]), (step, name)


def test_a_checkpoint_that_was_being_written_is_passed_over(tmp_path: Path) -> None:
    run(tmp_path, max_steps=6, save_total_limit=None)
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text('{"epoch": 0.3, "glob')  # cut off
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    again = run(tmp_path, resume=True, max_steps=6, save_total_limit=None)
    assert again.state.global_step == 6
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-6"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one process."""
    folder = tmp_path_factory.mktemp("run")
    run(folder, max_steps=3)
    return folder / "checkpoint-3"


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors", "config.json", "critic/model.safetensors", "critic/config.json", "optimizer.pt",
        "scheduler.pt", "rng_state.pth", "ppo_state_0.pt",
    ],
)  # fmt: skip
def test_a_checkpoint_that_lost_a_file_is_passed_over(name: str, written: Path, tmp_path: Path) -> None:
    for step in (3, 6):
        shutil.copytree(written, tmp_path / f"checkpoint-{step}")
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-6"
    (tmp_path / "checkpoint-6" / name).unlink()
    assert damage(tmp_path / "checkpoint-6") == f"{tmp_path / 'checkpoint-6'} is damaged ({name} is missing)"
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


@pytest.mark.parametrize("first", [0, 2])  # 2: the second node's folder, with save_on_each_node
def test_a_checkpoint_of_two_processes(first: int, written: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(written, tmp_path / "checkpoint-3")
    (folder / "rng_state.pth").rename(folder / f"rng_state_{first}.pth")
    (folder / "ppo_state_0.pt").rename(folder / f"ppo_state_{first}.pt")
    assert damage(folder) is None
    own = ("rng_state_{}.pth", "ppo_state_{}.pt")
    for name in own:
        shutil.copy(folder / name.format(first), folder / name.format(first + 1))
    assert damage(folder) is None
    for name in own:
        for rank in (first, first + 1):
            gone = (folder / name.format(rank)).rename(tmp_path / "away")
            assert damage(folder) == f"{folder} is damaged ({name.format(rank)} is missing)"
            gone.rename(folder / name.format(rank))


@pytest.mark.parametrize("partitions", ["global_step3", "pytorch_model_fsdp_0"])
def test_a_checkpoint_of_deepspeed_or_fsdp(partitions: str, written: Path, tmp_path: Path) -> None:
    """Weights and optimizer are in folders of theirs."""
    folder = shutil.copytree(written, tmp_path / "checkpoint-3")
    (folder / partitions).mkdir()
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        (folder / name).unlink()
    shutil.rmtree(folder / "critic")
    assert damage(folder) is None
    (folder / "rng_state.pth").unlink()
    assert damage(folder) == f"{folder} is damaged (rng_state.pth is missing)"


def test_a_checkpoint_without_the_optimizer_by_choice(tmp_path: Path) -> None:
    run(tmp_path, max_steps=3, save_only_model=True)
    assert damage(tmp_path / "checkpoint-3") is None
    shutil.rmtree(tmp_path / "checkpoint-3" / "critic")
    (tmp_path / "checkpoint-3" / "model.safetensors").unlink()
    assert damage(tmp_path / "checkpoint-3") is not None


@pytest.mark.parametrize("adapter", ["default", "mine"])
def test_a_checkpoint_of_an_adapter(adapter: str, written: Path, tmp_path: Path) -> None:
    """Of policy and critic; those that are not called "default" have folders of their own."""
    peft = pytest.importorskip("peft")
    folder = shutil.copytree(written, tmp_path / "checkpoint-3")
    parts = {
        "model.safetensors": (folder, tiny.policy()),
        "critic/model.safetensors": (folder / "critic", tiny.critic()),
    }
    for full, (part, model) in parts.items():
        peft.get_peft_model(model, peft.LoraConfig(r=2), adapter_name=adapter).save_pretrained(part)
        for name in (full, full.replace("model.safetensors", "config.json")):
            (folder / name).unlink()
        assert damage(folder) is None, full
    for part in ("", "critic/"):
        name = f"{part}{'' if adapter == 'default' else 'mine/'}adapter_model.safetensors"
        gone = (folder / name).rename(tmp_path / "away")
        assert damage(folder) == f"{folder} is damaged ({name} is missing)"
        gone.rename(folder / name)


def test_a_checkpoint_of_a_shared_backbone(written: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(written, tmp_path / "checkpoint-3")
    (folder / "critic" / "model.safetensors").rename(folder / "value_head.safetensors")
    shutil.rmtree(folder / "critic")
    assert damage(folder) is None
    (folder / "value_head.safetensors").unlink()
    assert damage(folder) == f"{folder} is damaged (critic or value_head.safetensors is missing)"


def test_overwriting_a_checkpoint_takes_its_mark_away_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run into the same folder is interrupted while it writes over the first one's checkpoint."""
    run(tmp_path, max_steps=6, save_total_limit=None)
    trainer = tiny.trainer(tmp_path, regularizer="semantic", **{**SETTINGS, "max_steps": 6, "save_total_limit": None})

    def interrupted(folder: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-6"
    assert not (tmp_path / "checkpoint-3" / "trainer_state.json").exists()


def test_sizes_may_change_between_rollouts(tmp_path: Path) -> None:
    """Every response of every pass is used once, also after the number of steps a rollout has changed."""
    run(tmp_path, max_steps=4, save_steps=4)
    trainer = tiny.trainer(tmp_path, regularizer="semantic", **{**SETTINGS, "max_steps": 12, "num_minibatches": 4})
    used: dict[int, list[int]] = {}
    rows = trainer._rows

    def noted(number: int) -> torch.Tensor:
        found = rows(number)
        if trainer.rollouts == 2:
            used[number] = found.tolist()
        return found

    trainer._rows = noted
    trainer.train(resume_from_checkpoint=True)
    for one_pass in (range(8), range(8, 16)):
        assert sorted(row for number in one_pass for row in used[number]) == list(range(16))
    assert trainer.rollouts == 2


def test_another_kind_of_beta_starts_anew(tmp_path: Path) -> None:
    run(tmp_path, max_steps=4, save_steps=4, target_divergence=None)
    again = run(tmp_path, resume=True, max_steps=8, save_steps=4)
    assert again.state.global_step == 8


def test_a_finished_run_gives_its_best_model(tmp_path: Path) -> None:
    settings = {
        "max_steps": 4, "save_steps": 1, "ppo_epochs": 1, "num_minibatches": 1, "save_total_limit": None,
        "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "kl",
        "greater_is_better": False,
    }  # fmt: skip
    parts = {"eval_dataset": tiny.prompts(4)}
    first = tiny.trainer(tmp_path, regularizer="semantic", parts=parts, **{**SETTINGS, **settings})
    first.train()
    again = tiny.trainer(tmp_path, regularizer="semantic", parts=parts, **{**SETTINGS, **settings})
    assert again.train(resume_from_checkpoint=True).global_step == 4
    assert first.state.best_global_step == 1
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, first.model.state_dict()[name]), name


def test_bad_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no whole checkpoint in"):
        run(tmp_path / "none", resume=True)
    (tmp_path / "half").mkdir()
    with pytest.raises(ValueError, match="is not a whole checkpoint: its trainer_state.json is missing"):
        tiny.trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "half"))
    run(tmp_path / "cut", max_steps=3)
    weights = tmp_path / "cut" / "checkpoint-3" / "critic" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ValueError, match=f"is not a whole checkpoint: {weights} is damaged"):
        tiny.trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-3"))
    with pytest.raises(ValueError, match="no whole checkpoint in"):
        run(tmp_path / "cut", resume=True)
    run(tmp_path / "other", max_steps=3)
    with pytest.raises(ValueError, match="ppo_epochs 2 -> 4"):
        run(tmp_path / "other", resume=True, max_steps=12, ppo_epochs=4)
    with pytest.raises(ValueError, match="logprob_temperature 1.0 -> 0.5"):
        run(tmp_path / "other", resume=True, max_steps=12, logprob_temperature=0.5)
    with pytest.raises(ValueError, match="has 64 prompts, fewer than the 512"):
        run(tmp_path / "other", resume=True, max_steps=-1, per_device_train_batch_size=128)
