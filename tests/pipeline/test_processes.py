"""`wpr run` in two processes, with weights whole or in parts: the models and numbers of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.pipeline.command import SMALL, manifest, results, statuses
from tests.pipeline.processes import Launch
from wpr.config.recipe_file import load_recipe
from wpr.pipeline.run import Run, plan

# Rows for three whole batches: of one that is not whole, accelerate repeats rows until all processes have as many.
# Norms are clipped by DeepSpeed for policy and critic together: so far that none is.
SETTINGS = (
    *SMALL[:-1],
    "prepare.options.pairs=240",
    "train=[semantic]",
    "ppo.max_grad_norm=100.0",
    "evaluation.case_studies=1",
    "evaluation.eval_regularizers={kl: {name: reverse-kl}}",
)
STAGES = ("sft", "reward", "ppo/semantic")
HOW = ("ddp", "zero2", "zero3", "fsdp2")
TRL = (
    *SETTINGS,
    "policies={grpo: {trainer: grpo}, rloo: {trainer: rloo}}",
    "train=[grpo, rloo]",
    "regularizer={name: semantic, neighbours: 64, k2: 32}",
    "ppo.responses_per_prompt=4",
)


def needs(how: str) -> None:
    if how.startswith("zero"):
        pytest.importorskip("deepspeed")


def weights(folder: Path, stage: str) -> dict[str, Any]:
    return load_file(folder / stage / "model" / "model.safetensors")


def farthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def assert_alike(found: Path, expected: Path, stages: tuple[str, ...] = STAGES) -> None:
    """Weights to 1e-4, after steps of ten times as much; results, responses and the token view."""
    before = weights(expected, "sft")
    for stage in stages:
        wanted = weights(expected, stage)
        assert farthest(weights(found, stage), wanted) < 1e-4, stage
        start = weights(expected, "prepare") if stage == "sft" else before
        assert farthest({name: wanted[name] for name in start}, start) > 1e-3, f"{stage} has learned nothing"
    ours, theirs = results(found), results(expected)
    assert list(ours) == list(theirs)
    policies = [(stage, part) for stage in stages if stage.startswith("ppo/") for part in ("before", "after")]
    for stage, part in (("sft", "before"), ("sft", "after"), ("reward", "held_out"), *policies):
        assert ours[stage][part].keys() == theirs[stage][part].keys()
        for name, value in theirs[stage][part].items():
            if isinstance(value, float):
                assert ours[stage][part][name] == pytest.approx(value, rel=1e-3, abs=1e-3), f"{stage} {part} {name}"
    for stage, _ in policies:
        assert "embedding_spread" in ours[stage]["after"]
        tokens, known = (json.loads((folder / stage / "tokens.json").read_text()) for folder in (found, expected))
        for token, one in zip(tokens["studies"][0]["tokens"], known["studies"][0]["tokens"], strict=True):
            assert token["id"] == one["id"]
            assert token["wpr"] == pytest.approx(one["wpr"], abs=1e-4)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process: this one."""
    folder = tmp_path_factory.mktemp("single") / "run"
    recipe = load_recipe("tiny", [*SETTINGS, f"output={folder}"])
    Run(recipe, say=lambda text: None).execute(plan(recipe))
    return folder


