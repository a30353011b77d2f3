"""Rewards of tokens: the same gradient in expectation as with all of a score at the end, and less variance.

Exact: a policy over three characters is a table of logits, one row per text that it can be at, and all texts of four
characters are gone through.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import wpr.pico
from tests.rewards.test_token_text import tokenizer
from wpr.ppo.advantages import assemble_rewards, earned_before, generalized_advantages, group_scale
from wpr.rewards import Completions, ScoreShaping, WordList

LENGTH = 4
TEXTS = ["".join(text) for text in product("ab ", repeat=LENGTH)]
STARTS = {start: row for row, start in enumerate(sorted({text[:t] for text in TEXTS for t in range(LENGTH)}))}
MASK = torch.ones(len(TEXTS), LENGTH, dtype=torch.bool)
LOGITS = torch.randn(len(STARTS), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
REWARD = WordList(['"a"', '"ab" = 2', "b ab = 3"], preferred=['"bb"', "aab*"])
"""Tokens can make another word of a word: a, ab, abb."""


def completions() -> Completions:
    tokens = [tokenizer("bytes").encode(text, add_special_tokens=False) for text in TEXTS]
    ids = torch.tensor(tokens)
    assert ids.shape == (len(TEXTS), LENGTH)
    return Completions(
        [""] * len(TEXTS), TEXTS, ids, MASK.long(), torch.full((len(TEXTS),), LENGTH - 1), response_ids=tokens,
        tokenizer=tokenizer("bytes"),
    )  # fmt: skip


def scored() -> tuple[Tensor, Tensor]:
    """Scores and what tokens earned; texts of spaces have no words, hence no score: here 0."""
    scores, placed = REWARD.by_token(completions())
    assert scores.isnan().sum() == 1
    return scores.nan_to_num(0).double(), placed.double()


def in_hindsight(scores: Tensor) -> Tensor:
    """What a word is worth on its last token, known once the next token did not go on with it."""
    found = torch.zeros(len(TEXTS), LENGTH, dtype=torch.float64)
    for row, text in enumerate(TEXTS):
        for start, values in REWARD._valued(text):
            found[row, start + len(values) - 2] += values[-1]
    assert torch.equal(found.sum(-1), scores)
    return found


def log_probs(logits: Tensor) -> Tensor:
    """Of every text's tokens."""
    rows = torch.tensor([[STARTS[text[:t]] for t in range(LENGTH)] for text in TEXTS])
    drawn = torch.tensor([["ab ".index(character) for character in text] for text in TEXTS])
    return logits.log_softmax(-1)[rows, drawn]


def expected_gradient(advantages: Tensor) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    tokens = log_probs(logits)
    weights = tokens.sum(-1).exp().detach()
    return torch.autograd.grad((weights * (tokens * advantages).sum(-1)).sum(), logits)[0]


def true_gradient(scores: Tensor) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad((log_probs(logits).sum(-1).exp() * scores).sum(), logits)[0]


def variance(advantages: Tensor) -> float:
    """Of the gradient of one text: no two of its tokens share a row of logits."""
    p = LOGITS.softmax(-1)
    rows = torch.tensor([[STARTS[text[:t]] for t in range(LENGTH)] for text in TEXTS])
    own = log_probs(LOGITS).exp()
    squares = p[rows].square().sum(-1) - own.square() + (1 - own).square()
    weights = log_probs(LOGITS).sum(-1).exp()
    second = (weights * (squares * advantages.square()).sum(-1)).sum()
    return float(second - expected_gradient(advantages).square().sum())


def by_ppo(scores: Tensor, placed: Tensor | None) -> Tensor:
    """Advantages with a critic that knows nothing."""
    rewards = assemble_rewards(scores, torch.zeros(MASK.shape, dtype=torch.float64), MASK, 0.0, placed)
    return generalized_advantages(rewards, torch.zeros_like(rewards), MASK, 1.0, 1.0)[0]


def test_what_tokens_earned_is_the_score() -> None:
    scores, placed = scored()
    assert torch.allclose(placed.sum(-1), scores)
    for row, text in enumerate(TEXTS):
        starts = [0.0, *(REWARD.score(text[: t + 1]) for t in range(LENGTH))]
        assert placed[row].tolist() == [after - before for before, after in pairwise(starts)]


