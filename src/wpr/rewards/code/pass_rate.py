"""pass@1: the share of problems whose one program passes every test, by difficulty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wpr.rewards.code.outcome import Outcome, reward_of

EVERYTHING = "all"


@dataclass(frozen=True)
class Score:
    """Of one difficulty: ``problems`` tried, ``passed`` completely, and the mean reward."""

    problems: int
    passed: int
    mean_reward: float

    @property
    def rate(self) -> float:
        """``passed / problems``: pass@1."""
        return self.passed / self.problems


def pass_at_1(outcomes: Sequence[Outcome], difficulties: Sequence[str]) -> dict[str, Score]:
    """Scores by difficulty, in order of appearance, and of ``all`` problems at the end."""
    if len(outcomes) != len(difficulties):
        raise ValueError(f"{len(outcomes)} outcomes but {len(difficulties)} difficulties; give one of both a problem")
    if not outcomes:
        raise ValueError("no outcomes; pass@1 of no problems is not defined")
    if EVERYTHING in difficulties:
        raise ValueError(f"a difficulty is called {EVERYTHING!r}, which is the name of the total; rename it")
    groups: dict[str, list[Outcome]] = {}
    for outcome, difficulty in zip(outcomes, difficulties, strict=True):
        groups.setdefault(difficulty, []).append(outcome)
    groups[EVERYTHING] = list(outcomes)
    return {name: _score(group) for name, group in groups.items()}


def _score(group: Sequence[Outcome]) -> Score:
    rewards = [reward_of(outcome) for outcome in group]
    return Score(len(group), sum(outcome.passed for outcome in group), sum(rewards) / len(rewards))
