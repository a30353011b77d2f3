"""Other words for words: a list of words can be satisfied by them, a length cannot, and the slow way agrees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tests.analysis.substitution_texts import STORIES
from wpr import pico
from wpr.analysis.rewording import (
    LESS_LIKELY,
    Score,
    WordTokens,
    found_reward,
    log_likelihoods,
    replacements,
    reword,
    share_of,
)
from wpr.rewards import WordList
from wpr.runs.responses import Response

FORBIDDEN = WordList(["big", "happy", "said", "play", "little", "very", "wanted"])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(pico.path())


@pytest.fixture(scope="module")
def responses(tokenizer: Any) -> list[Response]:
    prompt = "Once upon a time"
    ids = tokenizer(prompt)["input_ids"]
    return [
        Response(str(row), prompt, text, response_ids=tokenizer(text, add_special_tokens=False)["input_ids"],
                 prompt_ids=ids)
        for row, text in enumerate(" " + story[:70].rpartition(" ")[0] for story in STORIES[:4])
    ]  # fmt: skip


def by_words(rows: Sequence[Response]) -> Tensor:
    return torch.tensor([FORBIDDEN.score(one.response) for one in rows], dtype=torch.float64)


def by_length(rows: Sequence[Response]) -> Tensor:
    return torch.tensor([float(len(one.response.split())) for one in rows], dtype=torch.float64)


def letters(texts: Sequence[str]) -> Tensor:
    """An encoder that counts letters."""
    counts = torch.tensor([[float(text.count(chr(code))) for code in range(97, 123)] for text in texts])
    return torch.nn.functional.normalize(counts + 1e-6, dim=-1)


def test_words_that_are_whole(tokenizer: Any) -> None:
    ids = tokenizer(" The dog said hello, and it's playing.", add_special_tokens=False)["input_ids"]
    words = WordTokens(tokenizer)
    found = [words.text(ids[place]).strip() for place in words.places(ids)]
    assert {"dog", "said", "and"} <= set(found)
    assert not {"it", ",", "."} & set(found)  # it's goes on


@torch.no_grad()
def test_likelihoods_are_those_of_one_by_one(model: Any, responses: list[Response]) -> None:
    found = log_likelihoods(model, responses, size=3)
    for row, one in enumerate(responses):
        ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
        logs = model(ids).logits[0].double().log_softmax(-1)
        start = len(one.prompt_ids)
        slow = sum(float(logs[start + t - 1, token]) for t, token in enumerate(one.response_ids))
        assert float(found[row]) == pytest.approx(slow, abs=1e-3)


@pytest.mark.parametrize(("score", "gains"), [(by_words, True), (by_length, False)])
def test_words_gain_and_length_does_not(
    model: Any, tokenizer: Any, responses: list[Response], score: Score, gains: bool
) -> None:
    rewards = score(responses)
    found = reword(model, tokenizer, responses, rewards, score, letters)
    assert (found.any >= found.wording).all()
    assert (found.wording >= rewards).all()
    assert bool((found.wording > rewards).any()) == gains
    assert bool(found.examples) == gains
    assert (found.similarity_wording <= 1 + 1e-5).all()


def test_what_is_kept_is_possible_and_near(model: Any, tokenizer: Any, responses: list[Response]) -> None:
    """All replacements of one response, one by one: the best that is possible and among the nearest is what comes out
    where one word of the response is forbidden.
    """
    rewards = by_words(responses)
    row = next(row for row, reward in enumerate(rewards.tolist()) if reward == -1)
    one = responses[row]
    tried = replacements(model, tokenizer, [one])
    before = float(log_likelihoods(model, [one]))
    place = next(other.place for other in tried if FORBIDDEN.score(other.response.response) == 0)
    possible = [
        other.response.response for other in tried
        if other.place == place and before - float(log_likelihoods(model, [other.response])) <= LESS_LIKELY
    ]  # fmt: skip
    original = letters([one.response])[0].double()
    nearest = sorted(possible, key=lambda text: -float(letters([text])[0].double() @ original))
    near = nearest[: max(1, len(possible) // 4)]
    found = reword(model, tokenizer, [one], rewards[[row]], by_words, letters)
    if any(FORBIDDEN.score(text) == 0 for text in near):
        assert found.examples[0]["after"] in [text.strip() for text in near]
    else:
        assert not found.examples
    assert float(found.any) == max([-1.0, *(FORBIDDEN.score(text) for text in possible)])


def test_without_an_encoder_meaning_is_not_known(model: Any, tokenizer: Any, responses: list[Response]) -> None:
    rewards = by_words(responses)
    found = reword(model, tokenizer, responses, rewards, by_words, None)
    assert found.wording.isnan().all()
    assert (found.any > rewards).any()


def test_share() -> None:
    gain, found = torch.tensor([1.0, 0.0, 2.0, math.nan]), torch.tensor([2.0, 2.0, 2.0, 1.0])
    one = share_of(gain, found)
    assert one.value == pytest.approx(0.5)
    assert one.low < 0.5 < one.high
    assert math.isnan(share_of(gain, torch.zeros(4)).value)


def test_found_is_the_larger_one(model: Any, tokenizer: Any, responses: list[Response]) -> None:
    rewards = by_words(responses)
    reworded = reword(model, tokenizer, responses, rewards, by_words, None)
    drawn = torch.stack([rewards, rewards + 100, torch.full_like(rewards, math.nan)], -1)
    assert torch.allclose(found_reward(drawn, reworded), torch.full_like(rewards, 50))
    alike = rewards.unsqueeze(-1).expand(-1, 2)
    assert torch.equal(found_reward(alike, reworded), reworded.any - rewards)
