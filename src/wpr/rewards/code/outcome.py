"""What became of one program, and the paper's reward for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Result = Literal["pass", "fail", "error", "timeout", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What became of one program.

    compiled: False where Python's compiler refuses it; then there are no results.
    results: one per test. ``pass``; ``fail``: it ran to its end and gave something else; ``error``: it raised, ended
        with an exit status other than 0, was killed, or wrote too much; ``timeout``: wall-clock or processor time was
        up; ``skipped``: not run, because an earlier test had decided the reward.
    message: the first error's words, or the compiler's, cut short. The program chose them: to be shown, not trusted.
    """

    compiled: bool
    results: tuple[Result, ...] = ()
    message: str = ""

    @property
    def passed(self) -> bool:
        """Whether every test passed."""
        return bool(self.results) and all(result == "pass" for result in self.results)

    @property
    def reward(self) -> float:
        """The paper's reward, see `reward_of`."""
        return reward_of(self)


def reward_of(outcome: Outcome) -> float:
    """The paper's reward of a program for a problem, between -1 and 1.

    -1.0                                     it does not compile
    -0.6                                     a test ended in a runtime error or ran out of time
    -0.3 + 1.3 * pass / (pass + fail)        otherwise
    """
    if not outcome.compiled:
        return -1.0
    if any(result in ("error", "timeout") for result in outcome.results):
        return -0.6
    passes, fails = outcome.results.count("pass"), outcome.results.count("fail")
    if passes + fails == 0:
        raise ValueError(f"no test was run ({outcome.results}); a problem without tests has no reward")
    return -0.3 + 1.3 * passes / (passes + fails)
