"""Which geometry knows what may stand for a word in its context?

Notation for shapes: ``P`` positions, ``n`` support entries, ``V`` vocabulary, ``d`` embedding size.

At positions of real text where a word is expected (`word_positions`), an independent encoder says how alike the text is
with each of some candidates in the word's place: the `LIKELY` likeliest and as many others drawn at random from the
support. Within each position, ranks of that similarity are correlated with ranks of

    odds         log-probability of the candidate under the reference, all that f-divergences know
    a geometry   minus the distance between candidate and word

alone, beyond the odds (the partial correlation: what the geometry adds), and together (the sum of both, each with mean
0 and variance 1 within the position). Means over positions; intervals by drawing texts again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wpr.analysis.in_context import similarities
from wpr.analysis.statistics import Estimate, grouped_mean, partial, spearman
from wpr.analysis.word_positions import WordPositions, find_positions, opening_of
from wpr.errors import OptionError
from wpr.evaluation.encoders import SentenceEncoder, TextEncoder
from wpr.language_models import hidden_states, logits_of, pad
from wpr.model_geometry import RegularizerFactory
from wpr.regularizers.spec import RegularizerSpec
from wpr.regularizers.sums import transports_of
from wpr.transport.distances import Metric, resolve_metric
from wpr.transport.geometry import TokenGeometry
from wpr.transport.precision import full_precision
from wpr.transport.support import working_dtype
from wpr.transport.transforms import fit

LIKELY = 12
"""Candidates of a position by their odds, and as many by chance."""

FEWEST = 8
"""Candidates of a position without which it does not count."""

ODDS = "odds"


@dataclass(frozen=True)
class Screened:
    """What one score knows of similarity: alone, beyond the odds, and together with them."""

    alone: Estimate
    beyond_odds: Estimate
    with_odds: Estimate


def candidates(words: WordPositions, seed: int = 0) -> Tensor:
    """Entries that are judged: ``(P, n)``."""
    order = words.log_reference.masked_fill(~words.allowed, -torch.inf)
    likely = order.topk(min(LIKELY, order.shape[-1])).indices
    chosen = torch.zeros_like(words.allowed).scatter(-1, likely, True) & words.allowed
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(order.shape, generator=generator).masked_fill(chosen | ~words.allowed, -1)
    drawn = chance.topk(min(LIKELY, order.shape[-1])).indices
    return chosen | (torch.zeros_like(chosen).scatter(-1, drawn, True) & words.allowed)


@dataclass(frozen=True)
class InContext:
    """What `screen` is made of: positions where words are expected, and the similarity ``(P, n)`` of candidates, NaN
    for other entries.
    """

    words: WordPositions
    similarity: Tensor

    @classmethod
    def judged_by(cls, encoder: str, model: Any, tokenizer: Any, texts: Sequence[str], positions: int) -> InContext:
        """By a sentence encoder's folder."""
        judge = SentenceEncoder.from_pretrained(encoder, next(model.parameters()).device)
        return cls.of(find_positions(model, tokenizer, texts, positions), judge)

    @classmethod
    def of(cls, words: WordPositions, encoder: TextEncoder) -> InContext:
        """Candidates of these positions."""
        return cls(words, similarities(words, candidates(words), encoder))

    def beyond_odds(self, geometry: TokenGeometry) -> Estimate:
        """What a geometry's distances know beyond the odds."""
        return screen(self, {"distance": scores_of(self.words, geometry)})["distance"].beyond_odds


def screen(judged: InContext, scores: Mapping[str, Tensor]) -> dict[str, Screened]:
    """What scores ``(P, n)`` know of the similarity of candidates. The odds come first."""
    words, similarity = judged.words, judged.similarity
    scores = {ODDS: words.log_reference, **scores}
    found: dict[str, list[list[float]]] = {name: [] for name in scores}
    for p in range(len(words)):
        chosen = ~similarity[p].isnan()
        target, odds = similarity[p, chosen], words.log_reference[p, chosen]
        for name, score in scores.items():
            here = score[p, chosen]
            enough = int(chosen.sum()) >= FEWEST and not here.isnan().any()
            found[name].append(_correlations(here, target, odds, name) if enough else [torch.nan] * 3)
    groups = torch.tensor([position.text for position in words.positions])
    columns = {name: torch.tensor(rows, dtype=torch.float64).unbind(-1) for name, rows in found.items()}
    return {name: Screened(*(grouped_mean(values, groups) for values in three)) for name, three in columns.items()}


