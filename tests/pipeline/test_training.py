"""What stages of training have in common."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState

from wpr.pipeline.training import WarmupCheck
from wpr.ppo import PPOConfig


@pytest.mark.parametrize(("warmup", "warns"), [(0, False), (0.05, False), (144, False), (145, True), (200, True)])
def test_a_warm_up_that_outlasts_training(
    warmup: float, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = PPOConfig(str(tmp_path), warmup_steps=warmup, learning_rate=1e-5, report_to="none", use_cpu=True)
    state = TrainerState(max_steps=145, is_world_process_zero=True)
    with caplog.at_level(logging.WARNING):
        WarmupCheck("ppo/rkl").on_train_begin(args, state, TrainerControl())
    messages = [record.message for record in caplog.records if "warm-up" in record.message]
    assert messages == (
        [
            f"ppo/rkl: its warm-up of {warmup} optimizer steps does not end within its 145, so that the learning rate "
            "never reaches 1e-05; lower warmup_steps, or make it a share of all steps, such as 0.05"
        ]
        if warns
        else []
    )
