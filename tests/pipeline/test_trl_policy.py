"""Policies of GRPO and RLOO through the whole pipeline: a sweep over trainers, other rewards, the loss form, LoRA."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.pipeline.command import SMALL, Here, manifest, results, statuses
from tests.ppo.vllm_server import served
from wpr.pipeline.training import read_metrics
from wpr.runs.finished_run import FinishedRun

CURVES = {"score", "kl", "divergence", "penalty", "entropy", "response_length", "beta", "eos_fraction", "clip_fraction"}
NAMES = {name: f"rkl+trainer={name}" for name in ("ppo", "grpo", "rloo")}


def logged(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def test_a_sweep_over_trainers(here: Here, tmp_path: Path) -> None:
    """One SFT and one reward model, three trainers; table, curves, report and analyses take all alike."""
    output = tmp_path / "run"
    sweep = ("sweep", "tiny", *SMALL, f"output={output}", "ppo.responses_per_prompt=2", "ppo.temperature=0.7")
    said = here.succeeds(*sweep, "--policy", "rkl", "--grid", "trainer=ppo,grpo,rloo").stderr
    assert said.count("reward: starting") == 1
    assert statuses(output) == dict.fromkeys(
        ["prepare", "sft", "reward", *(f"ppo/{name}" for name in NAMES.values())], "done"
    )
    found = results(output)
    for trainer, name in NAMES.items():
        folder, result = output / "ppo" / name, found[f"ppo/{name}"]
        assert result["steps"] == 2
        assert (folder / "responses-before.jsonl").read_text().count("\n") == 12
        assert result["after"]["kl"] > 0
        assert [row.number for row in FinishedRun(output).responses(name)] == list(range(12))
        assert AutoModelForCausalLM.from_pretrained(folder / "model").config.vocab_size > 0
        assert logged(folder)[-1].keys() >= CURVES, trainer
        assert {"seconds_generation", "seconds_reward", "seconds_backpropagation"} <= logged(folder)[-1].keys()
        assert trainer.upper() in (folder / "model" / "README.md").read_text()
    stage = manifest(output)["stages"][f"ppo/{NAMES['grpo']}"]
    assert (stage["settings"]["num_generations"], stage["settings"]["regularizer_beta"]) == (2, 0.05)
    assert FinishedRun(output).temperature(NAMES["grpo"]) == 0.7
    page = tmp_path / "page.html"
    here.succeeds("report", str(output), "-o", str(page))
    text = page.read_text()
    assert all(name in text for name in NAMES.values())
    here.succeeds("analyze", "costs", str(output))
    again = here.succeeds(*sweep, "--policy", "rkl", "--grid", "trainer=grpo")
    assert f"ppo/{NAMES['grpo']}: done before" in again.stderr


REWARD = """
def shortness(prompts, responses, topic, **columns):
    assert len(prompts) == len(responses) == len(topic)
    return [-float(len(response)) for response in responses]

def gold(prompts, responses, **columns):
    return [float(len(response)) for response in responses]

def broken(prompts, responses, **columns):
    return [float("nan")] * len(responses)
