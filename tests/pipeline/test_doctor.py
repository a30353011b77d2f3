"""`wpr doctor`: what it prints and returns about this machine and about recipes."""

from __future__ import annotations

import importlib.util
import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.pipeline.command import Here
from tests.ppo import tiny
from wpr import __version__
from wpr.config.recipe import Recipe
from wpr.config.recipe_file import load_recipe
from wpr.errors import RecipeError
from wpr.pipeline.doctor import examine_recipe, free_space, peak_memory, space_note
from wpr.pipeline.environment import machine
from wpr.pipeline.estimates import KNOWN, estimate, estimate_generation
from wpr.pipeline.machine_view import examine, gigabytes, offline
from wpr.pipeline.plan_view import show_plan
from wpr.pipeline.run import plan


def printed(recipe: Recipe | None = None) -> tuple[str, dict[str, Any]]:
    """What is said of this machine, or of a recipe, and what is returned."""
    text = io.StringIO()
    console = Console(file=text, width=200)
    if recipe is not None:
        found = examine_recipe(recipe, console)
        return text.getvalue(), found
    examine(console)
    return text.getvalue(), {}


def test_this_machine() -> None:
    text, _ = printed()
    lines = [[cell.strip() for cell in line.split("│")[1:3]] for line in text.splitlines() if "│" in line]
    state = {line[0]: line[1] for line in lines}
    assert state["wpr"] == __version__
    assert state["cores, memory"].startswith(f"{machine().cores}, ")
    assert set(state) >= {"python", "torch", "transformers", "trl", "peft", "GPU", "code sandbox", "hub", "penalty"}
    vllm = "runs vLLM" if importlib.util.find_spec("vllm") else "needs a server (vllm_url): vllm is missing"
    usual = (
        "CUDA graphs with a cache of fixed size" if machine().gpus else "transformers' generate, on the policy itself"
    )
    assert state["generation"].startswith(f"{usual}; generation=vllm {vllm}")


