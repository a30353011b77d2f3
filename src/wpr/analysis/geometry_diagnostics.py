"""Can a setting see meaning at all? lam * cost over a model's vocabulary, and the verdict.

Notation for shapes: ``N`` positions of the model's continuations, ``V`` vocabulary, ``n`` pairs of tokens.

A Wasserstein penalty knows two tokens as near only if its solver can move mass between them, that is if the kernel
exp(-lam C) is not lost beside what else the solver does with that mass. How far it reaches, in units of lam * C:

    balanced     min( -log floor, 4 T )      below the floor the kernel vanishes in the sum; T iterations act on an
                                             isolated token like unbalanced marginals of rho = 2 T / lam
    unbalanced   2 lam rho                   beyond it, destroying and creating mass is cheaper than moving it

Three kinds of pairs are counted: each live token and its nearest neighbour, random pairs of live tokens, and *probable
moves*: pairs of the ten most likely candidates at positions of the model's own continuations, weighted by the product
of their probabilities.

The verdict has two grounds: the share of probable moves within reach, and the semantic contrast (`semantic_contrast`),
the ratio between the penalty of moving mass to the nearest neighbour and to an unrelated token of the same probability,
through the whole regularizer, at positions where the model is sure of a token:

    sees meaning     contrast < 0.9
    blind            contrast >= 0.98, as under KL, and less than 10% of probable moves within reach
    partly blind     what lies between

Where the model is sure of no token in its continuations, the contrast cannot be measured, and the setting is called
blind if less than 1% of probable moves are within reach; otherwise nothing is said.

The contrast is measured in the model's own embedding: it says that the setting follows its distances, not that these
know what may stand for a word. Where an encoder is given, that is asked too (`screen`): what the setting's distances
know of similarity in context beyond the odds. A setting sees meaning if that interval lies above 0; else the verdict is

    sees distances, which know no meaning in context             the interval ends below `LITTLE`
    sees distances; of meaning in context too little is known    it is wider: judge more texts
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wpr.analysis.context import AnalysisContext, Found, noted
from wpr.analysis.screen import InContext
from wpr.analysis.semantic_contrast import (
    SURE,
    chat_prompts,
    continuations,
    contrast,
    gaps,
    make_trial,
    plain_prompts,
)
from wpr.analysis.statistics import Estimate, quantiles
from wpr.errors import OptionError
from wpr.findings import Cell, Figure, Finding, Mark, Series
from wpr.model_geometry import RegularizerFactory, parse_option
from wpr.regularizers import Wasserstein
from wpr.regularizers.wasserstein_settings import PRESETS
from wpr.transport.geometry import TokenGeometry, to_power
from wpr.transport.precision import full_precision
from wpr.transport.support import working_dtype

SEES, BLIND = 0.9, 0.98
"""Contrasts below and from which the verdict is clear."""

FEW, NEXT_TO_NONE = 0.1, 0.01
"""Shares of probable moves."""

DISTANCES = "sees distances, which know no meaning in context"
UNTOLD = "sees distances; of meaning in context too little is known"
LITTLE = 0.1
"""A correlation below which distances are said to know nothing."""

TEXTS = (
    "The best way to learn a new language is",
    "Once upon a time, there was a little",
    "She opened the door of the old house and",
    "In the morning we went to the market to buy",
    "The main difference between cats and dogs is that",
    "My brother works as a teacher at a",
    "It was raining all day, so the children",
    "To make a good soup you need",
)
"""What a model continues where no texts are given: everyday English that any model has met."""

RANDOM_PAIRS, CANDIDATES, BINS = 20_000, 10, 40
_SLACK = 1e-5
"""Relative; the radius is the cost to a token as another formula rounds it."""

COLUMNS = [
    "setting", "verdict", "metric", "lam", "reach", "lam * cost of neighbours: 5%", "median", "95%", "random: median",
    "tokens with a neighbour within reach", "by use", "probable moves within reach",
    "contrast", "low", "high", "beyond the odds", "beyond low", "beyond high",
]  # fmt: skip


@dataclass(frozen=True)
class GeometryDiagnostics:
    """What a setting can tell apart.

    neighbours, random: ``(n,)`` values of lam * cost. use: ``(n,)`` how often the model emits the token whose nearest
    neighbour it is. moves, weights: ``(n,)`` values of probable moves, infinite for tokens that are not among each
    other's k1 nearest, and how probable each is.
    reach: of lam * cost, beyond which nothing is moved.
    contrast: with its interval; None where it could not be measured.
    beyond_odds: what its distances know of similarity in context beyond the odds; None where no encoder was given.
    """

    neighbours: Tensor
    use: Tensor
    random: Tensor
    moves: Tensor
    weights: Tensor
    reach: float
    contrast: tuple[float, float, float] | None
    beyond_odds: Estimate | None = None

    @property
    def near_share(self) -> float:
        """Tokens whose nearest neighbour lies within reach."""
        return float((self.neighbours < self.reach).double().mean())

    @property
    def used_share(self) -> float:
        """The same, each token counting as often as the model emits it."""
        return _share(self.neighbours < self.reach, self.use)

    @property
    def move_share(self) -> float:
        """Probable moves within reach, by weight; NaN where there are none."""
        return _share(self.moves < self.reach, self.weights)

    @property
    def cut_share(self) -> float:
        """Probable moves between tokens that are not among each other's nearest, by weight."""
        return _share(self.moves.isinf(), self.weights)

    @property
    def verdict(self) -> str:
        """``blind``, ``partly blind``, ``sees meaning``, `DISTANCES`, `UNTOLD`, ``not measured``: the module's rule."""
        if self.contrast is None or math.isnan(self.contrast[0]):
            return "blind" if self.move_share < NEXT_TO_NONE else "not measured"
        if self.contrast[0] < SEES:
            if self.beyond_odds is None or self.beyond_odds.low > 0:
                return "sees meaning"
            return DISTANCES if self.beyond_odds.high < LITTLE else UNTOLD
        return "blind" if self.contrast[0] >= BLIND and self.move_share < FEW else "partly blind"


