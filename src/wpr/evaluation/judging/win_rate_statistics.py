"""What comparisons say: rates over draws, bootstrap intervals, position bias, agreement of two judges.

The interval of a rate is that of `wpr.evaluation.win_rate` with prompts as groups: a prompt that comes in three draws,
or in both orders, is one piece of evidence. The standard error over draws, which the paper reports, is kept beside it:
it knows how much draws from *these* prompts differ, not how much other prompts would, and is 0 where each draw has all.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wpr.evaluation.win_rate import sign_test

RESAMPLES = 4000
AT_ONCE = 200
"""Resamples in memory at once."""


def over_draws(outcomes: Sequence[float], draws: Sequence[int]) -> tuple[list[float], float]:
    """The rate of each draw, and the standard error of their mean: their standard deviation over the root of their
    number; nan for a single draw.
    """
    members: dict[int, list[float]] = {}
    for outcome, draw in zip(outcomes, draws, strict=True):
        members.setdefault(draw, []).append(outcome)
    rates = [sum(part) / len(part) for _, part in sorted(members.items())]
    if len(rates) < 2:
        return rates, math.nan
    mean = sum(rates) / len(rates)
    return rates, math.sqrt(sum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1) / len(rates))


def bootstrap(
    outcomes: Sequence[float],
    groups: Sequence[Hashable],
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of the mean outcome when groups are drawn again with replacement.

    Of zero width where all groups are alike: see the interval of `wpr.evaluation.win_rate` there.
    """
    members: dict[Hashable, list[float]] = {}
    for outcome, group in zip(outcomes, groups, strict=True):
        members.setdefault(group, []).append(outcome)
    if not members:
        raise ValueError("no outcomes to draw again; pass at least one")
    sums = np.array([sum(part) for part in members.values()])
    sizes = np.array([len(part) for part in members.values()], dtype=float)
    generator = np.random.default_rng(seed)
    rates = []
    for start in range(0, resamples, AT_ONCE):
        drawn = generator.integers(len(sums), size=(min(AT_ONCE, resamples - start), len(sums)))
        rates.append(sums[drawn].sum(1) / sizes[drawn].sum(1))
    low, high = np.quantile(np.concatenate(rates), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Places:
    """How often the response in place A was chosen, and that in place B; ties are left out.

    pairs: comparisons that were asked both ways round and decided both times. first_twice, second_twice: of these,
    where the same place won both times, so that the answer hung on the place.
    """

    first: int
    second: int
    pairs: int = 0
    first_twice: int = 0
    second_twice: int = 0

    @property
    def share(self) -> float:
        """Of place A among decided comparisons; 0.5 without a bias: either model stands there half of the time."""
        decided = self.first + self.second
        return self.first / decided if decided else math.nan

    @property
    def p_value(self) -> float:
        """Of the sign test that the place does not matter."""
        if self.pairs:
            return sign_test(self.first_twice, self.second_twice)
        return sign_test(self.first, self.second)

    @property
    def bias(self) -> float:
        """From 0 to 1, for place A: with both orders the share of pairs in which place A won twice, else its share."""
        return self.first_twice / self.pairs if self.pairs else self.share


def places(choices: Sequence[str], pairs: Sequence[Hashable]) -> Places:
    """Count choices A, B and E; two choices of one pair are the same comparison both ways round."""
    members: dict[Hashable, list[str]] = {}
    for choice, pair in zip(choices, pairs, strict=True):
        members.setdefault(pair, []).append(choice)
    decided = [part for part in members.values() if len(part) == 2 and "E" not in part]
    return Places(
        first=sum(choice == "A" for choice in choices),
        second=sum(choice == "B" for choice in choices),
        pairs=len(decided),
        first_twice=sum(part == ["A", "A"] for part in decided),
        second_twice=sum(part == ["B", "B"] for part in decided),
    )


@dataclass(frozen=True)
class Agreement:
    """Of two judges on the same comparisons. share: agreed of all; kappa: Cohen's, nan where chance explains all."""

    comparisons: int
    share: float
    kappa: float


def agreement(one: Mapping[str, str], other: Mapping[str, str]) -> Agreement:
    """Of the comparisons that both judged, by their names: equal verdicts, and how far beyond chance.

    kappa = (agreed - expected) / (1 - expected), with expected the agreement of two judges that give the same verdicts
    as often as these, at random.
    """
    both = [name for name in one if name in other]
    if not both:
        return Agreement(0, math.nan, math.nan)
    count = len(both)
    agreed = sum(one[name] == other[name] for name in both) / count
    verdicts = {one[name] for name in both} | {other[name] for name in both}
    expected = (
        sum(
            sum(one[name] == verdict for name in both) * sum(other[name] == verdict for name in both)
            for verdict in verdicts
        )
        / count**2
    )
    return Agreement(count, agreed, math.nan if expected == 1 else (agreed - expected) / (1 - expected))
