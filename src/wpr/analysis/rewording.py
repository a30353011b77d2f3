"""How much of a reward can be had by wording alone? Words of a model's responses are replaced, one token by another.

Notation for shapes: ``N`` prompts, ``n`` responses per prompt, ``E`` replacements, ``V`` vocabulary.

Of each prompt one response y is reworded. At up to `POSITIONS` of its words (tokens that are a whole word after a
space) up to `CANDIDATES` other words are tried, the likeliest that the reference has for the place. Those that make y
less likely under the reference by more than `LESS_LIKELY` nats are left out. Of the rest, those that *keep the meaning*
are the share `NEAREST` of each place, one at least, whose text is most like y, as an independent encoder says. From the
place that gains most to the one that gains least, the best word of each is put in and stays if the reward rises:

    any       what is gained so with all words that were possible,          r(y reworded) - r(y)
    wording   what is gained so with those that keep the meaning
    found     per prompt the larger one of `any` and what the best of n responses has more, max_j r_j - mean_j r_j
    share     (mean of `wording`) / (mean of `found`), from 0 to 1

Ranks are within a place, so that the scale of the encoder's similarity does not matter. Under a reward that does not
care about meaning, the words that raise it are among the nearest as often as elsewhere. Under one that asks for other
content they are not, and under one that no exchange of words satisfies, such as length, nothing is gained.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wpr.analysis.statistics import Estimate, bootstrap, interval
from wpr.analysis.word_positions import token_text
from wpr.evaluation.encoders import TextEncoder
from wpr.evaluation.response_generation import continuation
from wpr.language_models import hidden_states, logits_of, pad
from wpr.runs.responses import Response

POSITIONS, CANDIDATES, LOOKED_AT = 32, 12, 64
"""Words of a response that are replaced, words that are tried for each, and the likeliest tokens they are sought in."""

NEAREST = 0.25
"""Share of the words that are possible at a place which count as keeping the meaning."""

LESS_LIKELY = 8.0
"""Nats that a replacement may cost: what a gain of 1 pays for at a beta of 0.125."""

SMALLEST_GAIN = 1e-6
"""Relative to the reward's deviation; less is rounding."""

_WORD = re.compile(r" [^\W\d_]+")
_LETTERS = re.compile(r"[^\W\d_]+")
_GOES_ON = re.compile("[\\w'\u2019]")

Score = Callable[[Sequence[Response]], Tensor]
"""Responses to rewards ``(B,)`` in float64, NaN for those that have none."""


@dataclass(frozen=True)
class Replacement:
    """A word of a response, and another one in its place.

    row: of the response. place: the token's index. token: what stands there instead. response: all of it.
    """

    row: int
    place: int
    token: int
    response: Response


@dataclass(frozen=True)
class Reworded:
    """What rewording does to responses ``(N,)``.

    reward: of the responses as drawn. any: with the best replacements of all. wording: with those that keep the
    meaning, NaN without an encoder. similarity_any, similarity_wording: of these to the responses as drawn.
    words, replaced, tried: words of all responses, those that others were tried for, and how many were tried.
    examples: texts before and after, the first that gained.
    """

    reward: Tensor
    any: Tensor
    wording: Tensor
    similarity_any: Tensor
    similarity_wording: Tensor
    words: int
    replaced: int
    tried: int
    examples: list[dict[str, Any]]


