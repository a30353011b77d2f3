"""The finding on a whole run: a row per policy, temperature and baseline; and reading it back."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wpr.evaluation.judging.comparison_plan import ComparisonPlan
from wpr.evaluation.judging.pairwise import OUTCOMES, Judged
from wpr.evaluation.judging.result import bias_text, missing_text, position_bias
from wpr.evaluation.judging.win_rate_statistics import Agreement, over_draws
from wpr.evaluation.win_rate import win_rate
from wpr.findings import Cell, Figure, Finding, Mark, Series, slug
from wpr.runs.responses import drawn_at

BY_JUDGE = "judged by "
"""Before the judge's name in the title of a finding, of whole runs and of two files."""


@dataclass(frozen=True)
class JudgedRate:
    """What a judge said of a policy against a baseline at one temperature; the columns of the table.

    win_rate: ties count half. low_95, high_95: its 95% interval, prompts as groups.
    won, tied, lost: shares of the comparisons. The paper's rates are ``won``.
    win_rate_se_draws, won_se_draws: standard errors over draws, as the paper prints them; None of a single draw.
    comparisons, prompts: with a verdict. no_verdict: comparisons without one.
    place_a: how often the response in place A was chosen, of decided comparisons; 0.5 without a bias.
    p: of the two-sided sign test, each prompt once.
    """

    policy: str
    temperature: float
    against: str
    win_rate: float | None = None
    low_95: float | None = None
    high_95: float | None = None
    won: float | None = None
    tied: float | None = None
    lost: float | None = None
    win_rate_se_draws: float | None = None
    won_se_draws: float | None = None
    comparisons: int = 0
    prompts: int = 0
    no_verdict: int = 0
    place_a: float | None = None
    p: float | None = None


COLUMNS = list(JudgedRate.__dataclass_fields__)


@dataclass(frozen=True)
class JudgedPair:
    """Two models' rate by a judge, wherever it was found. judge: its name."""

    judge: str
    ours: str
    theirs: str
    temperature: float
    win_rate: float
    low: float
    high: float
    p: float | None = None
    prompts: int | None = None

    def turned(self) -> JudgedPair:
        """The same, seen from the other side."""
        rate, low, high = 1 - self.win_rate, 1 - self.high, 1 - self.low
        return replace(self, ours=self.theirs, theirs=self.ours, win_rate=rate, low=low, high=high)


def judged_rate(
    policy: str, temperature: float, against: str, judged: Sequence[Judged], both_orders: bool
) -> JudgedRate:
    """The row of two models at one temperature."""
    read = [one for one in judged if one.winner is not None]
    missing = len(judged) - len(read)
    if not read:
        return JudgedRate(policy, temperature, against, no_verdict=missing)
    outcomes = [OUTCOMES[str(one.winner)] for one in read]
    outright = [float(one == 1) for one in outcomes]
    prompts: list[Hashable] = [one.comparison.prompt_id for one in read]
    draws = [one.comparison.draw for one in read]
    found = win_rate(outcomes, [0.5] * len(read), prompts)
    return JudgedRate(
        policy,
        temperature,
        against,
        win_rate=found.rate,
        low_95=found.low,
        high_95=found.high,
        won=found.wins / len(read),
        tied=found.ties / len(read),
        lost=found.losses / len(read),
        win_rate_se_draws=_number(over_draws(outcomes, draws)[1]),
        won_se_draws=_number(over_draws(outright, draws)[1]),
        comparisons=len(read),
        prompts=len(set(prompts)),
        no_verdict=missing,
        place_a=_number(position_bias([read], both_orders)[0].share),
        p=found.p_value,
    )


def run_finding(
    name: str,
    title: str,
    judged: Mapping[tuple[str, float, str], Sequence[Judged]],
    protocol: ComparisonPlan,
    settings: Mapping[str, Any],
    agreements: Mapping[str, Agreement],
    notes: Sequence[str],
) -> Finding:
    """One table of everything that was judged. judged: comparisons by policy, temperature and baseline."""
    rates = [judged_rate(*key, found, protocol.both_orders) for key, found in judged.items()]
    every = [one for found in judged.values() for one in found]
    read = [[one for one in found if one.winner is not None] for found in judged.values()]
    text = _verdicts(rates)
    text.append(
        "win_rate counts a tie half; low_95 and high_95 are its 95% interval over prompts. won, tied and lost are "
        "shares of the comparisons; the paper's rates are won."
    )
    if protocol.prompts is not None and protocol.draws > 1:
        text.append(
            f"win_rate_se_draws and won_se_draws are standard errors over the {protocol.draws} draws, as the paper "
            "prints them. They say how much draws from these prompts differ, and leave out that other prompts could "
            "have been there, which the interval does not."
        )
    if len(rates) > 1:
        text.append(
            f"These are {len(rates)} comparisons of models: of 20 that do not differ, about one is told apart by "
            "chance."
        )
    text += bias_text(*position_bias(read, protocol.both_orders))
    text += missing_text(every, "the column no_verdict counts them")
    text += [
        f"Agreement with {other}: {found.share:.3f} of {found.comparisons} pairs of responses that both judged, "
        f"Cohen's kappa {found.kappa:.3f}."
        for other, found in agreements.items()
    ]
    rows: list[list[Cell]] = [list(vars(rate).values()) for rate in rates]
    return Finding(name, title, [*text, *notes], COLUMNS, rows, _figures(rates), dict(settings))


