"""Coherence of the most likely candidates: do the tokens that a model hesitates between mean similar things?

At every token of a response, with the ten most likely candidates i of the model and the distance D of the reference's
embeddings:

    distance = mean over pairs i < j of D_ij                               the paper's; every candidate counts alike
    weighted = sum_{i<j} p_i p_j D_ij / sum_{i<j} p_i p_j                  by how probable the two are

Both are averaged over all tokens. Models are compared prompt by prompt: what a prompt does to all of them is no
difference between them, and does not widen the intervals of differences.

Smaller is more coherent. The first counts candidates of no probability as much as the most likely; where a model is
sure, nine of ten are of that kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wpr.analysis.answers import positions
from wpr.analysis.context import AnalysisContext, Found, six_digits
from wpr.analysis.statistics import Estimate, bootstrap, interval, series
from wpr.errors import OptionError
from wpr.findings import Cell, Figure, Finding
from wpr.runs.finished_run import REFERENCE
from wpr.runs.responses import BEFORE
from wpr.transport.distances import METRICS, Metric
from wpr.transport.geometry import input_embeddings
from wpr.transport.support import working_dtype

TOP = 10
_AT_ONCE = 1 << 12
COLUMNS = [
    "model", "text", "responses", "tokens", "distance", "low", "high", "weighted", "weighted low", "weighted high",
    "over {reference}", "over low", "over high", "weighted over {reference}", "weighted over low", "weighted over high",
]  # fmt: skip
OWN, SHARED = "own responses", "the reference's"
MEASURES = ("distance", "weighted")


@dataclass(frozen=True)
class Candidates:
    """Mean distances of each position's most likely tokens, ``(P,)`` each on the CPU; prompt: the number of the prompt
    that the response is to.
    """

    prompt: Tensor
    distance: Tensor
    weighted: Tensor


def analyze(context: AnalysisContext, top: int = TOP, metric: str = "euclidean") -> Found:
    """Distances between the most likely candidates of each model, on its own responses and on the reference's."""
    policies = context.chosen
    start = context.answers(policies[0], BEFORE)
    if metric not in METRICS:
        raise OptionError(f"--metric {metric} must be {' or '.join(METRICS)}")
    vocabulary = len(input_embeddings(context.reference))
    if top > vocabulary:
        raise OptionError(f"--top {top} exceeds the vocabulary ({vocabulary} tokens)")
    context.say(f"candidates of {REFERENCE}")
    own = {REFERENCE: _measure(context, context.reference, start, METRICS[metric], top)}
    shared = dict(own)
    for policy in policies:
        context.say(f"candidates of {policy}")
        model = context.run.load(policy)
        own[policy] = _measure(context, model, context.answers(policy), METRICS[metric], top)
        shared[policy] = _measure(context, model, start, METRICS[metric], top)
    data = (
        {"model": name, "text": text, "number": number, "distance": six_digits(one), "weighted": six_digits(weighted)}
        for text, group in (("own", own), ("reference", shared))
        for name, found in group.items()
        for number, one, weighted in zip(
            found.prompt.tolist(), found.distance.tolist(), found.weighted.tolist(), strict=True
        )
    )
    return coherence_finding(own, shared, metric, top, context.settings()), data


def _measure(context: AnalysisContext, model: Any, answers: Sequence[Any], metric: Metric, top: int) -> Candidates:
    """The candidates of a model at every token of answers, by the reference's embeddings."""
    embeddings = input_embeddings(context.reference)
    numbers = torch.tensor([answer.number for answer in answers], device=context.run.device)
    parts = [
        (numbers[part.answer], *candidate_distances(part.policy, embeddings, metric, top))
        for part in positions(model, model, answers, batch_size=context.batch_size)
    ]
    return Candidates(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))


@torch.no_grad()
def candidate_distances(logits: Tensor, embeddings: Tensor, metric: Metric, top: int = TOP) -> tuple[Tensor, Tensor]:
    """Plain and weighted mean distance between the ``top`` most likely tokens: logits ``(P, V)`` to two ``(P,)``."""
    if not 2 <= top <= logits.shape[-1]:
        raise ValueError(f"top={top} candidates; it must be from 2 to the vocabulary's {logits.shape[-1]} tokens")
    log_p = logits.float().log_softmax(-1)
    found = []
    for part in log_p.split(_AT_ONCE):
        values, ids = part.topk(top, dim=-1)
        rows = embeddings[ids].to(working_dtype(embeddings))
        distance = metric.pairwise(rows, rows)
        first, second = torch.triu_indices(top, top, 1, device=logits.device)
        pairs = distance[:, first, second]
        # Relative to the largest: the product of two small probabilities vanishes in float32, their ratios do not.
        log_weight = values[:, first] + values[:, second]
        weight = (log_weight - log_weight.amax(-1, keepdim=True)).exp()
        found.append(torch.stack([pairs.mean(-1), (weight * pairs).sum(-1) / weight.sum(-1)]))
    plain, weighted = torch.cat(found, -1)
    return plain, weighted


