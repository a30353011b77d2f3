"""The shipped recipes of the paper's experiments, against the paper's own tables, written out here.

What is compared is what `--dry-run` prints: the arguments of the trainers and the resolved regularizer of every policy.
"""

from __future__ import annotations

import io
import itertools
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from wpr.config.recipe import Recipe
from wpr.config.recipe_file import find_recipe, load_recipe, shipped_recipes
from wpr.pipeline.arguments import make_config, trainer_arguments
from wpr.pipeline.doctor import examine_recipe
from wpr.pipeline.plan_view import resolved
from wpr.pipeline.run import plan
from wpr.pipeline.sweep import members

MODELS = {
    "tldr-gemma-2b": ("google/gemma-2b", "tldr"),
    "tldr-gemma-7b": ("google/gemma-7b", "tldr"),
    "hh-gemma-2b": ("google/gemma-2b", "full-hh"),
    "hh-qwen1.5-1.8b-chat": ("Qwen/Qwen1.5-1.8B-Chat", "full-hh"),
    "apps-codegemma-7b": ("google/codegemma-7b", "apps"),
}
PAPER = list(MODELS)

# Appendix, "Supervised Fine-Tuning": batch 512, 5e-5, cosine, warmup ratio 0.1, 3 epochs.
SFT = {"batch": 512, "learning_rate": 5e-5, "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "num_train_epochs": 3}
# "Reward Model Training": batch 64, 1e-5, cosine, warmup ratio 0.1, one epoch.
REWARD = {"batch": 64, "learning_rate": 1e-5, "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "num_train_epochs": 1}
# "Policy Optimization with PPO" and the table of PPO's hyperparameters; one clip ratio for policy and value.
PPO = {
    "batch": 256,
    "learning_rate": 1.5e-5,
    "critic_learning_rate": 1.5e-5,
    "num_train_epochs": 1,
    "ppo_epochs": 1,
    "num_minibatches": 1,
    "clip_range": 0.2,
    "value_clip_range": 0.2,
    "gae_lambda": 0.95,
    "gamma": 1.0,
    "max_prompt_length": 512,
    "max_new_tokens": 256,
    "warmup_steps": 200,
    "temperature": 0.8,
    "top_p": 1.0,
    "top_k": 50,
}
# The table of beta by divergence: TL;DR, HH-RLHF.
BETA = {
    "rkl": (0.005, 0.001),
    "fkl": (0.05, 0.0001),
    "js": (0.05, 0.01),
    "alpha": (0.01, 0.05),
    "tv": (0.01, 0.01),
    "chi2": (0.001, 0.001),
    "paper": (0.05, 0.0005),
}
GRID = [0.5, 0.1, 0.05, 0.01, 0.005, 0.001, 0.0005, 0.0001]
OURS = {"unbalanced": "rkl", "semantic": "rkl", "sum": "rkl", "hellinger": "rkl"}
"""Policies that the paper does not have, and the one whose beta they take."""

F_DIVERGENCES: dict[str, dict[str, Any]] = {
    "rkl": {"name": "reverse-kl", "estimator": "paper"},
    "fkl": {"name": "forward-kl", "estimator": "paper"},
    "js": {"name": "jensen-shannon", "estimator": "paper"},
    "alpha": {"name": "alpha", "estimator": "paper", "alpha": 0.5},
    "tv": {"name": "total-variation", "estimator": "paper"},
    "chi2": {"name": "chi-squared", "estimator": "paper"},
}
# lambda = 100, k1 = 512, k2 = 128, Euclidean cost of the SFT model's embeddings; plain Sinkhorn on the raw costs.
WASSERSTEIN: dict[str, Any] = {
    "name": "wasserstein",
    "preset": "paper",
    "metric": "euclidean",
    "embeddings": None,
    "neighbours": 512,
    "k2": 128,
    "lam": 100.0,
    "marginals": "balanced",
    "debias": False,
    "gauge": "raw",
    "scaled": False,
}
ITERATIONS = {"tldr": 10, "full-hh": 50, "apps": 10}  # the paper has none for APPS: TL;DR's
# The ablation table (cost, k1, k2, lambda, iterations), and the appendix's tables on k2 and on lambda.
ABLATIONS: dict[str, dict[str, Any]] = {
    "cosine": {"metric": "cosine"},
    "k1-256": {"neighbours": 256},
    "k2-64": {"k2": 64},
    "k2-256": {"k2": 256},
    "lam-10": {"lam": 10.0},
    "lam-50": {"lam": 50.0},
    "lam-200": {"lam": 200.0},
    "iterations-5": {"iterations": 5},
    "iterations-30": {"iterations": 30},
}
# The appendix's table on embedding spaces: each backbone with the other one's costs, after SFT.
EMBEDDINGS: dict[str, dict[str, dict[str, Any]]] = {
    "tldr-gemma-2b": {"embeddings-7b": {"embeddings": "runs/tldr-gemma-7b/sft/model"}},
    "tldr-gemma-7b": {"embeddings-2b": {"embeddings": "runs/tldr-gemma-2b/sft/model"}},
}
HEADER = ("hardware", "memory", "data", "command", "override")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run's folder is there, and nothing comes from the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@cache
def shipped(name: str) -> Recipe:
    """Read once: nothing here changes it."""
    return load_recipe(name)


@cache
def dry_run(name: str) -> dict[str, Any]:
    """What is printed for the recipe with all its policies."""
    recipe = shipped(name)
    stages: dict[str, Any] = resolved(recipe, plan(recipe, recipe.policy_names))["stages"]
    return stages


def table(arguments: dict[str, Any], names: dict[str, Any], processes: int = 1) -> dict[str, Any]:
    """The arguments of these names, and the batch that they make up."""
    batch = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * processes
    return {name: batch if name == "batch" else arguments[name] for name in names}


def ablations(name: str) -> dict[str, dict[str, Any]]:
    return ABLATIONS | EMBEDDINGS[name] if name in EMBEDDINGS else {}


def beta(name: str, policy: str) -> float:
    if policy in ablations(name):
        policy = "paper"
    return BETA[OURS.get(policy, policy)][1 if MODELS[name][1] == "full-hh" else 0]


@pytest.mark.parametrize("name", PAPER)
def test_model_data_and_split(name: str) -> None:
    recipe = shipped(name)
    assert (recipe.model.name, recipe.data.format) == MODELS[name]
    assert (recipe.data.max_prompt_tokens, recipe.data.max_completion_tokens) == (512, 256)
    shares = (recipe.split.sft, recipe.split.reward, recipe.split.ppo)
    # 20%, 40% and the remaining 40%; programs are rewarded by their tests, so that the reward model's part is PPO's.
    assert shares == ((0.2, 0.0, 0.8) if name.startswith("apps") else (0.2, 0.4, 0.4))


@pytest.mark.parametrize("name", PAPER)
def test_stages(name: str) -> None:
    recipe = shipped(name)
    stages = [stage.name for stage in plan(recipe)]
    if name.startswith("apps"):
        assert (stages, recipe.scorer.kind) == (["sft", "ppo/paper"], "code")
    else:
        assert (stages, recipe.scorer.kind) == (["sft", "reward", "ppo/paper"], "model")
    assert recipe.scorer.name is None
    assert recipe.critic == "auto"  # the reward model; for APPS the SFT model


@pytest.mark.parametrize("name", PAPER)
def test_sft_and_reward_model(name: str) -> None:
    stages = dry_run(name)
    assert table(stages["sft"]["arguments"], SFT) == SFT
    assert ("reward" in stages) != name.startswith("apps")
    if "reward" in stages:
        assert table(stages["reward"]["arguments"], REWARD) == REWARD


@pytest.mark.parametrize("name", PAPER)
def test_ppo_of_every_policy(name: str) -> None:
    recipe = shipped(name)
    stages = dry_run(name)
    assert set(recipe.policy_names) == {*BETA, *OURS, *ablations(name)}
    for policy in recipe.policy_names:
        arguments = stages[f"ppo/{policy}"]["arguments"]
        assert table(arguments, PPO) == PPO, policy
        assert arguments["beta"] == beta(name, policy), policy


@pytest.mark.parametrize("name", PAPER)
def test_the_regularizer_of_every_policy(name: str) -> None:
    stages = dry_run(name)
    wasserstein = WASSERSTEIN | {"iterations": ITERATIONS[MODELS[name][1]]}
    for policy, expected in F_DIVERGENCES.items():
        found = stages[f"ppo/{policy}"]["regularizer"]
        assert {key: found.get(key) for key in expected} == expected, policy
    changed: dict[str, dict[str, Any]] = {"paper": {}} | ablations(name)
    for policy, changes in changed.items():
        found = stages[f"ppo/{policy}"]["regularizer"]
        expected = wasserstein | changes
        assert {key: found[key] for key in expected} == expected, policy
    assert stages["ppo/hellinger"]["regularizer"]["name"] == "squared-hellinger"


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_has_a_semantic_policy(name: str) -> None:
    """With the preset's own numbers: what the paper's penalty sets does not leak into it."""
    recipe = shipped(name)
    found = recipe.policy("semantic").regularizer.resolved()
    assert (found["name"], found["preset"]) == ("wasserstein", "semantic")
    assert (found["marginals"], found["debias"], found["scaled"], found["gauge"]) == (
        "unbalanced",
        True,
        False,
        "value",
    )
    assert (found["lam"], found["rho"], found["floor"], found["transform"]) == (40.0, 2.0, 0.0, "centre/unit")


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_the_batch_is_the_paper_s_on_any_number_of_processes(name: str, processes: int) -> None:
    recipe = shipped(name)
    for stage, batch in (("sft", 512), ("reward", 64), ("ppo", 256)):
        if stage == "reward" and recipe.reward is None:
            continue
        own = recipe.policy("paper") if stage == "ppo" else recipe
        arguments = trainer_arguments(own, stage, Path("x"), processes, bf16=True)
        assert table(arguments, {"batch": None}, processes) == {"batch": batch}
        assert "batch_size" not in arguments


@pytest.mark.parametrize("name", PAPER)
def test_what_the_trainers_make_of_it(name: str) -> None:
    """The warmup of a share is that share of the steps, that of a number is so many steps."""
    stages = dry_run(name)
    for stage, steps in (("sft", 100), ("reward", 100), ("ppo/paper", 200)):
        if stage in stages:
            config = make_config(stage.partition("/")[0], stages[stage]["arguments"] | {"report_to": "none"})
            assert config.get_warmup_steps(1000) == steps
            assert str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type)) == "cosine"
    config = make_config("ppo", stages["ppo/paper"]["arguments"] | {"report_to": "none"})
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (8, 32)


