"""Policies in numbers: means on held-out prompts, and who wins against whom."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from wpr.report.runs import same_prompts
from wpr.runs.responses import Response
from wpr.runs.tolerant import Policy
from wpr.runs.values import drawable, finite, mapping

if TYPE_CHECKING:
    from wpr.evaluation.win_rate import WinRate

MEASURES = {"gold": "gold score", "score": "reward model's score"}
"""What responses are judged by: gold is the truth that training never sees."""

SCORES = {
    "words": "word list's score",
    "spelling": "score for spelling",
    "reading-level": "score for the reading level",
    "function": "reward function's score",
    "code": "score by tests",
}
"""What a run's score is where no reward model gives it, by the kind of its scorer."""

SFT = "SFT"

FEWEST = 10
"""Prompts that a difference of means needs: the spread of fewer is too uncertain."""

NORMAL = 1.959964
"""Standard deviations to either side that hold 95% of a normal distribution."""


@dataclass(frozen=True)
class PolicyComparison:
    """One policy against another, or against the SFT model (None), on the prompts that both answered."""

    ours: Policy
    theirs: Policy | None
    measure: str
    result: WinRate
    prompts: int

    @property
    def opponent(self) -> str:
        """The other side's name."""
        return SFT if self.theirs is None else self.theirs.name

    @property
    def verdict(self) -> int:
        """1 if the interval lies above one half, -1 below it, 0 if it holds one half."""
        return (self.result.low > 0.5) - (self.result.high < 0.5)

    @property
    def confirmed(self) -> bool:
        """Whether the sign test, which leaves ties out, says so too."""
        return self.result.p_value <= 0.05


def against_sft(policies: Sequence[Policy], measure: str) -> list[PolicyComparison]:
    """Each policy against the model that it started from."""
    found = (_compare(policy, None, policy.before, measure) for policy in policies)
    return [comparison for comparison in found if comparison is not None]


def against_each_other(policies: Sequence[Policy], measure: str) -> list[PolicyComparison]:
    """Every pair of policies that answered the same prompts, each once."""
    pairs = ((one, other) for one, other in itertools.combinations(policies, 2) if same_start(one, other))
    found = (_compare(ours, theirs, theirs.responses, measure) for ours, theirs in pairs)
    return [comparison for comparison in found if comparison is not None]


def same_start(one: Policy, other: Policy) -> bool:
    """Whether two policies of a run were made from the same SFT and reward models, as far as the run recorded it: a
    stage that was started again leaves policies of the old one behind.
    """
    if one.run is not other.run:
        return True
    first, second = (
        mapping(mapping(mapping(policy.run.stages.get(f"ppo/{policy.own_name}")).get("inputs")).get("needs"))
        for policy in (one, other)
    )
    return not first or not second or first == second


def _compare(ours: Policy, theirs: Policy | None, others: Sequence[Response], measure: str) -> PolicyComparison | None:
    from wpr.evaluation.win_rate import win_rate  # wpr.evaluation needs torch; reading a run does not

    values = []
    for own, other in same_prompts(ours.responses, others):
        first, second = own.measured(measure), other.measured(measure)
        if first is not None and second is not None:
            values.append((first, second, own.prompt_text))
    if not values:
        return None
    first_scores, second_scores, prompts = zip(*values, strict=True)
    result = win_rate(first_scores, second_scores, groups=prompts)
    return PolicyComparison(ours, theirs, measure, result, len(set(prompts)))


@dataclass(frozen=True)
class MeanDifference:
    """A mean of one policy less that of another, with its 95% interval over prompts, and how many these are."""

    mean: float
    low: float
    high: float
    prompts: int

    @property
    def verdict(self) -> int:
        """1 if the interval lies above zero, -1 below it, 0 if it holds zero."""
        return (self.low > 0) - (self.high < 0)

    @property
    def same(self) -> bool:
        """Whether no prompt has a difference."""
        return self.low == self.mean == self.high == 0

    def __neg__(self) -> MeanDifference:
        return MeanDifference(-self.mean, -self.high, -self.low, self.prompts)


