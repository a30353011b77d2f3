"""Code as a reward: a response's program is run on the tests of its prompt's problem."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from wpr.rewards.base import Completions, RewardError
from wpr.rewards.code.limits import Limits
from wpr.rewards.code.outcome import Outcome, reward_of
from wpr.rewards.code.problems import Problem, parse_problem
from wpr.rewards.code.runner import Runner

FENCE = re.compile(r"^[ \t]*(```|~~~)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)


def program_of(response: str) -> str:
    """The program in a response: its first fenced block (``` or ~~~, ended or cut off), else all of it."""
    found = FENCE.search(response)
    return found.group(2) if found else response


class CodeReward:
    """The paper's reward for code, see `reward_of`, of each response.

    Reads the dataset's columns ``input_output``, and ``fn_name`` and ``problem_id`` where there are such.
    ``limits``, ``workers`` and ``unsafe`` are `Runner`'s. `outcomes` are those of the last call.
    """

    name = "code"

    def __init__(self, limits: Limits | None = None, workers: int | None = None, unsafe: bool = False) -> None:
        self.runner = Runner(limits, workers, unsafe)
        self.outcomes: list[Outcome] = []

    def __call__(self, completions: Completions) -> Tensor:
        """See `Reward.__call__`."""
        problems = [self._problem(completions, row) for row in range(len(completions))]
        programs = [program_of(response) for response in completions.responses]
        self.outcomes = self.runner.run(list(zip(programs, problems, strict=True)))
        return torch.tensor([reward_of(outcome) for outcome in self.outcomes], device=completions.input_ids.device)

    def _problem(self, completions: Completions, row: int) -> Problem:
        columns = completions.columns
        if "input_output" not in columns:
            raise RewardError(
                "the code reward needs a column input_output with the tests; the dataset's columns are "
                f"{sorted(columns)}"
            )
        name = f"problem {columns['problem_id'][row]}" if "problem_id" in columns else f"the problem of response {row}"
        fn_name = columns["fn_name"][row] if "fn_name" in columns else None
        return parse_problem(columns["input_output"][row], fn_name=fn_name, problem_id=name)
