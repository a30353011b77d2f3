"""Where does probability go when a reward forbids the word that the reference would write? Exact optima, no training.

Notation for shapes: ``P`` positions, ``n`` support entries.

At positions of real text where a word is expected (`word_positions`) every form of the word has reward -1 and all other
tokens 0. For each regularizer D the policy that maximises

    E[r] - beta D(p, q)

is computed (`exact_optimum`), at the beta whose expected reward, in the mean over positions, is the target, the same
for all. Every f-divergence keeps the reference's odds among tokens of equal reward, so that for all of them one and the
same thing stands in the word's place, the *odds*. A geometry can do better or worse. Measured of the policy's choice
among the tokens that are not forbidden, p(i | allowed), in the mean over positions:

    similarity       to the original text, by an independent encoder (`in_context`)
    nll              of the replacement under the reference, -sum_i p(i | allowed) log q_i
    nll of another   the same under another language model
    KL               of the whole policy from the reference

with the differences to the odds and their intervals, by drawing texts again. Only the `JUDGED` likeliest replacements
of each policy, and those of the others, are judged, and its choice among these is taken for the whole, in both nll too;
the least share of the choice that they are is reported. The rest of the vocabulary, outside of the support, is left
out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wpr.analysis.context import AnalysisContext, Found, noted
from wpr.analysis.exact_optimum import Optimum, SupportRegularizer, at_reward
from wpr.analysis.in_context import similarities, word_nll
from wpr.analysis.screen import ODDS as ODDS_SCORE
from wpr.analysis.screen import (
    InContext,
    Screened,
    candidates,
    contextual_scores,
    geometry_scores,
    screen,
    settings_scores,
)
from wpr.analysis.statistics import Estimate, grouped_mean, series
from wpr.analysis.word_positions import WordPositions, find_positions
from wpr.errors import OptionError, UnavailableError
from wpr.evaluation.encoders import SentenceEncoder
from wpr.findings import Cell, Figure, Finding, Mark
from wpr.model_geometry import RegularizerFactory
from wpr.model_loading import load_any_causal, load_tokenizer
from wpr.regularizers.spec import RECOMMENDED
from wpr.regularizers.sums import Sum
from wpr.regularizers.wasserstein import Wasserstein
from wpr.runs.responses import BEFORE

JUDGED = 16
REWARD = -0.15
"""The expected reward at which regularizers are compared: a forbidden word in 15 of 100 positions, from about 60."""

GAP = 1e-5
"""How far an optimum should be from the best there is, in units of reward; the text says where it is farther."""

ROUNDING = 1e-9
"""Differences of similarity that are none."""

ODDS = "reverse-kl"
"""Stands for all f-divergences."""

NAMES = ("unbalanced", "semantic", RECOMMENDED)
TOLERANCE, ITERATIONS = 1e-10, 1000

COLUMNS = [
    "regularizer", "beta", "reward", "gap", "similarity", "minus odds", "low", "high", "better at", "nll",
    "nll minus odds", "nll of another", "another minus odds", "another low", "another high", "KL", "judged",
]  # fmt: skip


@dataclass(frozen=True)
class Judge:
    """Who says what stands well in a text: an encoder, and another language model with its tokenizer, if any."""

    encoder: SentenceEncoder
    other: tuple[Any, Any] | None = None


@dataclass(frozen=True)
class Measured:
    """One regularizer: its optimum, and by position ``(P,)`` what stands in the word's place."""

    optimum: Optimum
    choice: Tensor
    similarity: Tensor
    nll: Tensor
    other_nll: Tensor
    kl: Tensor
    judged: float