def coherence_finding(
    own: Mapping[str, Candidates],
    shared: Mapping[str, Candidates],
    metric: str,
    top: int,
    settings: Mapping[str, Any] | None = None,
) -> Finding:
    """The finding on models by name, the reference first. own: on each model's own responses, as the paper has it.
    shared: all models on the reference's responses, which leaves out that policies write other texts.
    """
    reference = next(iter(own))
    rows: list[list[Cell]] = []
    drawn = []
    means: dict[tuple[str, str, str], Estimate] = {}
    differences: dict[tuple[str, str], dict[str, Estimate]] = {}
    for text, group in ((OWN, own), (SHARED, shared)):
        sums = {(model, key): _sums(found, key) for model, found in group.items() for key in MEASURES}
        means |= {(text, *which): _mean(found) for which, found in sums.items()}
        for key in MEASURES:
            differences[text, key] = {model: _difference(sums[model, key], sums[reference, key])
                                      for model in group if model != reference}  # fmt: skip
        for model, found in group.items():
            cells = [means[text, model, key] for key in MEASURES]
            over = [differences[text, key].get(model) for key in MEASURES]
            rows.append(
                [
                    model, text, len(found.prompt.unique()), len(found.prompt),
                    *(cell for one in cells for cell in one.cells),
                    *(cell for one in over for cell in (one.cells if one else (None, None, None))),
                ]
            )  # fmt: skip
        drawn.append(series(text, list(group), [means[text, model, "distance"] for model in group]))
    return Finding(
        name="coherence",
        title=f"Coherence of the {top} most likely candidates",
        text=_summary(own, {name: means[OWN, name, "distance"] for name in own}, differences, metric, top),
        columns=[column.format(reference=reference) for column in COLUMNS],
        rows=rows,
        figures=[
            Figure(
                "scatter", f"Mean distance between the {top} most likely tokens", "model", f"{metric} distance", drawn,
                name="distances", note="Smaller is more coherent. Bars are 95% intervals; the table has differences.",
            )
        ],
        settings={"top": top, "metric": metric, **(settings or {})},
    )  # fmt: skip


def _sums(found: Candidates, key: str) -> dict[int, Tensor]:
    """By prompt: the sum over its tokens and how many they are, ``(2,)``."""
    values = getattr(found, key).double()
    prompts, of_group = found.prompt.unique(return_inverse=True)
    sums = torch.zeros(len(prompts), 2, dtype=torch.float64)
    sums.index_add_(0, of_group, torch.stack([values, torch.ones_like(values)], -1))
    return dict(zip(prompts.tolist(), sums, strict=True))


def _over_tokens(sums: Tensor) -> Tensor:
    """Means ``(...)`` of sums and counts ``(..., G, 2)`` of groups."""
    total = sums.sum(-2)
    return total[..., 0] / total[..., 1]


def _mean(by_prompt: Mapping[int, Tensor]) -> Estimate:
    """The mean over all tokens, with its interval over prompts."""
    sums = torch.stack(list(by_prompt.values()))
    drawn = bootstrap(lambda chosen: _over_tokens(sums[chosen]), len(sums))
    return Estimate(float(_over_tokens(sums)), *(interval(drawn) if len(sums) > 2 else ()))


def _difference(ours: Mapping[int, Tensor], theirs: Mapping[int, Tensor]) -> Estimate:
    """The difference of means on the prompts that both have, drawn alike for both."""
    both = [prompt for prompt in ours if prompt in theirs]
    if not both:
        return Estimate(math.nan)
    one, other = (torch.stack([side[prompt] for prompt in both]) for side in (ours, theirs))
    drawn = bootstrap(lambda chosen: _over_tokens(one[chosen]) - _over_tokens(other[chosen]), len(both))
    value = float(_over_tokens(one) - _over_tokens(other))
    return Estimate(value, *(interval(drawn) if len(both) > 2 else ()))


def _summary(
    own: Mapping[str, Candidates],
    means: Mapping[str, Estimate],
    differences: Mapping[tuple[str, str], Mapping[str, Estimate]],
    metric: str,
    top: int,
) -> list[str]:
    reference = next(iter(own))
    listed = "; ".join(f"{name} {mean}" for name, mean in means.items())
    sentences = [
        f"At every token of each model's own held-out responses, the mean {metric} distance between its {top} "
        f"most likely candidates, in the embeddings of the model that all started from: {listed}.",
        "Smaller is more coherent. Rows on the reference's responses hold the text fixed, so that they show what "
        "training did to the candidates rather than to the text.",
    ]
    for (text, key), found in differences.items():
        name = "on own responses" if text == OWN else f"on {reference}'s responses"
        name = f"weighted by probability, {name}" if key == "weighted" else name
        sides = {
            "smaller": [f"{model} {one}" for model, one in found.items() if one.high < 0],
            "larger": [f"{model} {one}" for model, one in found.items() if one.low > 0],
        }
        said = [f"{side} than {reference}: {'; '.join(models)}" for side, models in sides.items() if models]
        if found:
            sentences.append(f"Prompt by prompt, {name}: {'. '.join(said) or f'none can be told from {reference}'}.")
    prompts = [set(one.prompt.tolist()) for one in own.values()]
    if any(one != prompts[0] for one in prompts):
        sentences.append(
            "Not all models answered the same prompts, which by itself moves the means; differences are over the "
            "prompts that both answered."
        )
    return sentences