def _correlations(score: Tensor, target: Tensor, odds: Tensor, name: str) -> list[float]:
    both = _standard(score) + _standard(odds)
    beyond = torch.nan if name == ODDS else float(partial(score, target, odds))
    return [float(spearman(score, target)), beyond, float(spearman(both, target))]


def _standard(values: Tensor) -> Tensor:
    values = values.double()
    return (values - values.mean()) / values.std().clamp_min(1e-12)


def distance_scores(
    words: WordPositions, rows: Tensor, metric: Metric, power: float = 1.0, mapped: Tensor | None = None
) -> Tensor:
    """Minus the cost of each entry from the word, by embeddings ``(V, d)`` as a geometry has them: ``(P, n)``.

    mapped: ``(V,)``, tokens that the embeddings have a row for. Others are farthest; where the word itself is one, all
    are NaN.
    """
    found = []
    with full_precision(rows.device):
        for ids, original in zip(words.ids.to(rows.device), words.original.to(rows.device), strict=True):
            there, here = (rows[index].to(working_dtype(rows)) for index in (ids.clamp_min(0), original.unsqueeze(0)))
            found.append(-metric.pairwise(here, there).squeeze(0).pow(power))
    scores = torch.stack(found).double().cpu()
    if mapped is None:
        return scores
    mapped = mapped.cpu()
    there = mapped[words.ids.clamp_min(0)]
    scores = torch.where(there, scores, scores.masked_fill(~there, 0).amin(-1, keepdim=True))
    return scores.masked_fill(~mapped[words.original].unsqueeze(-1), torch.nan)


def geometry_scores(words: WordPositions, regularizers: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the geometries in regularizers know, each once, by metric and transform; the regularizer's name is added
    where that does not tell them apart.
    """
    found: dict[str, Tensor] = {}
    seen: list[TokenGeometry] = []
    for label, regularizer in regularizers.items():
        for transport in transports_of(regularizer):
            geometry = transport.geometry
            if any(geometry is one for one in seen):
                continue
            seen.append(geometry)
            name = geometry.metric.name + ("" if geometry.transform.is_identity else f", {geometry.transform.text}")
            name = name if name not in found else f"{name} of {label}"
            found[name] = scores_of(words, geometry)
    return found


def scores_of(words: WordPositions, geometry: TokenGeometry) -> Tensor:
    """`distance_scores` of a geometry."""
    return distance_scores(words, geometry.embeddings, geometry.metric, geometry.power, geometry.mapped)


def settings_scores(text: str, words: WordPositions, factory: RegularizerFactory) -> Tensor:
    """What a geometry of these settings knows; its vocabulary need not be measured."""
    try:
        costs = RegularizerSpec.parse(f"unbalanced:{text}").costs  # distances as they are, unless it says otherwise
    except (TypeError, ValueError) as error:
        raise OptionError(f"--geometry {text}: {error}") from None
    rows = factory.embeddings(costs.embeddings, text)
    known = rows.weight if rows.mapped is None else rows.weight[rows.mapped]
    transformed = fit(costs.transform, known)(rows.weight)
    return distance_scores(words, transformed, resolve_metric(costs.metric), costs.power, rows.mapped)


@torch.no_grad()
def contextual_scores(words: WordPositions, wanted: Tensor, model: Any) -> dict[str, Tensor]:
    """What the reference itself makes of a candidate: minus the distances between it and the word of the last hidden
    states after them (cosine), and of the next-token distributions (Hellinger): ``(P, n)`` each, 0 for entries that are
    not wanted. It takes a forward pass for each candidate.
    """
    opening = opening_of(words.tokenizer)
    device = next(model.parameters()).device
    states_score, next_score = (torch.zeros(wanted.shape, dtype=torch.float64) for _ in range(2))
    for p, position in enumerate(words.positions):
        entries = wanted[p].nonzero().squeeze(-1)
        start = [*opening, *words.tokenizer(position.before, add_special_tokens=False)["input_ids"]]
        tokens = [int(words.original[p]), *words.ids[p, entries].tolist()]
        states = hidden_states(model, *pad([[*start, token] for token in tokens], device=device))[:, -1]
        roots = (logits_of(model, states).double().log_softmax(-1) / 2).exp()
        unit = torch.nn.functional.normalize(states.double(), dim=-1)
        states_score[p, entries] = (unit[1:] @ unit[0]).cpu()
        next_score[p, entries] = (roots[1:] @ roots[0]).cpu()
    return {"hidden state after it": states_score, "next tokens after it": next_score}
