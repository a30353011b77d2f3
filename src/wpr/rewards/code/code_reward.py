"""Code as a reward: a response's program is run on the tests of its prompt's problem."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from wpr.rewards.base import Completions, RewardError
from wpr.rewards.code.limits import Limits
from wpr.rewards.code.outcome import Outcome, reward_of
from wpr.rewards.code.problems import CodeProblem, parse_problem
from wpr.rewards.code.runner import Runner

OPENING = re.compile(r"\n([ \t]*+)(?=[`~])(`{3,}+(?=[^`\n]*\n)|~{3,}+)[^\n]*(?=\n)")
"""As CommonMark has it: no backtick behind backticks, which are code within a line then. Indented by any amount."""

ANY_OPENING = re.compile(r"\n([ \t]*+)(?=[`~])(`{3,}+|~{3,}+)[^\n]*(?=\n)")

LITERAL = r"\#[^\n]*+" + "".join(
    rf"|{q}{q}{q}(?:[^{q}\\]++|\\.|{q}(?!{q}{q}))*+{q}{q}{q}|{q}(?!{q}{q})(?:[^{q}\\\n]|\\.)*+{q}?" for q in "'\""
)
"""A comment or a string of Python; a string of one line may lack its end."""


def program_of(response: str) -> str:
    """The program in a response: its first fenced block (ended or cut off), else all of it.

    Fences are CommonMark's: three or more backticks or tildes, closed by at least as many, and what indents the opening
    one is taken from every line, unless the first line of code is indented less. Beyond CommonMark, as models write, a
    closing fence may have text behind it, and be shorter if there is none as long. No line of Python begins with a
    fence, except within a string of several lines (documentation with an example, say), where it is the program's.
    """
    if "```" not in response and "~~~" not in response:
        return response
    text = "\n" + response.replace("\r\n", "\n").replace("\r", "\n")
    opening = OPENING.search(text) or ANY_OPENING.search(text)
    if opening is None:
        return response
    indent, fence = opening.groups()
    found = None
    for length in dict.fromkeys((len(fence), 3)):
        if text.find(fence[:length], opening.end()) < 0:  # saves a pass over what may be long
            continue
        closing = rf"[ \t]*+{fence[0]}{{{length}}}"
        # As far as the line ends before the fence, or a string that is never closed: then any fence will do.
        code = re.compile(rf"(?:\n++(?!{closing})[^'\"#\n]*+|[^'\"#\n]++|{LITERAL})*+", re.DOTALL)
        found = re.compile(rf"\n{closing}").search(text, code.match(text, opening.end()).end())  # type: ignore[union-attr]
        if found:
            break
    block = text[opening.end() : found.start() + 1 if found else len(text)]  # with the line end before it
    first = re.search(r"\n([ \t]*+)\S", block)
    width = min(len(indent), len(first.group(1))) if first else 0
    return (re.sub(rf"\n[ \t]{{1,{width}}}", "\n", block) if width else block)[1:]


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

    def _problem(self, completions: Completions, row: int) -> CodeProblem:
        columns = completions.columns
        if "input_output" not in columns:
            raise RewardError(
                "the code reward needs a column input_output with the tests; the dataset's columns are "
                f"{sorted(columns)}"
            )
        name = f"problem {columns['problem_id'][row]}" if "problem_id" in columns else f"the problem of response {row}"
        fn_name = columns["fn_name"][row] if "fn_name" in columns else None
        return parse_problem(columns["input_output"][row], fn_name=fn_name, problem_id=name)