@pytest.mark.parametrize(("value", "found"), [("1", True), ("true", True), ("on", True), ("0", False), ("", False)])
def test_offline_as_the_hub_s_client_has_it(value: str, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert offline() is found
    text, _ = printed()
    assert ("offline (HF_HUB_OFFLINE)" in text) is found


@pytest.mark.parametrize(
    ("amount", "words"),
    [(0, "0.0 MB"), (99e6, "99.0 MB"), (1e8, "0.1 GB"), (1.25e12, "1250.0 GB"), (float("nan"), "unknown size")],
)
def test_bytes_for_a_reader(amount: float, words: str) -> None:
    assert gigabytes(amount) == words


def test_free_space_of_a_folder_to_come(tmp_path: Path) -> None:
    assert free_space(tmp_path / "not" / "there" / "yet") > 0


def test_a_model_whose_size_is_not_known() -> None:
    text, found = printed(load_recipe("tiny"))
    assert found == {}
    assert "made by the prepare stage; its size is known once that has run" in text
    assert "NOT ready" not in text


@pytest.mark.parametrize("command", ["doctor", "--dry-run"])
def test_what_a_run_would_stop_at_is_named_before_it(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every problem, each once, though two policies have it; a missing package is named with its command."""
    installed = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "wordllama" else installed(name, *rest)
    )
    words = tmp_path / "words.txt"
    words.write_text("[]\n")
    recipe = load_recipe("rewrite", [f"reward.words={words}", f"output={tmp_path / 'run'}"])
    text = io.StringIO()
    console = Console(file=text, width=200)
    if command == "doctor":
        examine_recipe(recipe, console)
    else:
        show_plan(recipe, plan(recipe), console)
    found = [line for line in text.getvalue().splitlines() if line.startswith("NOT ready: ")]
    assert [stage.name for stage in plan(recipe)][-2:] == ["ppo/rkl", "ppo/sum"]
    assert len(found) == 2
    assert "evaluation.gold.encoder=wordllama: the encoder's package wordllama is not installed" in found[0]
    assert "`pip install wordllama`" in found[0]
    assert f"{words}:1: '[]' has no letter" in found[1]
    text, found = printed(load_recipe("tiny", ["model.name=nobody/nothing"]))
    assert found == {}
    assert "`hf download nobody/nothing config.json` fetches it" in text


def test_a_recipe_with_a_model_of_one_s_own(tmp_path: Path) -> None:
    model = tiny.policy()
    model.save_pretrained(tmp_path / "model")
    own = [f"model.name={tmp_path / 'model'}", f"output={tmp_path / 'run'}"]
    with pytest.raises(RecipeError, match=r"neighbours=64 exceeds the other tokens of the vocabulary \(39\)"):
        printed(load_recipe("tiny", own))
    recipe = load_recipe("tiny", [*own, "policies.semantic.regularizer.neighbours=39"])
    text, found = printed(recipe)
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert set(found["memory"]) == {"prepare", "sft", "reward", "ppo/rkl", "ppo/semantic"}
    assert (found["downloads"], found["fits"], found["enough_disk"]) == ({}, True, True)
    assert "memory: fits on one device of this machine" in text
    assert f"in {tmp_path / 'run'} at the most" in text
    assert "NOT enough" not in text


def test_a_recipe_that_no_machine_can_hold(tmp_path: Path) -> None:
    """A million rows at a time."""
    changes = ["sft.batch_size=1000000", "sft.per_device_train_batch_size=1000000", f"output={tmp_path}"]
    text, found = printed(load_recipe("hh-gemma-2b", changes))
    assert found["fits"] is False
    assert "does not fit here" in text
    assert "model.lora, or smaller batches" in text


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([], "transformers' generate, on the policy itself. On a GPU: CUDA graphs with a cache of fixed size; holds "),
        (["ppo.generation=transformers"], "transformers' generate, on the policy itself\n"),
        (
            ["ppo.generation=vllm", "ppo.vllm_url=http://far:8000"],
            "the vLLM server at http://far:8000; nothing on",
        ),
        (["ppo.generation=vllm", "ppo.vllm_memory=0.4"], "vLLM within the process; 40% of the device's memory"),
        (["ppo.generation=graphs"], "CUDA graphs with a cache of fixed size; holds 1.4 GB"),
        (["trainer=grpo", "ppo.responses_per_prompt=4"], "TRL's own generation. On a GPU: CUDA graphs with a cache"),
    ],
)
@pytest.mark.skipif(bool(machine().gpus), reason="what is told of a machine without a GPU")
def test_what_draws_responses(changes: list[str], told: str, tmp_path: Path) -> None:
    text, found = printed(load_recipe("hh-gemma-2b", [f"output={tmp_path}", *changes]))
    assert f"generation: {', '.join(found['generation'])}: {told}" in text


def test_what_draws_counts(tmp_path: Path) -> None:
    """A model that fits, beside vLLM that does not; sharded, the copy that every GPU has; batches for no 4 devices."""
    model = tiny.policy()
    model.save_pretrained(tmp_path / "model")
    own = [f"model.name={tmp_path / 'model'}", f"output={tmp_path / 'run'}", "train=[rkl]"]
    memory = machine().gpus[0]["memory"] if machine().gpus else machine().memory
    own += ["ppo.generation=vllm", f"ppo.logits_memory_mb={0.5 * memory / 2**20}"]
    for share, fits in (("0.4", True), ("0.6", False)):
        text, found = printed(load_recipe("tiny", [*own, f"ppo.vllm_memory={share}"]))
        assert found["fits"] is fits
    assert "not possible" in text
    recipe = load_recipe("tldr-gemma-7b", [f"output={tmp_path}", "train=[rkl]"])
    stage, size = plan(recipe)[-1], KNOWN["google/gemma-7b"]
    plain, graphs = (peak_memory(stage, size, True, kind, 8, 80e9) for kind in ("cpu", "cuda"))
    drawn = estimate_generation(stage, size, True, "cuda", 8)
    assert graphs == estimate(stage, size, True, 8).states / 8 + drawn.cache + drawn.gathered > plain
    assert peak_memory(stage, size, True, "cuda", 7, 80e9) == math.inf


def test_every_policy_that_is_trained_is_counted(tmp_path: Path) -> None:
    output = f"output={tmp_path}"
    one, two = (
        printed(load_recipe("hh-gemma-2b", [output, f"train={names}"]))[1] for names in ("[paper]", "[paper, rkl]")
    )
    assert set(two["memory"]) - set(one["memory"]) == {"ppo/rkl"}
    assert two["disk"] > one["disk"]


def test_a_sweep_is_counted_whole(here: Here, tmp_path: Path) -> None:
    """Every policy's model stays; what it needs to go on from does so only if the recipe says it."""
    output = f"output={tmp_path}"
    text = here.succeeds("doctor", "tldr-gemma-2b", "divergences", output).stdout
    saved, policies = 4 * KNOWN["google/gemma-2b"].parameters, 11
    assert f"{gigabytes((2 + policies) * saved)} once all is done (finished_checkpoints: none)" in text
    assert f"disk: {gigabytes((1 + policies) * saved + 18 * saved)} in {tmp_path} at the most" in text
    text = here.succeeds("doctor", "tldr-gemma-2b", "divergences", output, "finished_checkpoints=all").stdout
    assert f"{gigabytes((2 + policies + 2 * 3 * (2 + 2 * policies)) * saved)} once all is done" in text
    text = here.succeeds("doctor", "tldr-gemma-2b", "-p", "rkl", "-p", "js", output).stdout
    assert "ppo/js" in text
    assert "ppo/paper" not in text


def test_a_disk_that_is_too_small_is_told_before_the_start(tmp_path: Path) -> None:
    small = load_recipe("tiny", [f"output={tmp_path / 'run'}", f"model.name={tmp_path / 'model'}"])
    tiny.policy().save_pretrained(tmp_path / "model")
    assert space_note(small, plan(small)) is None
    # Checkpoints that no disk holds; what they take is estimated, not written.
    large = load_recipe("tldr-gemma-7b", [f"output={tmp_path / 'run'}", "ppo.save_total_limit=100000"])
    note = space_note(large, plan(large))
    assert note is not None
    assert "are free; lower save_total_limit" in note