"""


def test_a_function_with_gold_in_the_loss_form_with_an_adapter(here: Here, tmp_path: Path) -> None:
    (tmp_path / "short_topics.py").write_text(REWARD)
    rows = [{"prompt": f"Where is {n}?", "chosen": "Here.", "rejected": "No.", "topic": n} for n in range(120)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    here.monkeypatch.chdir(tmp_path)
    given = (
        *SMALL, "output=run", "trainer=rloo", "sft=null", "reward=null", "data.format=preference",
        "data.source=pairs.jsonl", "data.columns={topic: topic}", "scorer.kind=function",
        "scorer.function=short_topics:shortness", "evaluation.gold=short_topics:gold", "model.lora.r=2",
        "rloo.regularizer_in=loss", "ppo.responses_per_prompt=4", "ppo.missing_eos_penalty=50", "ppo.gae_lambda=0.9",
        "ppo.generation=transformers",
        "evaluation.eval_regularizers={semantic: {name: semantic, neighbours: 64, k2: 32}}",
    )  # fmt: skip
    refused = here("run", "tiny", *given)
    assert "ppo.gae_lambda has no meaning for any of the policies rkl, semantic (trainer: rloo)" in refused.error
    here.succeeds("run", "tiny", *(one for one in given if "gae_lambda" not in one))
    (line, *_), found = logged(tmp_path / "run/ppo/rkl"), results(tmp_path / "run")["ppo/rkl"]
    assert line["gold"] == -line["score"]
    assert line["score_shaped"] == pytest.approx(line["score"] - 50 * (1 - line["eos_fraction"]))
    assert {"divergence", "kl"} <= line.keys()
    assert found["after"]["gold"] == -found["after"]["score"]
    assert found["after"]["divergence_semantic"] > 0
    assert (tmp_path / "run/ppo/rkl/model/adapter").is_dir()
    other = here("run", "tiny", *(one for one in given if not one.startswith(("rloo", "ppo.gae"))), "trainer=grpo")
    assert "was made by other settings" in other.error
    assert "trainer: 'rloo' -> 'grpo'" in other.error

    broken = here("run", "tiny", *(one for one in given if "gae" not in one), "scorer.function=short_topics:broken",
                  "output=broken", "evaluation.prompts=0")  # fmt: skip
    assert broken.code == 1
    assert "step 0: the score of response 0 is nan" in broken.error
    assert list((tmp_path / "broken/ppo/rkl/checkpoints/faults").iterdir())

    with served(AutoModelForCausalLM.from_pretrained(tmp_path / "run/prepare/model"), max_length=256) as server:
        for bad, message in (
            ("production", r"step 0: the vLLM server at .*VLLM_SERVER_DEV_MODE=1"),
            ("nan", r"step 0: the policy's logits were not a distribution .* The checkpoints in stopped/"),
        ):
            server.bad = {bad}
            stopped = here(
                "run", "tiny", *(one for one in given if "gae" not in one), "output=stopped", "evaluation.prompts=0",
                "ppo.generation=vllm", f"ppo.vllm_url={server.url}",
            )  # fmt: skip
            assert stopped.code == 1
            assert re.search(message, stopped.error)


GRPO_WORDS = (
    *SMALL, "trainer=grpo", "sft=null", "reward=null", "ppo.responses_per_prompt=4", "ppo.normalize_rewards=true",
    "grpo.scale_rewards=none", "ppo.max_steps=1", "ppo.learning_rate=1e-2", "reward.words=words.txt",
)  # fmt: skip
ENTRIES = "".join(f"{letter}* = {weight}\n" for weight, letter in enumerate("abcdefghi", 1))


def test_a_word_list(here: Here, tmp_path: Path) -> None:
    """Bad files are refused before anything starts; a changed one is another recipe."""
    here.monkeypatch.chdir(tmp_path)
    words = tmp_path / "words.txt"
    words.write_text("你好\n", encoding="utf-8")
    refused = here("run", "tiny", *GRPO_WORDS, "output=run")
    assert (
        "command line (reward.words=words.txt): scorer.kind=words: words.txt:1: '你好' is in a script" in refused.error
    )
    words.write_text("привет\n", encoding="utf-8")
    refused = here("run", "tiny", *GRPO_WORDS, "output=run")  # once there is a tokenizer
    assert "words.txt:1: the list seems to be in another language than the model's: 1 of 1" in refused.error
    words.write_text("quantum\nepistemology\n")
    refused = here("run", "tiny", *GRPO_WORDS, "output=run")
    assert "words.txt: none of its 2 entries (quantum, epistemology) occurs in" in refused.error
    assert statuses(tmp_path / "run") == {"prepare": "done"}
    words.write_text(ENTRIES)
    here.succeeds("run", "tiny", *GRPO_WORDS, "output=run")
    assert logged(tmp_path / "run/ppo/rkl")[0]["score"] < -1
    words.write_text("other\n")
    assert "was made by other settings: scorer.words:" in here("run", "tiny", *GRPO_WORDS, "output=run").error


@pytest.mark.slow
def test_where_rewards_land_changes_the_steps_and_not_the_scores(here: Here, tmp_path: Path) -> None:
    here.monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text(ENTRIES)
    for name in ("token", "end"):
        here.succeeds("run", "tiny", *GRPO_WORDS, f"output={name}", f"scorer.placement={name}")
    token, end = (logged(tmp_path / name / "ppo/rkl")[0] for name in ("token", "end"))
    assert token["score"] == end["score"] < -1
    assert token["score_shaped"] == pytest.approx(end["score_shaped"], abs=1e-5)
    assert token["grad_norm"] != pytest.approx(end["grad_norm"], rel=1e-3)
