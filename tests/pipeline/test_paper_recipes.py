"""The shipped recipes of the paper's experiments, against the paper's own tables and its sources, written out here.

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
import torch
from rich.console import Console
from transformers import get_scheduler

from wpr.config.recipe import Recipe
from wpr.config.recipe_file import find_recipe, load_recipe, shipped_recipes
from wpr.config.yaml_file import parse_value
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

NAMES = {"Gemma-2B": ["tldr-gemma-2b", "hh-gemma-2b"], "Gemma-7B": ["tldr-gemma-7b"], "Qwen": ["hh-qwen1.5-1.8b-chat"]}
NAMES |= {"APPS": ["apps-codegemma-7b"]}

# The sources, written out a second time: what docs/recipes.md calls "source" is held against it.
# Appendix, "Supervised Fine-Tuning" and "Reward Model Training": the sizes, cosine, warmup ratio 0.1. Released commands
# and code: Adam's betas (0.9, 0.95), weight decay. MA-RLHF's table: Gemma-7B ("others") and CodeGemma-7B.
SFT = {"lr_scheduler_type": "cosine", "adam_beta2": 0.95, "weight_decay": 0.01}
SFT_OF = {
    "Gemma-2B": {"batch_size": 512, "learning_rate": 5e-5, "num_train_epochs": 3, "warmup_steps": 0.1},
    "Gemma-7B": {"batch_size": 128, "learning_rate": 2e-5, "num_train_epochs": 1, "warmup_steps": 0.1},
    "APPS": {"batch_size": 32, "learning_rate": 2e-6, "num_train_epochs": 1, "warmup_steps": 0},
}
REWARD = {
    "num_train_epochs": 1, "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "adam_beta2": 0.95, "weight_decay": 0.1,
}  # fmt: skip
REWARD_OF = {
    "Gemma-2B": {"batch_size": 64, "learning_rate": 1e-5},
    "Gemma-7B": {"batch_size": 128, "learning_rate": 1e-6},
}
# "Policy Optimization with PPO" and the table of PPO's hyperparameters, one clip ratio for policy and value; of the
# released code the schedule, Adam, advantages that are not whitened, and what is clipped.
PPO = {
    "num_train_epochs": 1, "ppo_epochs": 1, "num_minibatches": 1, "clip_range": 0.2, "value_clip_range": 0.2,
    "gae_lambda": 0.95, "gamma": 1.0, "top_p": 1.0, "lr_scheduler_type": "linear", "adam_beta2": 0.95,
    "weight_decay": 0.1, "whiten_advantages": False, "reward_clip": 2.5,
}  # fmt: skip
LARGE = {
    "batch_size": 256, "max_prompt_length": 512, "max_new_tokens": 256, "temperature": 0.8, "top_k": 50,
    "warmup_steps": 200,
}  # fmt: skip
PPO_OF = {
    "Gemma-2B": LARGE | {"learning_rate": 1.5e-5, "critic_learning_rate": 1.5e-5},
    "Gemma-7B": LARGE | {"learning_rate": 1e-6, "critic_learning_rate": 1e-6},
    "APPS": {
        "batch_size": 16, "max_prompt_length": 600, "max_new_tokens": 512, "temperature": 1.0, "top_k": 5,
        "warmup_steps": 20, "learning_rate": 5e-7, "critic_learning_rate": 5e-5,
    },
}  # fmt: skip
OTHERS = {"split.sft": 0.2, "split.by": "comparison", "data.fidelity": "released", "evaluation.prompts": 2000}
OTHERS_OF = {
    "Gemma-2B": {"split.reward": 0.4, "split.ppo": 0.4, "data.max_prompt_tokens": 512,
                 "data.max_completion_tokens": 256},
    "APPS": {"split.reward": 0.0, "split.ppo": 0.8, "data.max_prompt_tokens": 600, "data.max_completion_tokens": 512},
}  # fmt: skip
PENALTY_CLIP = 2.5  # of the f-divergences
DEPARTURES = {"split.by": "prompt", "ppo.warmup_steps": 0.05}
"""What the recipes have in the place of the source's, where they differ; the latter not for APPS."""
# Rows of the training files (the paper's numbers), PPO's share, and so the optimizer steps of its one epoch.
STEPS = {"tldr": (93_000, 0.4, 145), "full-hh": (112_000, 0.4, 175), "apps": (5_000, 0.8, 250)}
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


def ablations(name: str) -> dict[str, dict[str, Any]]:
    return ABLATIONS | EMBEDDINGS[name] if name in EMBEDDINGS else {}


def beta(name: str, policy: str) -> float:
    if policy in ablations(name):
        policy = "paper"
    return BETA[OURS.get(policy, policy)][1 if MODELS[name][1] == "full-hh" else 0]