class WordTokens:
    """Which tokens are whole words, of a tokenizer; each is looked at once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """The token's text after another one."""
        if token not in self._texts:
            self._texts[token] = token_text(self.tokenizer, token)
        return self._texts[token]

    def is_word(self, token: int) -> bool:
        """Whether it is letters after a space."""
        return _WORD.fullmatch(self.text(token)) is not None

    def places(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that are a whole word, which the next one does not go on with."""
        return [
            place
            for place, token in enumerate(tokens)
            if self.is_word(token)
            and (place + 1 == len(tokens) or not _GOES_ON.match(self.text(tokens[place + 1]) or " "))
        ]


@torch.no_grad()
def replacements(
    model: Any, tokenizer: Any, responses: Sequence[Response], positions: int = POSITIONS, candidates: int = CANDIDATES
) -> list[Replacement]:
    """Other words for the words of responses, the likeliest of the model at each place, in order of likelihood."""
    words = WordTokens(tokenizer)
    device = next(model.parameters()).device
    found: list[Replacement] = []
    for row, response in enumerate(responses):
        tokens = list(response.response_ids)
        places = _spread(words.places(tokens), positions)
        if not places:
            continue
        ids, mask = pad([[*response.prompt_ids, *tokens]], device=device)
        before = torch.tensor([len(response.prompt_ids) + place - 1 for place in places], device=device)
        logits = logits_of(model, hidden_states(model, ids, mask)[0, before])
        likeliest = logits.topk(min(LOOKED_AT, logits.shape[-1])).indices.tolist()
        for place, tokens_there in zip(places, likeliest, strict=True):
            own = words.text(tokens[place]).lower()
            others = [one for one in tokens_there if words.is_word(one) and words.text(one).lower() != own]
            found += [
                Replacement(row, place, one, _with(response, {place: one}, tokenizer)) for one in others[:candidates]
            ]
    return found


def _spread(places: list[int], most: int) -> list[int]:
    """At most so many, spread evenly."""
    if len(places) <= most:
        return places
    return [places[round(index * (len(places) - 1) / max(1, most - 1))] for index in range(most)]


def _with(response: Response, tokens: dict[int, int], tokenizer: Any) -> Response:
    """The response with other tokens at some places."""
    ids = [tokens.get(place, token) for place, token in enumerate(response.response_ids)]
    return replace(response, response=continuation(tokenizer, list(response.prompt_ids), ids), response_ids=ids)


def reword(
    model: Any,
    tokenizer: Any,
    responses: Sequence[Response],
    rewards: Tensor,
    score: Score,
    encoder: TextEncoder | None,
    nearest: float = NEAREST,
) -> Reworded:
    """What other words in the place of words do to responses with these rewards ``(N,)``."""
    tried = replacements(model, tokenizer, responses)
    rows = torch.tensor([one.row for one in tried], dtype=torch.long)
    least = SMALLEST_GAIN * float(rewards.std()) if len(rewards) > 1 else 0.0
    gains = (score([one.response for one in tried]) - rewards[rows]).nan_to_num(-math.inf)
    gaining = gains > least
    groups = _places(tried, gaining)
    judged = [index for group in groups for index in group]
    costs = torch.full_like(gains, math.inf)
    likelihood = log_likelihoods(model, responses)
    costs[judged] = likelihood[rows[judged]] - log_likelihoods(model, [tried[index].response for index in judged])
    possible = costs <= LESS_LIKELY
    ways = {"any": possible & gaining}
    if encoder is not None:
        ways["wording"] = ways["any"] & _near(tried, possible, groups, responses, encoder, nearest)
    texts = {}
    reached = {name: torch.full_like(rewards, math.nan) for name in ("any", "wording")}
    similar = {name: torch.full_like(rewards, math.nan) for name in ("any", "wording")}
    for name, allowed in ways.items():
        steps = _best(tried, gains.masked_fill(~allowed, -math.inf))
        texts[name], reached[name] = _together(responses, rewards, steps, score, tokenizer)
        if encoder is not None:
            similar[name] = _similar(encoder, responses, texts[name])
    shown = list(texts)[-1]
    words = WordTokens(tokenizer)
    return Reworded(
        reward=rewards,
        any=reached["any"],
        wording=reached["wording"],
        similarity_any=similar["any"],
        similarity_wording=similar["wording"],
        words=sum(len(_LETTERS.findall(one.response)) for one in responses),
        replaced=sum(len(_spread(words.places(one.response_ids), POSITIONS)) for one in responses),
        tried=len(tried),
        examples=_examples(responses, texts[shown], rewards, reached[shown]),
    )


@torch.no_grad()
def log_likelihoods(model: Any, responses: Sequence[Response], size: int = 64) -> Tensor:
    """Of responses after their prompts: ``(B,)`` in nats, float64."""
    device = next(model.parameters()).device
    found = torch.zeros(len(responses), dtype=torch.float64)
    for first in range(0, len(responses), size):
        part = responses[first : first + size]
        ids, mask = pad([[*one.prompt_ids, *one.response_ids] for one in part], device=device)
        starts = torch.tensor([[len(one.prompt_ids)] for one in part], device=device)
        drawn = mask.bool() & (torch.arange(ids.shape[1], device=device) >= starts)
        row, column = drawn.nonzero().unbind(-1)
        states = hidden_states(model, ids, mask)[row, column - 1]
        for chosen in torch.arange(len(row), device=device).split(1024):  # logits of all would fill the memory
            logs = logits_of(model, states[chosen]).float().log_softmax(-1)
            there = logs.gather(-1, ids[row[chosen], column[chosen]].unsqueeze(-1)).squeeze(-1)
            found.index_add_(0, row[chosen].cpu() + first, there.double().cpu())
    return found


def _places(tried: Sequence[Replacement], gaining: Tensor) -> list[list[int]]:
    """Indices of replacements by place, of the places where one of them gains: only these are looked at further, which
    spares most of the work for a reward that few words matter to.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, one in enumerate(tried):
        groups.setdefault((one.row, one.place), []).append(index)
    return [group for group in groups.values() if gaining[group].any()]


def _near(
    tried: Sequence[Replacement],
    possible: Tensor,
    groups: Sequence[list[int]],
    responses: Sequence[Response],
    encoder: TextEncoder,
    share: float,
) -> Tensor:
    """Which replacements ``(E,)`` are among the nearest in meaning of those possible at their place."""
    near = torch.zeros(len(tried), dtype=torch.bool)
    judged = [index for group in groups for index in group if possible[index]]
    if not judged:
        return near
    originals = encoder([one.response for one in responses]).double()
    vectors = encoder([tried[index].response.response for index in judged]).double()
    similarity = torch.full((len(tried),), -math.inf, dtype=torch.float64)
    similarity[judged] = (vectors * originals[[tried[index].row for index in judged]]).sum(-1)
    for group in groups:
        count = int(possible[group].sum())
        order = sorted(group, key=lambda index: -float(similarity[index]))[:count]
        near[order[: max(1, math.floor(share * count))]] = True
    return near


def _best(tried: Sequence[Replacement], gains: Tensor) -> dict[int, list[tuple[int, int]]]:
    """By response, places with the best token of each, from the one that gains most; -inf is not allowed."""
    best: dict[tuple[int, int], tuple[float, int]] = {}
    for one, gain in zip(tried, gains.tolist(), strict=True):
        if gain > best.get((one.row, one.place), (-math.inf, 0))[0]:
            best[one.row, one.place] = gain, one.token
    found: dict[int, list[tuple[int, int]]] = {}
    for (row, place), (_, token) in sorted(best.items(), key=lambda item: -item[1][0]):
        found.setdefault(row, []).append((place, token))
    return found


def _together(
    responses: Sequence[Response],
    rewards: Tensor,
    steps: dict[int, list[tuple[int, int]]],
    score: Score,
    tokenizer: Any,
) -> tuple[list[Response], Tensor]:
    """Responses with replacements made one after the other, each kept if the reward rises; and what they reach."""
    now, reached = list(responses), rewards.clone()
    for step in range(max(map(len, steps.values()), default=0)):
        rows = [row for row, places in steps.items() if len(places) > step]
        trial = [_with(now[row], dict([steps[row][step]]), tokenizer) for row in rows]
        for row, one, found in zip(rows, trial, score(trial).tolist(), strict=True):
            if found > float(reached[row]):
                now[row], reached[row] = one, found
    return now, reached


def _similar(encoder: TextEncoder, before: Sequence[Response], after: Sequence[Response]) -> Tensor:
    one, other = (encoder([response.response for response in rows]).double() for rows in (before, after))
    return (one * other).sum(-1)


def _examples(
    before: Sequence[Response], after: Sequence[Response], rewards: Tensor, reached: Tensor, count: int = 3
) -> list[dict[str, Any]]:
    """The first responses that gained."""
    gained = [row for row in range(len(before)) if float(reached[row] - rewards[row]) > 0]
    return [
        {"before": before[row].response.strip(), "after": after[row].response.strip(),
         "reward": float(rewards[row]), "reached": float(reached[row])}
        for row in gained[:count]
    ]  # fmt: skip


def found_reward(rewards: Tensor, reworded: Reworded) -> Tensor:
    """What can be had, by prompt ``(N,)``: by the best of the draws ``(N, n)`` or by any words, whichever is more."""
    drawn = rewards.masked_fill(rewards.isnan(), -math.inf).amax(-1) - rewards.nanmean(-1)
    return torch.maximum(drawn, reworded.any - reworded.reward)


def share_of(gain: Tensor, found: Tensor, seed: int = 0) -> Estimate:
    """(mean of ``(N,)`` gains) / (mean of ``(N,)``), with an interval over prompts; prompts with NaN are left out."""
    known = ~(gain.isnan() | found.isnan())
    gain, found = gain[known], found[known]
    if not len(gain) or float(found.mean()) <= 0:
        return Estimate(math.nan)

    def ratio(chosen: Tensor) -> Tensor:
        return gain[chosen].mean(-1) / found[chosen].mean(-1)

    ends = interval(bootstrap(ratio, len(gain), seed=seed)) if len(gain) > 2 else (math.nan, math.nan)
    return Estimate(float(gain.mean() / found.mean()), *ends)