@pytest.mark.parametrize(
    ("shaping", "less"),
    [
        (ScoreShaping(None, False, None), 0.85),
        (ScoreShaping(None, True, None), 0.9),
        (ScoreShaping(0.5, True, None), 0.95),
        (ScoreShaping(0.5, True, 0.8), 1.5),
    ],
    ids=["as is", "normalised", "end", "clipped"],
)
def test_ppo_follows_the_same_gradient(shaping: ScoreShaping, less: float) -> None:
    """Variance falls where shaping is a scale. What a clip takes off lands at the end, where it adds some."""
    scores, placed = scored()
    finished = torch.arange(len(TEXTS)) % 3 > 0
    shaped = shaping(scores, finished, lambda total: total)
    exact = true_gradient(shaped)
    at_end, on_tokens = by_ppo(shaped, None), by_ppo(shaped, shaping.scale * placed)
    assert exact.norm() > 0.1
    for advantages in (at_end, on_tokens):
        assert torch.allclose(expected_gradient(advantages), exact, atol=1e-12)
    print(f"variance at the end {variance(at_end):.3f}, on tokens {variance(on_tokens):.3f}")
    assert variance(on_tokens) < less * variance(at_end)


def test_a_word_in_hindsight_would_lead_elsewhere() -> None:
    """A token that turns a word into another must have its part of the change."""
    scores, _ = scored()
    found = expected_gradient(by_ppo(scores, in_hindsight(scores)))
    assert (found - true_gradient(scores)).norm() > 0.1 * true_gradient(scores).norm()


def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values of all texts as those of all pairs of texts."""
    count = len(TEXTS)
    return values.repeat_interleave(count, 0), values.repeat(count, *[1] * (values.dim() - 1))


def in_pairs(advantages_of: Callable[[Tensor, Tensor], Tensor], scores: Tensor, placed: Tensor) -> Tensor:
    """The mean advantage of each text's tokens over the other text of its group, which is drawn as often as it is
    likely.
    """
    both = [torch.stack(pairs(values), 1).flatten(0, 1) for values in (scores, placed)]
    advantages = advantages_of(*both).reshape(len(TEXTS), len(TEXTS), 2, LENGTH)[:, :, 0]
    other = log_probs(LOGITS).sum(-1).exp()
    return (advantages * other[None, :, None]).sum(1)


def test_grpo_follows_the_same_gradient() -> None:
    """TRL's advantages of groups of two, as they are and less what was earned before: half of the gradient."""
    scores, placed = scored()

    def trl(rewards: Tensor, _: Tensor) -> Tensor:
        grouped = rewards.view(-1, 2)
        return (grouped - grouped.mean(-1, keepdim=True)).reshape(-1, 1).expand(-1, LENGTH)

    def on_tokens(rewards: Tensor, earned: Tensor) -> Tensor:
        return trl(rewards, earned) - earned_before(earned, torch.ones(len(rewards), dtype=torch.bool), 2)

    for advantages_of in (trl, on_tokens):
        found = expected_gradient(in_pairs(advantages_of, scores, placed))
        assert torch.allclose(found, true_gradient(scores) / 2, atol=1e-12)
    # Of a pair, the variance is that of each text with its other, and of the two.
    squares: dict[Any, Tensor] = {}
    weights = log_probs(LOGITS).sum(-1).exp()
    for advantages_of in (trl, on_tokens):
        squared = in_pairs(lambda rewards, earned, of=advantages_of: of(rewards, earned).square(), scores, placed)
        squares[advantages_of] = (weights[:, None] * squared).sum(0)
    print({function.__name__: total.tolist() for function, total in squares.items()})
    assert (squares[on_tokens][1:] < squares[trl][1:]).all()  # mean squared advantages; the first token has no past
    assert torch.allclose(squares[on_tokens][0], squares[trl][0])


