"""The examples of docs/evaluation.md run as they are printed; the intervals that it quotes are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.ppo import tiny
from wpr.evaluation import win_rate

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    scores, study = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(scores, "docs/evaluation.md", "exec"), {"__name__": "example"})
    assert "62% [" in capsys.readouterr().out
    names: dict[str, Any] = {
        "policy": tiny.policy(0, vocab_size=600),
        "reference": tiny.policy(1, vocab_size=600),
        "tokenizer": tiny.tokenizer(),
        "prompt_ids": [2, 5],
        "response_ids": [7, 8],
    }
    exec(compile(study, "docs/evaluation.md", "exec"), names)
    assert len(names["study"]["tokens"]) == 2


@pytest.mark.parametrize(
    ("wins", "losses", "ties", "quoted"),
    [(64, 0, 0, "[94.3%, 100%]"), (0, 0, 64, "[48.5%, 51.5%]"), (40, 24, 0, "[50.3%, 73.3%]")],
)
def test_quoted_intervals(wins: int, losses: int, ties: int, quoted: str) -> None:
    found = win_rate([1.0] * wins + [0.0] * losses + [0.5] * ties, [0.5] * (wins + losses + ties))
    assert f"[{100 * found.low:.3g}%, {100 * found.high:.3g}%]" == quoted
    assert quoted in PAGE
