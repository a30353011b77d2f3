"""What a policy was worth before training, of runs whose checkpoints do not say so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.ppo import tiny
from wpr.pipeline.ppo import StartingPoint, held_out_responses
from wpr.runs.responses import BEFORE


def test_an_older_run_has_its_numbers_from_the_responses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = tiny.trainer(
        tmp_path, parts={"eval_dataset": tiny.prompts()[:6], "eval_regularizers": {"forward": "forward-kl"}}
    )
    start = StartingPoint(trainer, tmp_path / BEFORE, {})
    with caplog.at_level(logging.WARNING):
        assert start.results() == ({}, [])
        assert "results are without it" in caplog.messages[-1]
        measured = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
        held_out_responses(trainer, start.path, {})
        trainer.state.log_history.clear()
        found, rows = start.results()
    assert "computed from" in caplog.messages[-1]
    assert "without entropy" in caplog.messages[-1]
    assert [row.response for row in rows] == [row["response"] for row in trainer.evaluated]
    names = {"score", "response_length", "eos_fraction", "penalty", "kl", "divergence", "divergence_forward"}
    assert names <= found["before"].keys()
    for name in names:
        assert found["before"][name] == pytest.approx(measured[name], abs=1e-5), name