def measure(
    words: WordPositions,
    regularizers: Mapping[str, SupportRegularizer],
    judge: Judge,
    reward: float = REWARD,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Measured], dict[str, str]]:
    """What each regularizer puts in the words' place; and of those that have no optimum at this reward, why."""
    rewards = -words.forbidden.double()
    optima: dict[str, Optimum] = {}
    left_out: dict[str, str] = {}
    for name, regularizer in regularizers.items():
        try:
            found = optima[name] = _solved(regularizer, words, rewards, reward)
        except ValueError as error:
            if not optima:
                raise OptionError(f"--reward {reward}: {error}") from None
            left_out[name] = str(error)  # the others may still be had
            continue
        say(f"{name}: beta {found.beta:.3g}, gap {float(found.gap.max()):.1e}")
    choices = {name: words.replacements(found.log_policy) for name, found in optima.items()}
    wanted = torch.zeros_like(words.allowed)
    for choice in choices.values():
        wanted |= torch.zeros_like(wanted).scatter(-1, choice.topk(min(JUDGED, choice.shape[-1])).indices, True)
    wanted &= words.allowed
    say(f"judging {int(wanted.sum())} replacements")
    seen = {"similarity": similarities(words, wanted, judge.encoder)}
    if judge.other is not None:
        seen["other nll"] = word_nll(words, wanted, *judge.other)
    return {name: _measured(words, optima[name], choice, wanted, seen) for name, choice in choices.items()}, left_out


def _solved(regularizer: SupportRegularizer, words: WordPositions, rewards: Tensor, reward: float) -> Optimum:
    device = getattr(getattr(regularizer, "geometry", None), "embeddings", words.ids).device
    support = words.support
    if device != support.ids.device:
        support = type(support)(*(getattr(support, name).to(device) for name in vars(support)))
    found = at_reward(regularizer, support, rewards.to(device), reward, GAP)
    return replace(found, log_policy=found.log_policy.cpu(), gap=found.gap.cpu(), reward=found.reward.cpu())


def _measured(
    words: WordPositions, optimum: Optimum, choice: Tensor, wanted: Tensor, seen: Mapping[str, Tensor]
) -> Measured:
    known = choice * wanted
    share = known.sum(-1, keepdim=True)
    known = known / share

    def mean(values: Tensor) -> Tensor:
        return (known * values.masked_fill(~wanted, 0)).sum(-1)

    log_p, log_q = optimum.log_policy, words.log_reference
    other = mean(seen["other nll"]) if "other nll" in seen else torch.full_like(share.squeeze(-1), torch.nan)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    return Measured(optimum, choice, mean(seen["similarity"]), mean(-log_q), other, kl, float(share.min()))


def compare(words: WordPositions, measured: Mapping[str, Measured], base: str) -> list[list[Cell]]:
    """Rows of `COLUMNS`, each regularizer against ``base``."""
    groups = torch.tensor([position.text for position in words.positions])
    rows: list[list[Cell]] = []
    for name, one in measured.items():
        odds = measured[base]

        def over(attribute: str, one: Measured = one, odds: Measured = odds) -> Estimate:
            return grouped_mean(getattr(one, attribute) - getattr(odds, attribute), groups)

        gain, other = over("similarity"), over("other_nll")
        better = float((one.similarity > odds.similarity + ROUNDING).double().mean())
        itself = name == base
        rows.append(
            [
                name, one.optimum.beta, float(one.optimum.reward.mean()), float(one.optimum.gap.max()),
                float(one.similarity.mean()), *((None,) * 4 if itself else (*map(_cell, gain.cells), better)),
                float(one.nll.mean()), None if itself else over("nll").value,
                _number(one.other_nll), *((None,) * 3 if itself else map(_cell, other.cells)),
                float(one.kl.mean()), one.judged,
            ]
        )  # fmt: skip
    return rows


def _number(values: Tensor) -> float | None:
    return _cell(float(values.mean()))


def _cell(value: float) -> float | None:
    return None if math.isnan(value) else value