def test_what_was_earned_before() -> None:
    """In loops; the third response has no score, and the last group one that has."""
    placed = torch.tensor([[1.0, 2, 4], [3, 0, 0], [9, 9, 9], [5, 1, 1], [2, 2, 2], [8, 8, 8]])
    known = torch.tensor([True, True, False, True, False, False])
    past = [[0.0, 1, 3], [0, 3, 3]]
    first = [[(own - other) / 2 for own, other in zip(*rows, strict=True)] for rows in (past, past[::-1])]
    assert earned_before(placed, known, 3).tolist() == [*first, [0.0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3]


def test_the_scale_of_a_group() -> None:
    rewards = torch.tensor([1.0, 3, 8, torch.nan, 2, 2, 2, 2])
    mean, deviation = 4.0, 3.6
    advantages = ((rewards - mean) / deviation).nan_to_num(0)
    advantages[4:] = 0
    past = earned_before(torch.tensor([[1.0, 0], [2, 0], [2, 6], [9, 9], *[[0, 1]] * 4]), ~rewards.isnan(), 4)
    scale = group_scale(advantages, rewards, past, 4)
    assert scale.tolist() == pytest.approx([1 / 3.6] * 4 + [0.0] * 4)


@pytest.mark.parametrize("tail", [0.0, 1e-3])
def test_tokens_that_differ_more_than_responses_do(tail: float) -> None:
    """Eight responses of -0.3 each, equal but for rounding or a little more, earned at different tokens."""
    placed = torch.zeros(8, 4)
    for row in range(8):
        placed[row, row % 4] = -0.3
    rewards = placed.sum(-1) + tail * torch.arange(8)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)  # as TRL has it
    past = earned_before(placed, torch.ones(8, dtype=torch.bool), 8)
    taken = past * group_scale(advantages, rewards, past, 8).unsqueeze(-1)
    if tail == 0:
        assert not taken.any()
    else:
        assert 1 < float(taken.abs().max()) <= 7 / 8**0.5


def test_a_group_with_unscored_responses() -> None:
    """Two scored ones of four: half of what is still to come, less that of the other."""
    placed = torch.tensor([[-1.0, 0, 0], [0, -3, 0], [0, 0, 0], [7, 7, 7]])
    rewards = torch.tensor([-1.0, -3, torch.nan, torch.nan])
    advantages = (rewards - rewards.nanmean()).nan_to_num(0).unsqueeze(-1)
    found = advantages - earned_before(placed, ~rewards.isnan(), 4)
    to_come = placed.flip(1).cumsum(1).flip(1)
    assert torch.equal(found[0], (to_come[0] - to_come[1]) / 2)
    assert torch.equal(found[1], -found[0])
    assert not found[2:].any()


@pytest.mark.slow
def test_less_variance_on_a_language_model() -> None:
    """GRPO's gradient in a layer of wpr-pico: 32 groups of 8 stories, against ten common words."""
    group, groups, length = 8, 32, 64
    folder = wpr.pico.__path__[0]
    own, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = own("Once upon a time", return_tensors="pt").input_ids
    torch.manual_seed(0)
    drawn = model.generate(
        prompt.repeat(group * groups, 1), do_sample=True, top_k=0, max_new_tokens=length, min_new_tokens=length,
        pad_token_id=0,
    )  # fmt: skip
    ids = drawn[:, prompt.shape[1] :]
    texts = own.batch_decode(ids, skip_special_tokens=True)
    last = torch.full((len(ids),), length - 1)
    batch = Completions(
        [""] * len(ids), texts, ids, torch.ones_like(ids), last, response_ids=ids.tolist(), tokenizer=own
    )
    words = WordList(["said", "little", "very", "big", "want", "went", "play", "happy", "day", "see"])
    scores, placed = words.by_token(batch)
    grouped = scores.view(-1, group)
    at_end = (grouped - grouped.mean(-1, keepdim=True)).reshape(-1, 1).expand(-1, length)
    past = earned_before(placed, torch.ones(len(scores), dtype=torch.bool), group)
    both = (at_end, at_end - past)
    weight = model.model.layers[-1].mlp.down_proj.weight
    found: list[list[Tensor]] = [[], []]
    for row in range(len(ids)):
        logs = model(drawn[row : row + 1]).logits[0, prompt.shape[1] - 1 : -1].log_softmax(-1)
        chosen = logs[torch.arange(length), ids[row]]
        for kept, advantages in zip(found, both, strict=True):
            kept.append(torch.autograd.grad((chosen * advantages[row]).sum(), weight, retain_graph=True)[0].flatten())
    end, tokens = (torch.stack(kept).view(groups, group, -1).sum(1).var(0).sum().item() for kept in found)
    print(f"variance on tokens over that at the end: {tokens / end:.3f}")
    assert tokens < 0.7 * end
