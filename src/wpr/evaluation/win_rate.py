"""Win rate of paired scores, with an interval and a test that know of ties and of several responses to one prompt.

Notation: comparisons i with outcome y_i (win 1, tie 1/2, loss 0) in groups g of m_g comparisons; N comparisons, G
groups. Comparisons of one group hang together; groups are independent. Without groups each comparison is its own.

    rate       p   = mean of y
    variance   V   = sum_g ( sum_{i in g} (y_i - p) )^2 / N^2
    groups     B   = N^2 / sum_g m_g^2                                     G where all groups are of one size
    spread     d   = (B^2 V + 1/4) / (B p (1 - p) + 1/4)
    interval       = Wilson's for the rate p of n = B / d independent comparisons

d says how the spread of the groups compares with coins of the same rate: below 1 with ties, or where a group's
comparisons average out; 1 for coins, so that the interval is Wilson's own without ties and groups. The 1/4 is the
largest variance that one more group could have had. It matters where little was seen: if all comparisons are wins, d
is 1; if all are ties, d is 1 / (B + 1) and the interval keeps a width. The measured coverage is in
``docs/evaluation.md``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

ONE_MORE_GROUP = 0.25
"""The variance of a coin with the rate one half."""


@dataclass(frozen=True)
class WinRate:
    """One side against the other.

    comparisons, wins, ties, losses: counts of single comparisons.
    rate: wins, and ties by half, a comparison.
    low, high: the interval of the rate, within 0..1 and never of zero width.
    standard_error: of the rate, between groups; 0 where all groups are alike (trust the interval there), nan where
        there is but one.
    p_value: of the two-sided sign test that neither side is better; ties are left out. With groups, a group counts
        once, for the side that wins more of it.
    """

    comparisons: int
    wins: int
    ties: int
    losses: int
    rate: float
    low: float
    high: float
    standard_error: float
    p_value: float


def win_rate(
    ours: Sequence[float],
    theirs: Sequence[float],
    groups: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
) -> WinRate:
    """Compare scores of two sides on the same prompts, pair by pair; higher is better, equal is a tie.

    groups: what each comparison belongs to, for instance its prompt, where a prompt has several.
    """
    _check(ours, theirs, groups, confidence)
    signs = [int(our > their) - int(our < their) for our, their in zip(ours, theirs, strict=True)]
    members: dict[Hashable, list[int]] = {}
    for sign, group in zip(signs, range(len(signs)) if groups is None else groups, strict=True):
        members.setdefault(group, []).append(sign)
    count = len(signs)
    rate = (1 + sum(signs) / count) / 2
    sizes = [len(part) for part in members.values()]
    variance = sum((sum(part) / 2 + len(part) * (0.5 - rate)) ** 2 for part in members.values()) / count**2
    low, high = _interval(rate, variance, count**2 / sum(size**2 for size in sizes), confidence)
    majorities = [(sum(part) > 0) - (sum(part) < 0) for part in members.values()]
    return WinRate(
        comparisons=count,
        wins=signs.count(1),
        ties=signs.count(0),
        losses=signs.count(-1),
        rate=rate,
        low=low,
        high=high,
        standard_error=math.sqrt(variance * len(sizes) / (len(sizes) - 1)) if len(sizes) > 1 else math.nan,
        p_value=sign_test(majorities.count(1), majorities.count(-1)),
    )


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact probability of a result at least this uneven, if each of both sides wins half of the time.

    With n = wins + losses and m the smaller: 2 sum_{k <= m} binomial(n, k) / 2^n, at most 1.
    """
    n, fewer = wins + losses, min(wins, losses)
    log_last = math.lgamma(n + 1) - math.lgamma(fewer + 1) - math.lgamma(n - fewer + 1) - n * math.log(2)
    total = term = 1.0  # in units of the last and largest term
    for k in range(fewer, 0, -1):
        term *= k / (n - k + 1)
        total += term
    return min(1.0, 2 * math.exp(log_last) * total)


def _interval(rate: float, variance: float, groups: float, confidence: float) -> tuple[float, float]:
    """The interval of the module's first lines; ``groups`` is B."""
    spread = (groups**2 * variance + ONE_MORE_GROUP) / (groups * rate * (1 - rate) + ONE_MORE_GROUP)
    n = groups / spread
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = rate + z * z / (2 * n)
    half = z * math.sqrt(rate * (1 - rate) / n + (z / (2 * n)) ** 2)
    low, high = ((centre + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    # At the ends the formula is 0 or 1, or the rate itself, but for rounding.
    return max(0.0, min(low, rate)), min(1.0, max(high, rate))


def _check(
    ours: Sequence[float], theirs: Sequence[float], groups: Sequence[Hashable] | None, confidence: float
) -> None:
    if len(ours) != len(theirs) or (groups is not None and len(groups) != len(ours)):
        labels = "" if groups is None else f", with {len(groups)} group labels"
        raise ValueError(
            f"{len(ours)} scores against {len(theirs)}{labels}; a paired comparison needs as many of each: drop what "
            "one side did not answer"
        )
    if not len(ours):
        raise ValueError("no scores to compare; pass at least one pair")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must be between 0 and 1, for instance 0.95")
    for i, pair in enumerate(zip(ours, theirs, strict=True)):
        if any(math.isnan(score) for score in pair):
            raise ValueError(f"the scores of pair {i} are {pair[0]} and {pair[1]}; nan is no score: drop the pair")
