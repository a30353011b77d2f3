"""A stage that was killed, and whose files were damaged since: it goes on from what is whole, to the same end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.command import SMALL, Here, content, results, statuses
from wpr.pipeline.training import model_metrics, read_metrics

STAGES = {"sft": "sft", "reward": "reward", "ppo/rkl": "ppo"}
"""Names of stages, and the commands that run them."""


@pytest.fixture
def output(whole_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole_run, tmp_path / "run")
    return tmp_path / "run"


def killed_before_done(output: Path, stage: str) -> None:
    """As a kill leaves it that comes after the last step and the last evaluation, and before the model is saved."""
    manifest = json.loads((output / "manifest.json").read_text())
    record = manifest["stages"][stage]
    record |= {"status": "running", "finished": None, "results": {}}
    (output / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(output / stage / "model")


def metrics(output: Path, stage: str) -> list[Any]:
    return [(row["step"], model_metrics(row)) for row in read_metrics(output / stage / "metrics.jsonl")]


def check_same(output: Path, whole_run: Path, stage: str) -> None:
    assert statuses(output)[stage] == "done"
    assert results(output)[stage] == results(whole_run)[stage]
    weights = (output / stage / "model" / "model.safetensors").read_bytes()
    assert weights == (whole_run / stage / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("stage", STAGES)
def test_killed_between_the_last_step_and_done(here: Here, whole_run: Path, output: Path, stage: str) -> None:
    """What was measured at the end is measured again, and stands in the metrics once."""
    killed_before_done(output, stage)
    with (output / stage / "metrics.jsonl").open("a") as file:
        file.write('{"eval_loss": 0.1, "ev')  # and within a line
    for _ in range(2):
        here.succeeds(STAGES[stage], "tiny", *SMALL, f"output={output}")
        check_same(output, whole_run, stage)
        assert metrics(output, stage) == metrics(whole_run, stage)
        lines = (output / stage / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == len(metrics(output, stage)), "a line that is none"
        killed_before_done(output, stage)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(b"garbage" * (path.stat().st_size // 7))


@pytest.mark.parametrize(
    ("stage", "file", "harm"),
    [
        ("sft", "model.safetensors", cut),
        pytest.param("sft", "optimizer.pt", cut, marks=pytest.mark.slow),
        ("sft", "trainer_state.json", cut),
        pytest.param("reward", "model.safetensors", garbage, marks=pytest.mark.slow),
        ("reward", "rng_state.pth", empty),
        pytest.param("ppo/rkl", "model.safetensors", empty, marks=pytest.mark.slow),
        ("ppo/rkl", "critic/model.safetensors", cut),
        ("ppo/rkl", "ppo_state_0.pt", garbage),
        pytest.param("ppo/rkl", "trainer_state.json", empty, marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    here: Here, whole_run: Path, output: Path, stage: str, file: str, harm: Callable[[Path], None]
) -> None:
    killed_before_done(output, stage)
    checkpoints = output / stage / "checkpoints"
    older, newer = sorted(checkpoints.glob("checkpoint-*"))
    harm(newer / file)
    before = content(newer)
    finished = here.succeeds(STAGES[stage], "tiny", *SMALL, f"output={output}")
    kept = checkpoints / f"damaged-{newer.name}"
    message = f"Note: {newer / file} is damaged ("
    (note,) = [line for line in finished.stderr.splitlines() if "damaged" in line]
    assert note.startswith(message)
    assert note.endswith(f"; it is kept in {kept}, and the stage goes on from before it")
    assert f"going on from {older}" in (output / "run.log").read_text() or stage.startswith("ppo")
    assert content(kept) == before
    check_same(output, whole_run, stage)
    assert metrics(output, stage) == metrics(whole_run, stage)


@pytest.mark.parametrize(
    ("stage", "file"),
    [
        pytest.param("sft", "optimizer.pt", marks=pytest.mark.slow),
        ("sft", "0-logs_state.pt"),
        pytest.param("reward", "model.safetensors", marks=pytest.mark.slow),
        ("ppo/rkl", "ppo_state_0.pt"),
    ],
)
def test_a_checkpoint_that_lost_a_file_falls_back_to_the_one_before(
    here: Here, whole_run: Path, output: Path, stage: str, file: str
) -> None:
    killed_before_done(output, stage)
    checkpoints = output / stage / "checkpoints"
    _, newer = sorted(checkpoints.glob("checkpoint-*"))
    (newer / file).unlink()
    finished = here.succeeds(STAGES[stage], "tiny", *SMALL, f"output={output}")
    (note,) = [line for line in finished.stderr.splitlines() if "damaged" in line]
    kept = checkpoints / f"damaged-{newer.name}"
    assert note == (
        f"Note: {newer} is damaged ({file} is missing); it is kept in {kept}, and the stage goes on from before it"
    )
    check_same(output, whole_run, stage)
    assert metrics(output, stage) == metrics(whole_run, stage)


@pytest.mark.parametrize("stage", ["sft", "ppo/rkl"])
def test_without_a_whole_checkpoint_the_stage_begins_again(
    here: Here, whole_run: Path, output: Path, stage: str
) -> None:
    killed_before_done(output, stage)
    for folder in (output / stage / "checkpoints").glob("checkpoint-*"):
        cut(folder / "optimizer.pt")
    finished = here.succeeds(STAGES[stage], "tiny", *SMALL, f"output={output}")
    assert finished.stderr.count("is damaged (") == 2
    assert len(list((output / stage / "checkpoints").glob("damaged-checkpoint-*"))) == 2
    check_same(output, whole_run, stage)
    assert metrics(output, stage) == metrics(whole_run, stage)


def test_a_second_damaged_checkpoint_of_one_step_is_kept_too(here: Here, whole_run: Path, output: Path) -> None:
    for _ in range(2):
        killed_before_done(output, "sft")
        cut(output / "sft" / "checkpoints" / "checkpoint-3" / "optimizer.pt")
        here.succeeds("sft", "tiny", *SMALL, f"output={output}")
    names = {path.name for path in (output / "sft" / "checkpoints").glob("damaged-*")}
    assert names == {"damaged-checkpoint-3", "damaged-checkpoint-3-2"}
    check_same(output, whole_run, "sft")


def test_a_damaged_model_of_a_stage_that_is_done(here: Here, whole_run: Path, output: Path) -> None:
    """It is named, and the remedy that is told works."""
    folder = output / "sft" / "model"
    cut(folder / "model.safetensors")
    killed_before_done(output, "reward")
    command = ("run", "tiny", *SMALL, f"output={output}")
    finished = here(*command)
    assert finished.code == 1
    assert f"Error: {folder / 'model.safetensors'} is damaged (" in finished.error
    assert f"move {folder} away and run the same command again" in finished.error
    folder.rename(output / "sft" / "away")
    here.succeeds(*command)
    check_same(output, whole_run, "sft")
    check_same(output, whole_run, "reward")
