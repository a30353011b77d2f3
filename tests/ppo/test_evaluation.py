"""Evaluation within training: the same responses every time, faults, several sets of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ppo import tiny
from wpr.ppo import TrainingFault


def test_evaluation_draws_the_same_responses_every_time(tmp_path: Path) -> None:
    trainer = tiny.trainer(
        tmp_path, parts={"eval_dataset": tiny.prompts(20)}, eval_strategy="steps", eval_steps=2, max_steps=4,
        per_device_eval_batch_size=8,
    )  # fmt: skip
    before = trainer.evaluate()
    assert before == trainer.evaluate()
    assert before["eval_kl"] == pytest.approx(0, abs=1e-6)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "eval_score" in row and "epoch" in row]
    assert [row["step"] for row in rows] == [2, 4]
    assert rows[-1]["eval_kl"] > 0


def test_a_fault_in_evaluation_is_written_and_may_be_left_out(tmp_path: Path) -> None:
    def reward(prompts: list[str], responses: list[str], number: list[int], **columns: Any) -> list[float]:
        return [float("nan") if i >= 1000 else 0.0 for i in number]

    bad = [{**row, "number": 1000} for row in tiny.prompts(8)]
    settings = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    with pytest.raises(TrainingFault, match="evaluation: the score of response 0 is nan"):
        tiny.trainer(tmp_path / "a", reward, parts={"eval_dataset": bad}, **settings).train()
    assert len(list((tmp_path / "a" / "faults").iterdir())) == 1
    trainer = tiny.trainer(tmp_path / "b", reward, parts={"eval_dataset": bad}, max_skipped_rollouts=5, **settings)
    trainer.train()
    assert trainer.state.global_step == 4


def test_one_of_several_evaluation_sets_by_name(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, parts={"eval_dataset": {"ab": tiny.prompts(20), "c": tiny.prompts(3)}})
    whole = trainer.evaluate()
    assert {"eval_ab_score", "eval_c_score"} <= whole.keys()
    named = trainer.evaluate("ab")
    for name in ("score", "kl", "entropy", "response_length"):
        assert named[f"eval_{name}"] == whole[f"eval_ab_{name}"]
    assert whole["eval_ab_entropy"] != whole["eval_c_entropy"]