def examples(
    words: WordPositions, measured: Mapping[str, Measured], count: int = 8, shown: int = 3
) -> list[dict[str, Any]]:
    """Positions spread over all of them, with the likeliest replacements of each regularizer side by side."""
    found = []
    for p in range(0, len(words), max(1, len(words) // count)):
        position = words.positions[p]
        row: dict[str, Any] = {"before": position.before, "word": position.word, "after": position.after}
        for name, one in measured.items():
            top = one.choice[p].topk(min(shown, one.choice.shape[-1]))
            row[name] = [
                f"{words.word(p, entry).strip()} {share:.0%}"
                for share, entry in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
        found.append(row)
    return found[:count]


def analyze(
    context: AnalysisContext,
    encoder: str,
    names: Sequence[str] | None = None,
    **options: Any,
) -> Found:
    """On a run's SFT model and its own responses to held-out prompts, or on ``texts``."""
    texts = options.pop("texts", None) or _responses(context)
    model = (context.reference, context.run.tokenizer)
    name = f"{context.run.path.resolve().name}'s SFT model"
    return analyze_model(context.regularizers, *model, texts, name, encoder, names, say=context.say, **options)


def analyze_model(
    factory: RegularizerFactory,
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    name: str,
    encoder: str,
    names: Sequence[str] | None = None,
    *,
    other: str | None = None,
    geometries: Sequence[str] = (),
    positions: int = 256,
    reward: float = REWARD,
    contextual: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Found:
    """On positions of ``texts`` where the model expects a word.

    names: regularizers, as `RegularizerSpec.parse` reads them; reverse KL, which stands for the odds, is put first.
    encoder, other: folders of the sentence encoder and of another language model.
    geometries: that are screened beside those of the regularizers, by their settings: ``metric=cosine``,
        ``embeddings=FOLDER,transform=centre/unit``.
    contextual: screen what the model makes of candidates too, see `contextual_scores`.
    """
    device = next(model.parameters()).device
    judge = Judge(SentenceEncoder.from_pretrained(encoder, device), _other(other, device))
    listed = [ODDS, *(one for one in names or NAMES if one != ODDS)]
    words = find_positions(model, tokenizer, texts, positions)
    made = {one: exactly(regularizer) for one, regularizer in factory.make_all(listed).items()}
    scores = geometry_scores(words, made)
    scores |= {text: settings_scores(text, words, factory) for text in geometries}
    if contextual:
        scores |= contextual_scores(words, candidates(words), model)
    finding, data = analyze_positions(words, made, scores, judge, name, reward, say)
    judges = {"encoder": encoder, "other": other}
    return noted(
        replace(finding, settings={**finding.settings, **judges}), *factory.notes([*listed, *geometries])
    ), data


def exactly(regularizer: Any) -> Any:
    """The same with transport solved to the last digits that an optimum needs, where its solver stops by tolerance."""
    if isinstance(regularizer, Sum):
        return Sum([(weight, exactly(part)) for weight, part in regularizer.parts])
    if not isinstance(regularizer, Wasserstein) or regularizer.settings.tolerance == 0:
        return regularizer
    given = regularizer.settings
    settings = asdict(given) | {
        "tolerance": min(given.tolerance, TOLERANCE), "iterations": max(given.iterations, ITERATIONS),
    }  # fmt: skip
    return Wasserstein(regularizer.geometry, regularizer.preset, method=regularizer.method, **settings)


def _other(name: str | None, device: torch.device) -> tuple[Any, Any] | None:
    if name is None:
        return None
    return load_any_causal(name, "float32", device), load_tokenizer(name, setting="--other")


def _responses(context: AnalysisContext) -> list[str]:
    """The reference's own responses to held-out prompts."""
    for policy in context.run.finished:
        if (context.run.path / "ppo" / policy / BEFORE).is_file():
            return [one.response for one in context.run.responses(policy, BEFORE)]
    raise UnavailableError(f"{context.run.path} kept no responses of its SFT model; give texts with --texts")


def analyze_positions(
    words: WordPositions,
    regularizers: Mapping[str, SupportRegularizer],
    scores: Mapping[str, Tensor],
    judge: Judge,
    name: str,
    reward: float = REWARD,
    say: Callable[[str], None] = lambda text: None,
) -> Found:
    """The screen of scores ``(P, n)`` by name, and the comparison of regularizers, of which the first must be an
    f-divergence: it is what the others are compared with.
    """
    say(f"{len(words)} positions of {len({one.text for one in words.positions})} texts; the screen")
    screened = screen(InContext.of(words, judge.encoder), scores)
    measured, left_out = measure(words, regularizers, judge, reward, say)
    base = next(iter(regularizers))
    rows = compare(words, measured, base)
    shown = examples(words, measured)
    finding = Finding(
        name="substitution",
        title=f"What stands in a forbidden word's place, {name}",
        text=[*_words(words, rows, screened, base, reward), *_lines(shown, list(measured))],
        columns=COLUMNS,
        rows=rows,
        figures=[*_gains(rows), *_screen_figure(screened)],
        settings={"model": name, "positions": len(words), "reward": reward, "regularizers": list(regularizers)},
    )
    finding = noted(finding, *(f"{key} is left out: {why}" for key, why in left_out.items()))
    data: list[dict[str, Any]] = [{"screen": key, **_plain(one)} for key, one in screened.items()]
    data += [
        {"position": p, "regularizer": key, "similarity": float(one.similarity[p]), "nll": float(one.nll[p]),
         "other nll": _cell(float(one.other_nll[p])), "KL": float(one.kl[p]), "gap": float(one.optimum.gap[p])}
        for key, one in measured.items() for p in range(len(words))
    ]  # fmt: skip
    return finding, [*data, *({"example": row} for row in shown)]


def _plain(one: Screened) -> dict[str, list[float | None]]:
    return {key: [_cell(value) for value in estimate.cells] for key, estimate in vars(one).items()}


def _words(
    words: WordPositions, rows: Sequence[Sequence[Cell]], screened: Mapping[str, Screened], base: str, reward: float
) -> list[str]:
    text = [
        f"At {len(words)} positions of {len({one.text for one in words.positions})} texts a reward of -1 forbids the "
        f"word that the model expects, and its forms. Every regularizer's best policy is computed at the beta whose "
        f"expected reward is {reward:g}; compared is what stands in the word's place. {base} keeps the reference's "
        "odds, as every f-divergence does.",
        "The screen: rank correlation, within a position, of similarity in context with the odds and with geometries. "
        + "; ".join(
            f"{name} {one.alone}"
            + ("" if name == ODDS_SCORE else f", beyond the odds {one.beyond_odds}, together {one.with_odds.value:.3f}")
            for name, one in screened.items()
        )
        + ".",
    ]
    for row in rows[1:]:
        values = dict(zip(COLUMNS, row, strict=True))
        text.append(_verdict(values))
    return text


def _verdict(values: Mapping[str, Any]) -> str:
    """One regularizer against the odds."""
    low, high = values["low"], values["high"]
    told = "not told apart from the odds"
    if low is not None and (low > 0 or high < 0):
        told = f"{'MORE' if low > 0 else 'LESS'} like the original than the odds"
    ends = "too few texts for an interval" if low is None else f"95% interval {low:+.4f} to {high:+.4f}"
    text = (
        f"{values['regularizer']}: {told}, {values['minus odds']:+.4f} in similarity ({ends}), better at "
        f"{values['better at']:.0%} of the positions"
    )
    if values["another minus odds"] is not None:
        text += f"; nll under the other model {values['another minus odds']:+.2f} nat"
        if values["another low"] is not None:
            text += f" ({values['another low']:+.2f} to {values['another high']:+.2f})"
    if values["gap"] > 2 * GAP:
        text += f". Its optimum is known only to {values['gap']:.1e}"
    return f"{text}."


def _lines(shown: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    return [
        f"...{row['before'][-50:]}[{row['word'].strip()}]{row['after'][:20]}... "
        + "; ".join(f"{name}: {', '.join(row[name])}" for name in names)
        for row in shown
    ]


def _gains(rows: Sequence[Sequence[Cell]]) -> list[Figure]:
    values = [dict(zip(COLUMNS, row, strict=True)) for row in rows[1:]]
    gains = [Estimate(*(_float(row[key]) for key in ("minus odds", "low", "high"))) for row in values]
    return _bars(
        "Similarity in context, minus that of the odds", "regularizer", "difference", "the odds", "similarity",
        dict(zip((str(row["regularizer"]) for row in values), gains, strict=True)),
    )  # fmt: skip


def _screen_figure(screened: Mapping[str, Screened]) -> list[Figure]:
    return _bars(
        "What geometries know beyond the odds", "geometry", "partial rank correlation", "nothing", "screen",
        {name: one.beyond_odds for name, one in screened.items() if name != ODDS_SCORE},
    )  # fmt: skip


def _bars(
    title: str, x_label: str, y_label: str, zero: str, name: str, estimates: Mapping[str, Estimate]
) -> list[Figure]:
    """A figure of what is known; none where nothing is."""
    known = {key: one for key, one in estimates.items() if not math.isnan(one.value)}
    if not known:
        return []
    bars = [series(y_label, list(known), list(known.values()))]
    return [Figure("bars", title, x_label, y_label, bars, marks=[Mark(0.0, zero)], name=name)]


def _float(value: Cell) -> float:
    return value if isinstance(value, float) else math.nan