def kind(name: str) -> str:
    """What tables call a recipe."""
    return next(kind for kind, names in NAMES.items() if name in names)


def sources(name: str) -> dict[str, Any]:
    """All that the sources say of a recipe, by dotted setting."""
    like = "Gemma-2B" if kind(name) == "Qwen" else kind(name)
    found = OTHERS | (OTHERS_OF["APPS"] if like == "APPS" else OTHERS_OF["Gemma-2B"])
    found |= {f"sft.{key}": value for key, value in (SFT | SFT_OF[like]).items()}
    found |= {f"ppo.{key}": value for key, value in (PPO | PPO_OF[like]).items()}
    found |= {f"policies.{policy}.ppo.penalty_clip": PENALTY_CLIP for policy in F_DIVERGENCES}
    if like != "APPS":
        found |= {f"reward.{key}": value for key, value in (REWARD | REWARD_OF[like]).items()}
    return found


def documented() -> dict[str, dict[str, tuple[Any, Any, str]]]:
    """The table of docs/recipes.md, by recipe and setting: the source's value, the recipe's, and why they differ."""
    found: dict[str, dict[str, tuple[Any, Any, str]]] = {name: {} for name in PAPER}
    row = re.compile(r"\| `([\w.]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|([^|]*)\|")
    for line in (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8").splitlines():
        if (cells := row.fullmatch(line)) is None or not cells[2].startswith(("all", *NAMES)):
            continue
        setting, whose, source, here, why = (cell.strip() for cell in cells.groups())
        everyone = [name for name in NAMES if whose != "all but APPS" or name != "APPS"]
        kinds = everyone if whose.startswith("all") else whose.split(", ")
        for name in (name for one in kinds for name in NAMES[one]):
            assert setting not in found[name], f"{setting} of {name} twice"
            found[name][setting] = (parse_value(source), parse_value(here), why)
    return found


@pytest.mark.parametrize("name", PAPER)
def test_the_documented_settings_are_the_sources_and_the_recipe_s(name: str) -> None:
    """Both columns; a reason stands where they differ, and only there."""
    table, wanted, values = documented()[name], sources(name), shipped(name).as_dict()
    departures = {key: value for key, value in DEPARTURES.items() if kind(name) != "APPS" or key == "split.by"}
    assert table.keys() == wanted.keys()
    for setting, (source, here, why) in table.items():
        assert source == wanted[setting], setting
        assert here == departures.get(setting, wanted[setting]), setting
        assert bool(why) == (setting in departures), setting
        found = values
        for part in setting.split("."):
            found = found[part]
        assert found == here, setting


@pytest.mark.parametrize("name", PAPER)
def test_model_and_data(name: str) -> None:
    recipe = shipped(name)
    assert (recipe.model.name, recipe.data.format) == MODELS[name]


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
def test_ppo_of_every_policy(name: str) -> None:
    """No policy changes what all have; f-divergences alone have their penalties clipped."""
    recipe, stages = shipped(name), dry_run(name)
    assert set(recipe.policy_names) == {*BETA, *OURS, *ablations(name)}
    wanted = {key.removeprefix("ppo."): value for key, value in sources(name).items() if key.startswith("ppo.")}
    del wanted["warmup_steps"], wanted["batch_size"]  # those are in tests of their own
    for policy in recipe.policy_names:
        arguments = stages[f"ppo/{policy}"]["arguments"]
        assert {key: arguments[key] for key in wanted} == wanted, policy
        assert arguments["beta"] == beta(name, policy), policy
        assert arguments.get("penalty_clip") == (PENALTY_CLIP if policy in F_DIVERGENCES else None), policy


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
    for stage in ("sft", "reward", "ppo"):
        if stage == "reward" and recipe.reward is None:
            continue
        own = recipe.policy("paper") if stage == "ppo" else recipe
        arguments = trainer_arguments(own, stage, Path("x"), processes, bf16=True)
        batch = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * processes
        assert batch == sources(name)[f"{stage}.batch_size"]
        assert "batch_size" not in arguments


@pytest.mark.parametrize("name", PAPER)
def test_the_warm_up_ends_within_training(name: str) -> None:
    """On the real number of optimizer steps: the learning rate rises to its peak and falls to 0."""
    rows, share, steps = STEPS[MODELS[name][1]]
    assert int(rows * share) // sources(name)["ppo.batch_size"] == steps
    config = make_config("ppo", dry_run(name)["ppo/paper"]["arguments"] | {"report_to": "none"})
    warmup = config.get_warmup_steps(steps)
    assert warmup == {"tldr": 8, "full-hh": 9, "apps": 20}[MODELS[name][1]]
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=config.learning_rate)
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, warmup, steps)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert max(rates) == pytest.approx(config.learning_rate)
    assert rates.index(max(rates)) == warmup
    assert rates[-1] < 0.02 * config.learning_rate


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
