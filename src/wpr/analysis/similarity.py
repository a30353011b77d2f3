"""Do penalties fall where meaning is kept? Correlation of negative penalties with the similarity of responses.

For each held-out prompt i, with the reference's response r_i and the policy's response y_i to it:

    s_i = BERTScore F1 of y_i against r_i            d_i = mean over the tokens of y_i of the penalty (or divergence)
    figure = correlation over prompts of  -d_i  with  s_i

A penalty that is lenient to changes of wording should score higher than one that is not. Intervals and differences
come from drawing prompts again, the same ones for every regularizer and policy, so that what all of them share (long
responses, odd prompts) is not counted as noise between them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wpr.analysis.answers import TokenPenalties
from wpr.analysis.bert_score import BertScore, bert_score
from wpr.analysis.context import AnalysisContext, Found
from wpr.analysis.statistics import Estimate, Statistic, bootstrap, interval, pearson, series, spearman
from wpr.errors import OptionError, UnavailableError
from wpr.evaluation.encoders import ContextualEncoder
from wpr.findings import Cell, Figure, Finding, Mark, Series
from wpr.regularizers.spec import SIDE_BY_SIDE
from wpr.runs.responses import BEFORE, whose_tokens

MEASURES = ("penalty", "divergence")
LENGTH = "response length"
"""A control: short responses differ in fewer places."""

FEWEST = 3
"""Responses of a policy without which there is no correlation."""

FEW = 50
"""Responses below which a warning is given."""

MEAN = "mean of policies"
COLUMNS = [
    "policy", "regularizer", "of", "responses", "Pearson", "low", "high", "Spearman", "Spearman low", "Spearman high",
    "Pearson over {base}", "over low", "over high", "Spearman over {base}", "ranks over low", "ranks over high",
]  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A policy's response and the reference's to one prompt.

    score: BERTScore between them. penalty, divergence: means over the policy's tokens, by regularizer.
    """

    number: int
    score: BertScore
    length: int
    penalty: Mapping[str, float]
    divergence: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {
            "number": self.number, "length": self.length, "bert_score": vars(self.score),
            "penalty": dict(self.penalty), "divergence": dict(self.divergence),
        }  # fmt: skip


@dataclass(frozen=True)
class _Correlations:
    """One measure of one policy, or their mean: estimates by statistic, and the draws ``(R,)`` behind each."""

    estimates: Mapping[str, Estimate]
    drawn: Mapping[str, Tensor]
    responses: int

    @property
    def pearson(self) -> Estimate:
        return self.estimates["pearson"]


def analyze(
    context: AnalysisContext, encoder: str | None = None, layer: int = -1, regularizers: Sequence[str] | None = None
) -> Found:
    """Negative penalties against BERTScore between reference and policy responses."""
    names = list(dict.fromkeys(regularizers or SIDE_BY_SIDE))
    policies = context.chosen
    for policy in policies:
        context.answers(policy, BEFORE)  # an error now rather than after all penalties
    before = {policy: {one.number: one.response for one in context.responses(policy, BEFORE)} for policy in policies}
    try:
        reader = ContextualEncoder.from_pretrained(encoder or context.run.sft_model, layer, context.run.device)
    except ValueError as error:
        raise OptionError(str(error)) from None
    measured = context.measured(names)
    left_out: Counter[str] = Counter()
    pairs: dict[str, list[Pair]] = {}
    for policy, (answers, found) in measured.items():
        context.say(f"similarity of {policy}'s responses")
        pairs[policy] = _pairs(reader, answers, before[policy], found, left_out)
    notes = [
        *context.regularizers.notes(names),
        whose_tokens([answer for answers, _ in measured.values() for answer in answers]),
        *_notes(left_out, encoder),
    ]
    shown = "the run's SFT model" if encoder is None else "/".join(Path(encoder).parts[-2:])
    settings = context.settings(encoder_path=encoder or "sft", layer=layer)
    finding = similarity_finding(pairs, names, shown, notes, settings)
    return finding, ({"policy": policy} | pair.as_dict() for policy, found in pairs.items() for pair in found)


def _pairs(
    reader: ContextualEncoder,
    answers: Sequence[Any],
    before: Mapping[int, str],
    found: TokenPenalties,
    left_out: Counter[str],
) -> list[Pair]:
    """A policy's answers beside the reference's responses ``before``, by the number of the prompt. What could not be
    paired or read is counted in ``left_out``.
    """
    kept = [(index, answer) for index, answer in enumerate(answers) if answer.number in before]
    ours, cut_ours = reader.embed([answer.response for _, answer in kept])
    theirs, cut_theirs = reader.embed([before[answer.number] for _, answer in kept])
    left_out += Counter(alone=len(answers) - len(kept), cut=cut_ours + cut_theirs)
    means = [
        {name: found.means(values, len(answers)) for name, values in each.items()}
        for each in (found.penalty, found.divergence)
    ]
    pairs = []
    for (index, answer), one, other in zip(kept, ours, theirs, strict=True):
        score = bert_score(one, other)
        if score is None:
            left_out["empty"] += 1
            continue
        own = ({name: float(values[index]) for name, values in each.items()} for each in means)
        pairs.append(Pair(answer.number, score, len(answer.response_ids), *own))
    return pairs


