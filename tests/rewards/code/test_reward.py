"""The paper's formula, programs in responses, and the reward that the trainer calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rewards.code.programs import QUICK, isolated
from wpr.rewards import Completions, Reward, RewardError, as_reward
from wpr.rewards.code import CodeReward, Outcome, ProblemError, SandboxError, program_of, reward_of


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome(False), -1.0),
        (Outcome(True, ("pass",)), 1.0),
        (Outcome(True, ("fail",)), -0.3),
        (Outcome(True, ("pass", "fail", "fail", "pass")), -0.3 + 1.3 / 2),
        (Outcome(True, ("pass", "error", "pass")), -0.6),
        (Outcome(True, ("pass", "timeout", "skipped")), -0.6),
    ],
)
def test_formula(outcome: Outcome, expected: float) -> None:
    assert reward_of(outcome) == pytest.approx(expected, abs=1e-12)
    assert outcome.reward == reward_of(outcome)


def test_no_reward_without_tests() -> None:
    with pytest.raises(ValueError, match="no test was run"):
        reward_of(Outcome(True))


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("print(1)", "print(1)"),
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```\nprint(1)\n```\n```\nprint(2)\n```", "print(1)\n"),
        ("~~~py\nprint(1)\n~~~", "print(1)\n"),
        ("```python\nprint(1)\n", "print(1)\n"),  # cut off at the token limit
        ("```python\nprint('```')\n```\n", "print('```')\n"),
        ("", ""),
    ],
)
def test_programs_in_responses(response: str, program: str) -> None:
    assert program_of(response) == program


def completions(responses: list[str], **columns: Any) -> Completions:
    ids = torch.zeros(len(responses), 1, dtype=torch.long)
    return Completions([""] * len(responses), responses, ids, ids + 1, ids[:, 0], columns)


SUM = json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]})
DOUBLE = json.dumps({"inputs": [[4], [5]], "outputs": [[8], [10]], "fn_name": "double"})


@isolated
def test_each_response_on_its_own_problem() -> None:
    reward = CodeReward(QUICK, workers=2)
    assert isinstance(reward, Reward)
    assert as_reward(reward) is reward
    scores = reward(
        completions(
            [
                "```python\nprint(sum(map(int, input().split())))\n```",
                "def double(x): return 2 * x",
                "print(7)",
                "print(1",
                "class Solution:\n    def double(self, x: int) -> int:\n        return 8",
                "print(undefined)",
            ],
            input_output=[SUM, DOUBLE, SUM, SUM, DOUBLE, SUM],
            fn_name=[None] * 6,
        )
    )
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, torch.tensor([1.0, 1.0, 0.35, -1.0, 0.35, -0.6]))
    assert [outcome.compiled for outcome in reward.outcomes] == [True, True, True, False, True, True]
    assert "NameError: name 'undefined'" in reward.outcomes[5].message


@isolated
def test_wrong_columns_are_named() -> None:
    reward = CodeReward(QUICK)
    with pytest.raises(RewardError, match="needs a column input_output.*columns are \\['tests'\\]"):
        reward(completions(["print(1)"], tests=[SUM]))
    with pytest.raises(ProblemError, match="4711 has no tests"):
        reward(completions(["print(1)"], input_output=['{"inputs": [], "outputs": []}'], problem_id=[4711]))


def test_refused_at_construction(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"no bwrap \(bubblewrap\) in PATH.*unsafe=True"):
        CodeReward()
    with pytest.warns(UserWarning, match="WITHOUT isolation"):
        reward = CodeReward(QUICK, unsafe=True)
    scores = reward(completions(["print(sum(map(int, input().split())))"], input_output=[SUM]))
    assert scores.tolist() == [1.0]