def analyze(
    context: AnalysisContext,
    settings: Sequence[str] = tuple(PRESETS),
    changes: Mapping[str, Any] | None = None,
    texts: Sequence[str] = (),
    in_context: InContext | None = None,
) -> Found:
    """What settings see of the vocabulary of a run's SFT model, which continues the run's held-out prompts or
    ``texts``.
    """
    prompts = prompts_of(context.run.tokenizer, texts) if texts else context.texts()
    prompts = prompts or prompts_of(context.run.tokenizer)
    name = f"{context.run.path.resolve().name}'s SFT model"
    return analyze_model(context.regularizers, prompts, name, settings, changes, in_context)


def analyze_model(
    factory: RegularizerFactory,
    prompts: Sequence[Tensor],
    name: str,
    settings: Sequence[str] = tuple(PRESETS),
    changes: Mapping[str, Any] | None = None,
    in_context: InContext | None = None,
) -> Found:
    """What settings see of the vocabulary of the factory's model.

    prompts: token ids ``(T,)`` of texts that the model continues. settings: as `RegularizerSpec.parse` reads them, with
    ``changes`` made in each of them.
    """
    made = {}
    for text in settings:
        if parse_option(text).name != "wasserstein" or parse_option(text).weight != 1:
            raise OptionError(
                f"--setting {text} has no geometry by itself; name Wasserstein settings, as paper or semantic"
            )
        given = {key: value for key, value in (changes or {}).items() if value is not None}
        label = ":".join(filter(None, [text, ",".join(f"{key}={value}" for key, value in given.items())]))
        made[label] = factory.make(parse_option(text, **given), label)
    logs = continuations(factory.reference, prompts, 24)
    diagnosed = {label: (wasserstein, diagnose(wasserstein, logs)) for label, wasserstein in made.items()}
    if in_context is not None:
        diagnosed = {
            label: (one, replace(seen, beyond_odds=in_context.beyond_odds(one.geometry)))
            for label, (one, seen) in diagnosed.items()
        }
    about = {"prompts": len(prompts), "positions": len(logs), "settings": list(settings)}
    return noted(geometry_finding(diagnosed, name, about), *factory.notes(made)), _by_pairs(diagnosed)


def prompts_of(tokenizer: Any, texts: Sequence[str] = ()) -> list[Tensor]:
    """Token ids of texts (`TEXTS` without any), as a user's turn where the tokenizer has a chat template."""
    if getattr(tokenizer, "chat_template", None):
        return chat_prompts(tokenizer, texts or TEXTS)
    return [ids for ids in plain_prompts(tokenizer, texts or TEXTS) if len(ids)]


def _by_pairs(diagnosed: Mapping[str, tuple[Wasserstein, GeometryDiagnostics]]) -> Iterator[dict[str, Any]]:
    for name, (_, seen) in diagnosed.items():
        for kind in ("neighbours", "random", "moves"):
            yield {"setting": name, "pairs": kind, "lam * cost": _five_digits(getattr(seen, kind))}
        yield {"setting": name, "pairs": "moves", "weights": _five_digits(seen.weights)}


def _five_digits(values: Tensor) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]


def reach_of(wasserstein: Wasserstein) -> float:
    """The largest lam * cost over which the setting moves mass, by the module's rule."""
    s = wasserstein.settings
    if s.marginals == "unbalanced":
        return 2 * s.lam * s.rho
    return min(4.0 * s.iterations, -math.log(s.floor) if s.floor > 0 else math.inf)


