"""The finding of a pairwise evaluation: rates with intervals, what was not answered, position bias, agreement."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from wpr.evaluation.judging.comparison_plan import ComparisonPlan
from wpr.evaluation.judging.pairwise import OUTCOMES, Judged
from wpr.evaluation.judging.questions import Accounts
from wpr.evaluation.judging.win_rate_statistics import Agreement, Places, bootstrap, over_draws, places
from wpr.evaluation.win_rate import WinRate, win_rate
from wpr.findings import Cell, Figure, Finding, Mark, Series

UNREAD_SHARE = 0.05
"""More unreadable answers than this are worth a warning."""
SURE = 0.01
"""The p-value below which a position bias counts as shown,"""
NOTABLE = 0.1
"""and the distance from one half from which on it is worth a warning."""

Row = list[Cell]


def make_finding(
    name: str,
    title: str,
    names: tuple[str, str],
    judged: Sequence[Judged],
    protocol: ComparisonPlan,
    accounts: Accounts,
    settings: Mapping[str, Any],
    agreements: Mapping[str, Agreement],
    notes: Sequence[str],
) -> Finding:
    """Everything that comparisons say, in sentences, a table and figures. names: of the two models."""
    ours, theirs = names
    read = [one for one in judged if one.winner is not None]
    counted = count_missing(judged)
    rows: list[Row] = [["comparisons", len(judged), None, None, ""], ["answered and read", len(read), None, None, ""]]
    repaired = sum(one.answer.repaired for one in judged)
    rows.append(["read at the second attempt", repaired, None, None, "after one repair"])
    rows += [[status, count, None, None, _WHY[status]] for status, count in counted.items()]
    text, figures = [], []
    if read:
        outcomes = [OUTCOMES[str(one.winner)] for one in read]
        prompts: list[Hashable] = [one.comparison.prompt_id for one in read]
        found = win_rate(outcomes, [0.5] * len(read), prompts)
        rates, error = over_draws(outcomes, [one.comparison.draw for one in read])
        text.append(_verdict(ours, theirs, found, len(set(prompts))))
        rows += _rates(found, outcomes, prompts, rates, error, len(judged) - len(read), read)
        bias, chance = position_bias([read], protocol.both_orders)
        rows += _bias_rows(bias, chance)
        text += bias_text(bias, chance)
        text += _draws_text(protocol, found, error, len(rates))
        figures = _figures(ours, theirs, found, rates, bias)
    else:
        text.append("No comparison has a verdict, so that there is no win rate.")
    text += missing_text(judged, "the row 'whatever the missing say' has what they could change")
    for other, agreed in agreements.items():
        rows.append([f"agreement with {other}", agreed.share, None, None, f"{agreed.comparisons} pairs judged by both"])
        rows.append([f"Cohen's kappa with {other}", agreed.kappa, None, None, "0: as by chance, 1: always"])
    if accounts.prompt_tokens:
        rows.append(["tokens in", accounts.prompt_tokens, None, None, "of this command, as the server counted"])
        rows.append(["tokens out", accounts.completion_tokens, None, None, "of this command"])
    rows = [[one, _number(value), _number(low), _number(high), note] for one, value, low, high, note in rows]
    columns = ["figure", "value", "low", "high", "note"]
    return Finding(name, title, [*text, *notes], columns, rows, figures, dict(settings))


_WHY = {
    "unreadable": "the answer had the wrong form, a server's twice; not in the rates",
    "failed": "no answer after all attempts; run again to ask for these",
    "unasked": "left out after too many failures; run again to ask for these",
}


def count_missing(judged: Sequence[Judged]) -> dict[str, int]:
    """Comparisons without a verdict, by the reason."""
    return {status: sum(one.answer.status == status for one in judged) for status in _WHY}


def _verdict(ours: str, theirs: str, found: WinRate, prompts: int) -> str:
    verb = "wins" if found.low > 0.5 else "loses" if found.high < 0.5 else "cannot be told apart from the other"
    return (
        f"{ours} against {theirs}: win rate {found.rate:.3f}, 95% interval {found.low:.3f} to {found.high:.3f} over "
        f"{prompts} prompts ({found.wins} wins, {found.ties} ties, {found.losses} losses; a tie counts half). By this "
        f"judge, {ours} {verb}."
    )


def _rates(
    found: WinRate,
    outcomes: Sequence[float],
    prompts: Sequence[Hashable],
    rates: Sequence[float],
    error: float,
    missing: int,
    read: Sequence[Judged],
) -> list[Row]:
    low, high = bootstrap(outcomes, prompts)
    won = sum(outcome == 1 for outcome in outcomes)
    _, won_error = over_draws([float(outcome == 1) for outcome in outcomes], [one.comparison.draw for one in read])
    everything = len(outcomes) + missing
    rows: list[Row] = [
        ["win rate", found.rate, found.low, found.high, "ties count half; 95% interval, prompts as groups"],
        ["win rate, bootstrap", found.rate, low, high, "95% percentile interval over prompts"],
        ["won outright", won / len(outcomes), None, None, "ties count nothing"],
        ["wins", found.wins, None, None, ""],
        ["ties", found.ties, None, None, ""],
        ["losses", found.losses, None, None, ""],
        ["sign test p", found.p_value, None, None, "each prompt votes once; ties are left out"],
    ]
    if missing:
        total = sum(outcomes)
        rows.append(
            ["win rate, whatever the missing say", found.rate, total / everything, (total + missing) / everything,
             "if all comparisons without a verdict were losses, or wins"]
        )  # fmt: skip
    if len(rates) > 1:
        rows += [
            ["standard error over draws", error, None, None, "of the win rate, as in the paper; see the text"],
            ["standard error over draws, outright", won_error, None, None, "of the share won outright"],
        ]
        rows += [[f"win rate of draw {number}", rate, None, None, ""] for number, rate in enumerate(rates, 1)]
    return rows


def position_bias(parts: Sequence[Sequence[Judged]], both_orders: bool) -> tuple[Places, float]:
    """Places of all comparisons, and the p-value of a bias from those that were asked: the same question in several
    draws, and so the same answer, counts once there.

    parts: comparisons with a verdict, of each two models.
    """
    counted = [
        places([one.answer.value for one in part], [(one.comparison.draw, one.comparison.prompt_id) for one in part])
        for part in parts
    ]
    everything = Places(*(sum(column) for column in zip(*map(astuple, counted), strict=True)))
    once = {(one.pair, one.comparison.ours_first): one.answer.value for part in parts for one in part}
    pairs: list[Hashable] = [pair if both_orders else (pair, first) for pair, first in once]
    return everything, places(list(once.values()), pairs).p_value


def _bias_rows(bias: Places, chance: float) -> list[Row]:
    if bias.pairs:
        return [
            ["position bias", bias.bias, None, None, "pairs in which place A won both times, of pairs decided twice"],
            ["place B won both times", bias.second_twice / bias.pairs, None, None, f"{bias.pairs} pairs"],
            ["place A chosen", bias.share, None, None, "of decided comparisons; 0.5 without a bias"],
            ["position bias p", chance, None, None, "sign test; the same question in several draws counts once"],
        ]
    return [
        ["position bias", bias.bias, None, None, "place A chosen, of decided comparisons; 0.5 without a bias"],
        ["position bias p", chance, None, None, "sign test; the same question in several draws counts once"],
    ]


def bias_text(bias: Places, chance: float) -> list[str]:
    """Warnings about a judge that goes by the place of a response."""
    decided = bias.first + bias.second
    place = "A" if bias.share >= 0.5 else "B"
    share = max(bias.share, 1 - bias.share) if decided else math.nan
    texts = []
    if decided and chance < SURE and share >= 0.5 + NOTABLE:
        texts.append(
            f"Warning: the judge prefers place {place}. It chose the response there in {share:.0%} of {decided} "
            "decided comparisons, whichever model had written it. The win rate is pulled towards one half; do not "
            "trust it. With --both-orders the place evens out; a judge with a share near 100% says nothing at all."
        )
    swayed = bias.first_twice + bias.second_twice
    if bias.pairs and swayed > bias.pairs / 2:
        texts.append(
            f"Warning: in {swayed} of {bias.pairs} pairs the judge chose the same place both ways round. It judges the "
            "place more often than the responses."
        )
    return texts


def _draws_text(protocol: ComparisonPlan, found: WinRate, error: float, draws: int) -> list[str]:
    if protocol.prompts is None or draws < 2 or not found.standard_error > 0:
        return []
    return [
        f"The standard error over the {draws} draws is {error:.3f}. It says how much draws from these prompts "
        f"differ, and leaves out that other prompts could have been there: over prompts the standard error is "
        f"{found.standard_error:.3f}, which the interval above uses."
    ]


def missing_text(judged: Sequence[Judged], where: str) -> list[str]:
    """Warnings about comparisons without a verdict. where: in words, what has their number or their weight."""
    texts, total = [], len(judged)
    counted = count_missing(judged)
    if counted["unreadable"] > UNREAD_SHARE * total:
        first = next(one.answer.reason for one in judged if one.answer.status == "unreadable")
        rates = f"They are not in the rates; {where}. "
        texts.append(
            f"Warning: {counted['unreadable']} of {total} answers could not be read. "
            f"{rates if sum(counted.values()) < total else ''}Of the first: {first}. All are in data.jsonl."
        )
    lost = counted["failed"] + counted["unasked"]
    if lost:
        texts.append(
            f"Incomplete: {lost} of {total} comparisons have no answer. Run the same command again: it asks for "
            "these only."
        )
    return texts


def _figures(ours: str, theirs: str, found: WinRate, rates: Sequence[float], bias: Places) -> list[Figure]:
    labels = [f"draw {number}" for number in range(1, len(rates) + 1)] if len(rates) > 1 else []
    values = [*rates, found.rate] if labels else [found.rate]
    low, high = ([math.nan] * len(labels) + [end] for end in (found.low, found.high))
    half = [Mark(0.5, "as good")]
    figures = [
        Figure(
            "bars", f"Win rate of {ours} against {theirs}", "", "win rate",
            [Series("win rate", [*labels, "all"], values, low, high)], marks=half, name="win-rate",
            note=f"{'Draws without an interval; the last bar' if labels else 'The bar'} has the 95% interval over "
            "prompts.",
        )
    ]  # fmt: skip
    if bias.first + bias.second:
        counts = [float(bias.first), float(bias.second)]
        figures.append(
            Figure(
                "bars", "Position bias", "place of the chosen response", "comparisons",
                [Series("chosen", ["A", "B"], counts)], marks=[Mark(sum(counts) / 2, "no bias")], name="position-bias",
                note="Either model stands in either place half of the time: without a bias both are chosen alike.",
            )
        )  # fmt: skip
    return figures


def _number(value: Cell) -> Cell:
    return None if isinstance(value, float) and not math.isfinite(value) else value