def mean_difference(ours: Policy, theirs: Policy, measure: str) -> MeanDifference | None:
    """Of what was measured on the prompts that both answered; None of fewer than `FEWEST` prompts.

    With differences d_i in groups g of one prompt text each, N of them in G groups, the standard error is the root of
    G / (G - 1) * sum_g ( sum_{i in g} (d_i - mean) )^2 / N^2, and the interval Student's with G - 1 degrees of freedom.
    """
    groups: dict[str, list[float]] = {}
    for own, other in same_prompts(ours.responses, theirs.responses):
        first, second = own.measured(measure), other.measured(measure)
        if first is not None and second is not None:
            groups.setdefault(own.prompt_text, []).append(first - second)
    if len(groups) < FEWEST:
        return None
    count = sum(map(len, groups.values()))
    centre = sum(map(sum, groups.values())) / count
    squares = sum((sum(part) - len(part) * centre) ** 2 for part in groups.values())
    error = math.sqrt(squares * len(groups) / (len(groups) - 1)) / count
    reach = student(len(groups) - 1) * error
    return MeanDifference(centre, centre - reach, centre + reach, len(groups))


def student(freedom: int) -> float:
    """Standard errors to either side that hold 95%, by so many degrees of freedom: the first terms of the expansion of
    Student's t around the normal distribution, right to 0.01 from 9 on.
    """
    z = NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def mean_gain(ours: Policy, theirs: Policy, measure: str) -> float | None:
    """The mean of two policies less that of the SFT responses, on the prompts that both answered; None if unknown."""
    gains = []
    for own, other in ((ours, theirs), (theirs, ours)):
        rows = [row for row, _ in same_prompts(own.responses, other.responses)]
        for row, start in same_prompts(rows, own.before or other.before):
            after, before = row.measured(measure), start.measured(measure)
            if after is not None and before is not None:
                gains.append(after - before)
    return sum(gains) / len(gains) if gains else None


def held_out(policy: Policy, moment: str) -> dict[str, float]:
    """Means over the held-out responses, ``before`` or ``after`` training, by name: those that the run recorded, and
    those of the responses themselves where it did not. Measures of divergence are a token.
    """
    rows = policy.responses if moment == "after" else policy.before
    recorded = mapping(policy.results.get(moment))
    known = {name: found for name, value in recorded.items() if (found := finite(value)) is not None}
    if rows and "distinct_2" not in known:
        known = _diversity(tuple(row.response for row in rows)) | known
    return {name: drawable(value) for name, value in (means(rows) | known).items()}


def mean(rows: Sequence[Response], name: str) -> float | None:
    """Of what was measured."""
    values = [value for row in rows if (value := row.measured(name)) is not None]
    return sum(values) / len(values) if values else None


def means(rows: Sequence[Response]) -> dict[str, float]:
    """What the responses' own numbers tell."""
    found = {}
    for name in MEASURES:
        if (value := mean(rows, name)) is not None:
            found[name] = value
    sums = [(_sums(row), row.length) for row in rows]
    for name in dict.fromkeys(name for known, _ in sums for name in known):
        measured = [(known[name], length) for known, length in sums if name in known and length]
        if measured:
            found[name] = sum(value for value, _ in measured) / sum(length for _, length in measured)
    lengths = [row.length for row in rows if row.length is not None]
    if lengths:
        found["response_length"] = sum(lengths) / len(lengths)
    return found


def _sums(row: Response) -> dict[str, float]:
    """What was measured of each token, summed over the response."""
    given = {name: row.measures.get(name) for name in ("kl", "divergence", "penalty")}
    given |= {f"divergence_{name}": value for name, value in row.divergences.items()}
    return {name: known for name, value in given.items() if (known := finite(value)) is not None}


@lru_cache(maxsize=64)
def _diversity(texts: tuple[str, ...]) -> dict[str, float]:
    """Remembered, since all policies of a run have the same SFT responses."""
    from wpr.evaluation.diversity import diversity  # as above

    return diversity(texts)
