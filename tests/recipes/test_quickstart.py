"""The quickstart in miniature: the command, what it leaves behind, and that the same seed gives the same."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from tests.pipeline.command import results, start
from wpr.config.recipe_file import load_recipe
from wpr.config.trainers import unused_settings

SMALL = (
    "prepare.options.count=64", "sft.max_steps=2", "ppo.max_steps=2", "ppo.batch_size=8",
    "ppo.per_device_train_batch_size=8", "evaluation.prompts=6", "evaluation.case_studies=1",
)  # fmt: skip
WATCHED = {"gold", "words_kept", "copies", "fluency"}


def without_times(found: Any) -> Any:
    """Results, less how long things took."""
    if isinstance(found, dict):
        return {key: without_times(value) for key, value in found.items() if "second" not in key}
    return found


def test_all_settings_of_the_recipe_are_used() -> None:
    for name in ("quickstart", "quickstart-quick"):
        recipe = load_recipe(name)
        assert recipe.train == ["rkl", "semantic"]
        assert all(unused_settings(recipe.policy(policy)) == [] for policy in recipe.policies)
        assert "target" not in recipe.sweeps  # which GRPO cannot do


def test_the_command_runs_everything_and_a_second_run_is_the_same(tmp_path: Path) -> None:
    process = start("quickstart", "--quick", *SMALL, "output=run", cwd=tmp_path)
    second = start("run", "quickstart-quick", "--policy", "semantic", *SMALL, "output=again", cwd=tmp_path)
    printed, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    assert second.wait(timeout=600) == 0
    folder, again = tmp_path / "run", tmp_path / "again"
    assert f"the report is in {folder / 'report.html'}" in printed
    assert "win rates on held-out prompts, by gold" in printed
    page = (folder / "report.html").read_text(encoding="utf-8")
    for policy in ("rkl", "semantic"):
        rows = [json.loads(line) for line in (folder / "ppo" / policy / "responses.jsonl").read_text().splitlines()]
        assert {*WATCHED, "score", "divergences"} <= set(rows[0])
        assert set(rows[0]["divergences"]) == {"semantic"}
        assert rows[0]["prompt"] == rows[0]["columns"]["source"] + "\n"
        assert len(rows[0]["response_ids"]) == rows[0]["length"]
        (study,) = json.loads((folder / "ppo" / policy / "tokens.json").read_text())["studies"]
        assert study["response"] == rows[0]["response"]
        assert study["gold"] == rows[0]["gold"]
        assert policy in page
    found = results(folder)["ppo/rkl"]
    assert {*WATCHED, "divergence_semantic", "distinct_2", "self_bleu", "embedding_spread"} <= set(found["after"])
    assert abs(found["before"]["kl"]) < 1e-6
    with open(folder / "win_rates.csv", newline="") as file:
        compared = {(row["by"], row["policy"], row["against"]) for row in csv.DictReader(file)}
    assert {("gold", "rkl", "SFT"), ("gold", "semantic", "SFT"), ("gold", "rkl", "semantic")} <= compared

    for stage in ("prepare", "sft", "ppo/semantic"):
        assert without_times(results(again)[stage]) == without_times(results(folder)[stage])
    for file_name in (
        "prepare/pairs.jsonl", "sft/model/model.safetensors", "ppo/semantic/model/model.safetensors",
        "ppo/semantic/responses.jsonl", "ppo/semantic/tokens.json",
    ):  # fmt: skip
        assert (again / file_name).read_bytes() == (folder / file_name).read_bytes(), file_name