@pytest.mark.parametrize(
    "how", ["ddp", "zero3", *(pytest.param(how, marks=pytest.mark.slow) for how in ("zero2", "fsdp2"))]
)
def test_two_processes_are_one(how: str, single: Path, tmp_path: Path) -> None:
    needs(how)
    launch = Launch(how, tmp_path, "run", "tiny", *SETTINGS, "output=run")
    launch.succeeds()
    assert_alike(tmp_path / "run", single)
    assert "destroy_process_group" not in launch.output
    assert launch.output.count("everything is in run") == 1
    assert launch.output.count("sft: starting") == 1
    assert len(manifest(tmp_path / "run")["commands"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_killed_and_run_again(how: str, single: Path, tmp_path: Path) -> None:
    """In the middle of SFT; and of PPO with all its steps done, where no step more may be taken."""
    needs(how)
    command, output = ("run", "tiny", *SETTINGS, "output=run"), tmp_path / "run"
    for stage in ("sft", "ppo/semantic"):
        mark = output / stage / "checkpoints" / "checkpoint-2" / "trainer_state.json"
        Launch(how, tmp_path, *command).kill_once(mark.exists)
        assert statuses(output)[stage] == "running"
    Launch(how, tmp_path, *command).succeeds()
    assert_alike(output, single)
    assert [results(output)[stage]["steps"] for stage in STAGES] == [3, 3, 2]


@pytest.mark.slow
def test_policies_of_trl(tmp_path: Path) -> None:
    """Under ZeRO-2 as under plain data parallelism. (One process draws other completions.) Killed at GRPO's end."""
    needs("zero2")
    for how in ("ddp", "zero2"):
        Launch(how, tmp_path / how, "run", "tiny", *TRL, "output=run").succeeds()
    assert_alike(tmp_path / "zero2/run", tmp_path / "ddp/run", ("sft", "reward", "ppo/grpo", "ppo/rloo"))
    again = tmp_path / "again" / "run"
    mark = again / "ppo" / "grpo" / "checkpoints" / "checkpoint-2" / "trainer_state.json"
    Launch("zero2", again.parent, "run", "tiny", *TRL, "output=run").kill_once(mark.exists)
    Launch("zero2", again.parent, "run", "tiny", *TRL, "output=run").succeeds()
    assert_alike(again, tmp_path / "ddp/run", ("sft", "reward", "ppo/grpo", "ppo/rloo"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["zero3", "fsdp2"])
def test_policies_of_trl_in_parts_are_refused_at_once(how: str, tmp_path: Path) -> None:
    needs(how)
    launch = Launch(how, tmp_path, "run", "tiny", *TRL, "output=run")
    assert launch.wait()[0] == 2
    assert "trainer: grpo cannot train weights that ZeRO-3 or FSDP hold in parts" in " ".join(launch.output.split())
    assert not (tmp_path / "run" / "sft").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW[1:])
def test_half_precision_is_saved_whole(how: str, tmp_path: Path) -> None:
    """Updates that bf16 would round away are in what is saved, and are read again. The reference computes in the same
    precision: before the first step the policy is at no distance from it.
    """
    needs(how)
    settings = (*SETTINGS, "model.precision=bf16", "ppo.learning_rate=1e-5")
    Launch(how, tmp_path, "run", "tiny", *settings, "output=run").succeeds()
    for stage in STAGES:
        for name, weight in weights(tmp_path / "run", stage).items():
            assert weight.dtype == torch.float32, f"{stage} {name}"
            assert not torch.equal(weight, weight.bfloat16().float()), f"{stage} {name}"
    auto = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "ppo" / "semantic" / "model")
    assert auto.dtype == torch.float32
    before = results(tmp_path / "run")["ppo/semantic"]["before"]
    assert before["kl"] == before["divergence_kl"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["zero3", "fsdp2"])
def test_adapters_in_parts(how: str, tmp_path: Path) -> None:
    """What is saved has the adapter merged in, as one process merges it."""
    needs(how)
    settings = (*SETTINGS, "model.lora.r=4", "sft.learning_rate=0.05", "ppo.learning_rate=0.01")
    recipe = load_recipe("tiny", [*settings, f"output={tmp_path / 'one'}"])
    Run(recipe, say=lambda text: None).execute(plan(recipe))
    Launch(how, tmp_path, "run", "tiny", *settings, "output=run").succeeds()
    for stage in STAGES:
        assert farthest(weights(tmp_path / "run", stage), weights(tmp_path / "one", stage)) < 1e-4, stage
    assert farthest(weights(tmp_path / "one", "sft"), weights(tmp_path / "one", "prepare")) > 1e-3
