"""What is refused before a stage starts; refusals of single settings are with these."""

from __future__ import annotations

from pathlib import Path

import pytest

from wpr.config.recipe_file import load_recipe
from wpr.errors import RecipeError
from wpr.pipeline.checks import check_stage
from wpr.runs.folder import RunFolder


def test_trl_trains_no_weights_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    recipe = load_recipe("tiny", ["trainer=grpo", "ppo.responses_per_prompt=4", f"output={tmp_path}"])
    with pytest.raises(RecipeError, match="trainer: grpo cannot train weights that ZeRO-3 or FSDP hold in parts"):
        check_stage("ppo/rkl", recipe.policy("rkl"), RunFolder(tmp_path))
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    check_stage("ppo/rkl", recipe.policy("rkl"), RunFolder(tmp_path))