def judged_rates(finding: Finding) -> list[JudgedRate]:
    """The rows of a finding that `run_finding` made; none of any other."""
    if finding.columns != COLUMNS:
        return []
    return [JudgedRate(*row) for row in finding.rows]  # type: ignore[arg-type]


def judged_pairs(findings: Sequence[Finding]) -> list[JudgedPair]:
    """What judges said of two models at one temperature, whichever of both it was asked of, each once: of whole runs,
    and of two files. What several have is taken from a whole run's, from the one with most prompts.
    """
    of_runs = [
        JudgedPair(
            _judge(finding), one.policy, one.against, one.temperature, one.win_rate, one.low_95, one.high_95, one.p,
            one.prompts,
        )
        for finding in findings
        for one in judged_rates(finding)
        if one.win_rate is not None and one.low_95 is not None and one.high_95 is not None
    ]  # fmt: skip
    of_files = [one for finding in findings if (one := _of_two_files(finding)) is not None]
    found: dict[tuple[str, float, frozenset[str]], JudgedPair] = {}
    for one in [*sorted(of_runs, key=lambda pair: -(pair.prompts or 0)), *of_files]:
        found.setdefault((one.judge, one.temperature, frozenset((one.ours, one.theirs))), one)
    return list(found.values())


def _of_two_files(finding: Finding) -> JudgedPair | None:
    headers = finding.settings.get("headers")
    cells = {str(row[0]): row[1:4] for row in finding.rows if row}
    if not finding.name.startswith("judge-") or not isinstance(headers, list) or "win rate" not in cells:
        return None
    names, heats = [one.get("name") for one in headers], [drawn_at(one) for one in headers]
    ends = [float(value) for value in cells["win rate"] if isinstance(value, int | float)]
    if len(names) != 2 or None in names or heats[0] is None or heats[0] != heats[1] or len(ends) != 3:
        return None
    rate, low, high = ends
    p = cells.get("sign test p", [None])[0]
    p = float(p) if isinstance(p, int | float) else None
    return JudgedPair(_judge(finding), str(names[0]), str(names[1]), heats[0], rate, low, high, p)


def _judge(finding: Finding) -> str:
    return finding.title.rpartition(BY_JUDGE)[2]


def _verdicts(rates: Sequence[JudgedRate]) -> list[str]:
    texts = []
    for against in dict.fromkeys(rate.against for rate in rates):
        told: dict[str, list[str]] = {"better": [], "worse": [], "not told apart": [], "no verdict": []}
        for rate in rates:
            if rate.against != against:
                continue
            if rate.low_95 is None or rate.high_95 is None:
                said = "no verdict"
            else:
                said = "better" if rate.low_95 > 0.5 else "worse" if rate.high_95 < 0.5 else "not told apart"
            told[said].append(f"{rate.policy} at {rate.temperature:g}")
        groups = [f"{said}: {', '.join(names)}" for said, names in told.items() if names]
        texts.append(f"Against {against}, by the 95% intervals of this judge: {'; '.join(groups)}.")
    return texts


def _figures(rates: Sequence[JudgedRate]) -> list[Figure]:
    """The win rate against each baseline: over temperatures, or a bar per policy where there is one temperature."""
    figures = []
    for against in dict.fromkeys(rate.against for rate in rates):
        own = [rate for rate in rates if rate.against == against]
        heats = {rate.temperature for rate in own}
        shared: dict[str, Any] = {
            "marks": [Mark(0.5, "as good")],
            "name": f"win-rate-vs-{slug(against)}",
            "note": "Ties count half. Intervals are 95%, over prompts.",
        }
        if len(heats) > 1:
            lines = {
                policy: [rate for rate in own if rate.policy == policy]
                for policy in dict.fromkeys(rate.policy for rate in own)
            }
            series = [_series(policy, [rate.temperature for rate in line], line) for policy, line in lines.items()]
            title = f"Win rate against {against} by sampling temperature"
            figures.append(Figure("lines", title, "temperature", "win rate", series, **shared))
        else:
            bars = [_series("win rate", [rate.policy for rate in own], own)]
            title = f"Win rate against {against} at temperature {next(iter(heats)):g}"
            figures.append(Figure("bars", title, "", "win rate", bars, **shared))
    return figures


def _series(name: str, x: list[Any], rates: Sequence[JudgedRate]) -> Series:
    rate, low, high = (
        [math.nan if value is None else value for value in values]
        for values in zip(*((one.win_rate, one.low_95, one.high_95) for one in rates), strict=True)
    )
    return Series(name, x, rate, low, high)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
