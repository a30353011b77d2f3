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
        ("```\n```\nprint(1)", ""),
        ("```python", "```python"),
        ("Sure.\r\n```python\r\nprint(1)\r\nprint(2)\r\n```\r\nDone.", "print(1)\nprint(2)\n"),
        ("```python\rprint(1)\r```\r", "print(1)\n"),
        ("````python\nprint(1)\n````\nDone.", "print(1)\n"),
        ("``````\nprint(1)\n```````\nDone.", "print(1)\n"),
        ("~~~~~ python\nprint(1)\n~~~~~", "print(1)\n"),
        ("````\naaa\n```\n````", "aaa\n```\n"),  # the closing fence is as long as the opening one
        ("````python\nprint(1)\n```\nDone.", "print(1)\n"),  # unless there is none
        ("```\naaa\n~~~\n```", "aaa\n~~~\n"),
        ("```python\nprint(1)\n``` This prints 1.", "print(1)\n"),
        ("```python\nprint(1)\n```This prints 1.\n```\n1\n```\n", "print(1)\n"),
        ("```python\nprint(1)\n``` and then\n```python\nprint(2)\n```\n", "print(1)\n"),
        ("```python\nprint(1)\n```python\nprint(2)\n```\n", "print(1)\n"),
        ("1. So:\n\n   ```python\n   if 1:\n       print(1)\n\n   ```\n2. Done", "if 1:\n    print(1)\n\n"),
        ("\t```\n\tif 1:\n\t\tprint(1)\n\t```", "if 1:\n\tprint(1)\n"),
        ("    ```python\nif 1:\n    print(1)\n    ```", "if 1:\n    print(1)\n"),  # only the fences
        ("    ```\n  if 1:\n      print(1)\n    ```", "if 1:\n    print(1)\n"),
        ("  ```\n\n      return 1\n  ```", "\n    return 1\n"),
        ("Run ``` it\n```python ```\nprint(1)\n", "print(1)\n"),  # where there is no better opening fence
        ("```python\n    return 1\n    ```", "    return 1\n"),  # only the closing fence; a body keeps its indentation
        ("`x` is ```code``` and\n```this``` too\n```\nprint(1)\n```", "print(1)\n"),  # within a line
        # A fence in a string of several lines is part of the program, whatever stands behind it.
        ('```\nprint("""\n```python\n``` x\n""")\n```\nDone.', 'print("""\n```python\n``` x\n""")\n'),
        (
            "```\ndef f():\n    '''So:\n    ```\n    f()\n    ```\n    '''\n    return 1\n```\n",
            "def f():\n    '''So:\n    ```\n    f()\n    ```\n    '''\n    return 1\n",
        ),
        ("```\na = '\"\"\"'  # don't '''\nb = \"it's\"\n```\n\"\"\" '''", "a = '\"\"\"'  # don't '''\nb = \"it's\"\n"),
        ("```\na = 'x\\'''\"\"\"y'\nprint(a)\n```\n", "a = 'x\\'''\"\"\"y'\nprint(a)\n"),
        ('```\n"""never closed\n```\nDone.', '"""never closed\n'),
        ("```\na = '''\\'''\n``` x\n'''\n```", "a = '''\\'''\n``` x\n'''\n"),
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
                "1. Read:\r\n   ````python\r\n   print(sum(map(int, input().split())))\r\n   ```` That is all.\r\n",
            ],
            input_output=[SUM, DOUBLE, SUM, SUM, DOUBLE, SUM, SUM],
            fn_name=[None] * 7,
        )
    )
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, torch.tensor([1.0, 1.0, 0.35, -1.0, 0.35, -0.6, 1.0]))
    assert [outcome.compiled for outcome in reward.outcomes] == [True, True, True, False, True, True, True]
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