def _notes(left_out: Mapping[str, int], encoder: str | None) -> list[str]:
    notes = []
    if encoder is None:
        notes.append(
            "The embeddings are hidden states of the run's own SFT model, which is close to the policies: name an "
            "independent encoder with --encoder FOLDER before drawing conclusions."
        )
    for key, what in (
        ("alone", "responses are to prompts that the reference did not answer, and are left out"),
        ("empty", "pairs have an empty response, hence no similarity, and are left out"),
        ("cut", "responses are longer than the encoder reads; what is beyond is not compared"),
    ):
        if left_out[key]:
            notes.append(f"{left_out[key]} {what}.")
    return notes


def similarity_finding(
    pairs: Mapping[str, Sequence[Pair]],
    regularizers: Sequence[str],
    encoder: str,
    notes: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Finding:
    """The finding on each policy's pairs. The first regularizer is what the others are compared with."""
    usable = {policy: list(found) for policy, found in pairs.items() if len(found) >= FEWEST}
    if not usable:
        counts = ", ".join(f"{policy} {len(found)}" for policy, found in pairs.items())
        raise UnavailableError(
            f"a correlation needs at least {FEWEST} responses of a policy with a similarity ({counts}); evaluate the "
            "run on more held-out prompts (evaluation.prompts), or draw responses of the policies and of the reference "
            "to the same prompts (`wpr generate`)"
        )
    left_out = [f"{policy} is left out: {len(found)} of its responses have a similarity, {FEWEST} are needed."
                for policy, found in pairs.items() if policy not in usable]  # fmt: skip
    base = regularizers[0]
    numbers = sorted({pair.number for found in usable.values() for pair in found})
    chosen = {(measure, name): _correlate_all(usable, numbers, measure, name, seed)
              for measure in MEASURES for name in regularizers}  # fmt: skip
    chosen["", LENGTH] = _correlate_all(usable, numbers, "length", LENGTH, seed)
    rows: list[list[Cell]] = []
    for policy in [*usable, *([MEAN] if len(usable) > 1 else [])]:
        for (measure, name), found in chosen.items():
            reference = chosen[measure, base] if measure else None
            other = None if name == base or reference is None else reference[policy]
            rows.append(_row(policy, name, measure, found[policy], other))
    whole = MEAN if len(usable) > 1 else next(iter(usable))
    return Finding(
        name="similarity",
        title="Penalties and semantic similarity",
        text=[*_summary(chosen, whole, base, usable, encoder), *left_out, *notes],
        columns=[column.format(base=base) for column in COLUMNS],
        rows=rows,
        figures=[_bars(chosen, whole, regularizers), _scatter(usable, regularizers)],
        settings={"encoder": encoder, "regularizers": list(regularizers), "seed": seed, **(settings or {})},
    )


def _correlate_all(
    pairs: Mapping[str, Sequence[Pair]], numbers: Sequence[int], measure: str, name: str, seed: int
) -> dict[str, _Correlations]:
    """Correlations of one measure by policy, and their mean over policies; prompts are drawn alike for all."""
    found: dict[str, _Correlations] = {}
    draws: list[dict[str, Tensor]] = []
    for policy, rows in pairs.items():
        place = {pair.number: index for index, pair in enumerate(rows)}
        values = torch.tensor([-_value(pair, measure, name) for pair in rows], dtype=torch.float64)
        scores = torch.tensor([pair.score.f1 for pair in rows], dtype=torch.float64)
        where = torch.tensor([place.get(number, -1) for number in numbers])
        drawn = {key: _drawn(values, scores, where, statistic, seed) for key, statistic in STATISTICS.items()}
        draws.append(drawn)
        estimates = {key: Estimate(float(statistic(values, scores)), *interval(drawn[key]))
                     for key, statistic in STATISTICS.items()}  # fmt: skip
        found[policy] = _Correlations(estimates, drawn, len(rows))
    if len(pairs) > 1:
        means = {key: torch.stack([one[key] for one in draws]).mean(0) for key in STATISTICS}
        estimates = {key: Estimate(_mean(one.estimates[key].value for one in found.values()), *interval(drawn))
                     for key, drawn in means.items()}  # fmt: skip
        found[MEAN] = _Correlations(estimates, means, sum(one.responses for one in found.values()))
    return found


STATISTICS: dict[str, Statistic] = {"pearson": pearson, "spearman": spearman}


def _drawn(values: Tensor, scores: Tensor, where: Tensor, statistic: Statistic, seed: int) -> Tensor:
    """The statistic of draws of prompts ``(R,)``. ``where`` ``(N,)`` has the place of each prompt's pair, -1 for a
    prompt without one, which leaves a draw with fewer pairs.
    """
    if (where >= 0).all():
        return bootstrap(lambda drawn: statistic(values[where[drawn]], scores[where[drawn]]), len(where), seed=seed)

    def one_by_one(drawn: Tensor) -> Tensor:
        kept = [places[places >= 0] for places in where[drawn]]
        return torch.stack([statistic(values[places], scores[places]) for places in kept])

    return bootstrap(one_by_one, len(where), seed=seed)


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def _value(pair: Pair, measure: str, name: str) -> float:
    return float(pair.length) if measure == "length" else float(getattr(pair, measure)[name])


def _row(policy: str, name: str, measure: str, found: _Correlations, base: _Correlations | None) -> list[Cell]:
    own = [cell for one in found.estimates.values() for cell in one.cells]
    over: list[Cell] = [None] * 6
    if base is not None:
        over = [cell for key in STATISTICS for cell in _difference(found, base, key).cells]
    return [policy, name, measure or "control", found.responses, *own, *over]


def _difference(found: _Correlations, base: _Correlations, key: str = "pearson") -> Estimate:
    value = found.estimates[key].value - base.estimates[key].value
    return Estimate(value, *interval(found.drawn[key] - base.drawn[key]))


def _summary(
    chosen: Mapping[tuple[str, str], Mapping[str, _Correlations]],
    whole: str,
    base: str,
    pairs: Mapping[str, Sequence[Pair]],
    encoder: str,
) -> list[str]:
    counts = sum(len(found) for found in pairs.values())
    alike = [pair.score.f1 for found in pairs.values() for pair in found]
    sentences = [
        f"For {counts} held-out responses of {len(pairs)} {'policy' if len(pairs) == 1 else 'policies'}: BERTScore F1 "
        f"between the policy's response and the reference's to the same prompt (embeddings of {encoder}; mean "
        f"{sum(alike) / len(alike):.3f}, from {min(alike):.3f} to {max(alike):.3f}), correlated with the negative mean "
        "penalty of the policy's tokens. Higher is better: the penalty is small where meaning is kept."
    ]
    ranked = [(name, found[whole]) for (measure, name), found in chosen.items() if measure == "penalty"]
    ranked.sort(key=lambda item: -item[1].pearson.value if not math.isnan(item[1].pearson.value) else math.inf)
    listed = "; ".join(f"{name} {found.pearson}" for name, found in ranked)
    sentences.append(f"Pearson's correlation, {'mean of the policies' if whole == MEAN else whole}: {listed}.")
    sentences += [_verdict(name, found, chosen["penalty", base][whole], base) for name, found in ranked if name != base]
    control = chosen["", LENGTH][whole].pearson
    sentences.append(
        f"Control: the negative length of the response alone has {control}. A penalty that does not clearly beat it "
        "may tell long responses from short ones and no more."
    )
    fewest = min(len(found) for found in pairs.values())
    if fewest < FEW:
        sentences.append(
            f"A policy has only {fewest} responses here, and bootstrap intervals of so few are too narrow: evaluate on "
            f"{FEW} prompts or more (evaluation.prompts) before believing a difference."
        )
    return sentences


def _verdict(name: str, found: _Correlations, base: _Correlations, base_name: str) -> str:
    difference = _difference(found, base)
    if math.isnan(difference.value):
        return f"{name} cannot be compared with {base_name}: one of them does not vary over the responses."
    ranked = _difference(found, base, "spearman")
    sentence = f"{name} {_side(difference)} {base_name} here: the difference is {difference}."
    if _side(ranked) != _side(difference):
        sentence += f" By ranks (Spearman's) it {_side(ranked)} {base_name}: {ranked}."
    return sentence


def _side(difference: Estimate) -> str:
    if not difference.leaves_out_zero:
        return "cannot be told apart from"
    return f"correlates {'higher' if difference.value > 0 else 'lower'} than"


def _bars(
    chosen: Mapping[tuple[str, str], Mapping[str, _Correlations]], whole: str, regularizers: Sequence[str]
) -> Figure:
    drawn = [
        series(f"mean {measure}", list(regularizers), [chosen[measure, name][whole].pearson for name in regularizers])
        for measure in MEASURES
    ]
    drawn.append(series("control", [LENGTH], [chosen["", LENGTH][whole].pearson]))
    return Figure(
        "bars", "Correlation of negative penalties with BERTScore", "regularizer", "Pearson's correlation", drawn,
        marks=[Mark(0.0, "no correlation")], name="correlation",
    )  # fmt: skip


def _scatter(pairs: Mapping[str, Sequence[Pair]], regularizers: Sequence[str]) -> Figure:
    """Each regularizer's penalties in units of their own spread, so that one axis serves all."""
    clouds = []
    for name in regularizers:
        x = torch.tensor([-pair.penalty[name] for found in pairs.values() for pair in found], dtype=torch.float64)
        y = [pair.score.f1 for found in pairs.values() for pair in found]
        spread = float(x.std()) if len(x) > 1 else 0.0
        scaled = (x - x.mean()) / spread if spread > 0 else x * 0
        clouds.append(Series(name, scaled.tolist(), y))
    return Figure(
        "scatter", "BERTScore against negative penalties", "negative mean penalty, standardised", "BERTScore F1",
        clouds, name="scatter",
    )  # fmt: skip