@torch.no_grad()
def diagnose(wasserstein: Wasserstein, reference: Tensor, positions: int = 128, seed: int = 0) -> GeometryDiagnostics:
    """What a regularizer sees on its geometry, at ``reference`` ``(N, V)`` log-probabilities of the model's
    continuations.
    """
    geometry, s = wasserstein.geometry, wasserstein.settings
    unit = s.lam / (geometry.scale if s.scaled else 1.0)
    alive = geometry.alive.nonzero().squeeze(-1)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(alive), (2, RANDOM_PAIRS), generator=generator).to(alive.device)
    first, second = (alive[row] for row in drawn[:, drawn[0] != drawn[1]])
    log_p, ids = reference.topk(min(CANDIDATES, geometry.vocabulary), dim=-1)
    i, j = torch.triu_indices(ids.shape[1], ids.shape[1], 1, device=ids.device)
    one, other = ids[:, i].flatten(), ids[:, j].flatten()
    moves = pair_costs(geometry, one, other)
    reach = torch.maximum(geometry.radius[one], geometry.radius[other]) * (1 + _SLACK)
    kept = (moves <= to_power(reach, geometry.power)) & geometry.mapped[one] & geometry.mapped[other]
    moves = moves.masked_fill(~kept, torch.inf)
    weights = (log_p[:, i] + log_p[:, j]).exp().flatten()
    sure = (reference.amax(-1).exp() > SURE) & geometry.alive[reference.argmax(-1)]
    measured = None
    if sure.any():
        measured = contrast(*gaps(wasserstein, make_trial(reference, geometry, positions, seed)), seed=seed)
    return GeometryDiagnostics(
        (geometry.nearest[geometry.alive] * unit).cpu(),
        reference.exp().mean(0)[geometry.alive].double().cpu(),
        (pair_costs(geometry, first, second) * unit).cpu(),
        (moves * unit).cpu(),
        weights.double().cpu(),
        reach_of(wasserstein),
        measured,
    )


def pair_costs(geometry: TokenGeometry, first: Tensor, second: Tensor) -> Tensor:
    """Costs of pairs of tokens ``(n,)`` and ``(n,)``, not divided by the scale, whether or not they are among each
    other's nearest: ``(n,)``.
    """
    rows = geometry.embeddings
    found = []
    with full_precision(rows.device):
        for one, other in zip(first.split(4096), second.split(4096), strict=True):
            x, y = (rows[ids].to(working_dtype(rows)).unsqueeze(-2) for ids in (one, other))
            found.append(geometry.metric.pairwise(x, y).flatten())
    return to_power(torch.cat(found), geometry.power)


def geometry_finding(
    diagnosed: Mapping[str, tuple[Wasserstein, GeometryDiagnostics]],
    model: str,
    settings: Mapping[str, Any] | None = None,
) -> Finding:
    """The finding on settings by name."""
    rows: list[list[Cell]] = []
    text: list[str] = []
    for name, (wasserstein, seen) in diagnosed.items():
        near = quantiles(seen.neighbours, (0.05, 0.5, 0.95))
        value, low, high = seen.contrast or (None, None, None)
        beyond = (None, None, None) if seen.beyond_odds is None else seen.beyond_odds.cells
        rows.append(
            [
                name, seen.verdict, wasserstein.geometry.metric.name, wasserstein.settings.lam, seen.reach, *near,
                quantiles(seen.random, (0.5,))[0], seen.near_share, seen.used_share, seen.move_share,
                value, low, high, *beyond,
            ]
        )  # fmt: skip
        text += _summary(name, wasserstein, seen, near)
    geometry = next(iter(diagnosed.values()))[0].geometry
    dead, alone = int((geometry.mapped & ~geometry.alive).sum()), int((~geometry.mapped).sum())
    if alone:
        text.append(f"{alone} tokens without an embedding have no neighbours and are not counted.")
    if dead:
        text.append(f"{dead} tokens that are near-duplicates of others (untrained or reserved) are not counted.")
    return Finding(
        name="geometry",
        title=f"What settings can see of {model}'s vocabulary",
        text=text,
        columns=COLUMNS,
        rows=rows,
        figures=[_histogram(name, seen) for name, (_, seen) in diagnosed.items()],
        settings={"model": model, **(settings or {})},
    )