def test_divergences_and_ablations_are_sweeps() -> None:
    for name in PAPER:
        assert set(members(shipped(name), "divergences", [], [])) == {*BETA, *OURS}
    # The ablation on embeddings needs the other model's SFT, and is asked for by name.
    assert set(members(shipped("tldr-gemma-2b"), "ablations", [], [])) == {"paper", *ABLATIONS}


@pytest.mark.parametrize("name", PAPER)
def test_the_grid_of_beta(name: str) -> None:
    recipe = shipped(name)
    found = members(recipe, "beta", ["rkl", "paper"], [])
    assert [changes["ppo.beta"] for changes in found.values()] == GRID * 2
    stages = {stage.name: stage for stage in plan(recipe, list(found), found)}
    assert [stages[f"ppo/paper+beta={value}"].recipe.ppo["beta"] for value in GRID] == GRID
    assert stages["ppo/rkl+beta=0.5"].recipe.regularizer.name == "reverse-kl"


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_sweep_resolves(name: str) -> None:
    recipe = shipped(name)
    for sweep in recipe.sweeps:
        found = members(recipe, sweep, [], [])
        stages = resolved(recipe, plan(recipe, list(found), found))["stages"]
        assert len([stage for stage in stages if stage.startswith("ppo/")]) == len(found) > 1


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_header_says_what_a_reader_needs(name: str) -> None:
    lines = find_recipe(name).read_text(encoding="utf-8").splitlines()
    header = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    said = {found[1]: found[2] for line in header if (found := re.fullmatch(r"# (\w+) {2,}(.+)", line))}
    assert set(HEADER) <= set(said)
    assert f"wpr run {name}" in said["command"]
    assert f"wpr run {name}" in said["override"]
    assert not [line for line in header if re.search(r"HEADER_|TODO|XXX", line)], "a place holder is left"
    assert shipped(name).description


@pytest.mark.parametrize("name", shipped_recipes())
def test_overrides_and_policies_of_the_header_work(name: str) -> None:
    text = find_recipe(name).read_text(encoding="utf-8")
    command = re.search(r"^# override +wpr run (.+)$", text, re.MULTILINE)
    assert command is not None
    words = command[1].split()
    recipe = load_recipe(words[0], [word for word in words if "=" in word])
    for flag, policy in itertools.pairwise(words):
        assert flag != "--policy" or policy in recipe.policy_names


@pytest.mark.parametrize("name", PAPER)
def test_needs_are_estimated_offline(name: str) -> None:
    text = io.StringIO()
    found = examine_recipe(shipped(name), Console(file=text, width=160))
    stages = {"sft", "ppo/paper"} | (set() if name.startswith("apps") else {"reward"})
    assert set(found["memory"]) == stages
    # Training all weights takes at least weight, gradient and two moments in float32.
    assert all(amount > 16 * found["parameters"] for amount in found["memory"].values())
    assert found["disk"] > 4 * found["parameters"] * len(stages)
    assert set(found["downloads"]) == {MODELS[name][0], f"data ({MODELS[name][1]})"}
    assert "memory: " in text.getvalue()
    assert f"{name}: " in text.getvalue()