def _summary(name: str, wasserstein: Wasserstein, seen: GeometryDiagnostics, near: Sequence[float]) -> list[str]:
    s = wasserstein.settings
    verdict = {
        "blind": f"{name} is BLIND to meaning on this model.",
        "partly blind": f"{name} is PARTLY BLIND to meaning on this model.",
        "sees meaning": f"{name} SEES MEANING on this model.",
        DISTANCES: f"{name} SEES DISTANCES on this model, WHICH KNOW NO MEANING IN CONTEXT.",
        UNTOLD: f"{name} SEES DISTANCES on this model; whether they know meaning in context could NOT BE TOLD: judge "
        "more texts.",
        "not measured": f"Whether {name} sees meaning on this model was NOT MEASURED.",
    }[seen.verdict]
    sentences = [
        f"{verdict} The nearest neighbour of a token lies at lam * cost = {near[1]:.3g} in the median ({near[0]:.3g} "
        f"to {near[2]:.3g} for 90% of the tokens), where the kernel exp(-lam C) is {_power(near[1])}. The setting "
        f"moves mass up to lam * cost = {seen.reach:.3g}. Within that reach lie {seen.near_share:.1%} of the tokens' "
        f"nearest neighbours ({seen.used_share:.1%} if tokens count as often as the model emits them) and "
        f"{seen.move_share:.1%} of probable moves (pairs of likely candidates of one position, by probability)."
    ]
    if seen.cut_share >= NEXT_TO_NONE:
        sentences.append(
            f"{seen.cut_share:.1%} of probable moves are between tokens that are not among each other's "
            f"{wasserstein.geometry.neighbours} nearest (k1) and cannot be made at any lam."
        )
    if seen.beyond_odds is not None:
        sentences.append(
            "In context: what an encoder says of other words in a word's place correlates with these distances, "
            f"beyond what the model's odds explain, by {seen.beyond_odds} (1: in full agreement, 0: no more than the "
            "odds). `wpr analyze substitution` shows what comes of it."
        )
    if seen.contrast is None:
        sentences.append(
            "The semantic contrast could not be measured: the model is sure of no token in its continuations. Give "
            "texts of the kind it was trained on with --text."
        )
        return sentences
    value, low, high = seen.contrast
    sentences.append(
        f"Semantic contrast {value:.3f} (95% interval {low:.3f} to {high:.3f}): moving probability to a token's "
        f"nearest neighbour costs {value:.1%} of what moving it to an unrelated token of the same probability "
        "costs. KL and every other f-divergence have 100%."
    )
    if seen.verdict == "blind" and s.marginals == "balanced" and seen.near_share < NEXT_TO_NONE:
        sentences.append(
            "With no kernel between different tokens the penalty is a rescaled KL with a small entropy term, "
            f"phi = (1/lam) (T log(a/b) + log b) with T = {s.iterations}: it cannot know what tokens mean. Divide "
            f"costs by the vocabulary's median nearest-neighbour distance ({wasserstein.geometry.scale:.3g} here, "
            "scale=median-nn) and lower lam, as preset=unbalanced does."
            if not s.scaled
            else "No kernel is left between different tokens: lower lam."
        )
    return sentences


def _share(chosen: Tensor, weights: Tensor) -> float:
    """The weight of what is chosen; NaN where there is no weight at all."""
    total = float(weights.sum())
    return float(weights[chosen].sum()) / total if total else math.nan


def _power(exponent: float) -> str:
    """``exp(-exponent)`` to read, however small it is."""
    if exponent < 30:
        return f"{math.exp(-exponent):.2g}"
    return f"1e-{exponent / math.log(10):.0f}"


def _histogram(name: str, seen: GeometryDiagnostics) -> Figure:
    highest = max(
        float(torch.quantile(seen.random, 0.995)),
        1.15 * min(seen.reach, float(seen.random.max()) * 1.2),
    )
    edges = torch.linspace(0, highest, BINS + 1, dtype=torch.float64)
    kinds = {
        "nearest neighbours": (seen.neighbours, torch.ones_like(seen.neighbours)),
        "probable moves": (seen.moves, seen.weights),
        "random pairs": (seen.random, torch.ones_like(seen.random)),
    }
    series = []
    for kind, (values, weights) in kinds.items():
        values, weights = values[values.isfinite()], weights[values.isfinite()]
        place = torch.bucketize(values.double().clamp_max(highest * (1 - 1e-9)), edges[1:-1])
        counts = torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, weights.double())
        series.append(Series(kind, edges.tolist(), (counts / counts.sum().clamp_min(1e-300)).tolist()))
    marks = [Mark(seen.reach, "reach", "x")] if seen.reach <= highest else []
    note = "Left of the reach the setting moves mass; right of it tokens are strangers, however alike they are."
    if not marks:
        note = f"The reach, {seen.reach:.3g}, lies to the right of all of them."
    return Figure("histogram", f"{name}: lam * cost", "lam * cost", "share", series, marks=marks, note=note)
