"""Reward sources."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ppo import tiny
from wpr.rewards import Completions, FunctionReward, RewardError, RewardModel, WeightedSum, as_reward


def completions(texts: list[tuple[str, str]], **columns: Any) -> Completions:
    tokenizer = tiny.tokenizer()
    joined = tokenizer([a + " " + b for a, b in texts], return_tensors="pt", padding=True, padding_side="left")
    last = torch.full((len(texts),), joined["input_ids"].shape[1] - 1)
    return Completions(
        [a for a, _ in texts], [b for _, b in texts], joined["input_ids"], joined["attention_mask"], last, columns
    )


TEXTS = [("w5", "w6 w7"), ("w8 w9 w10", "w11"), ("w12", "w7 w7 w7")]


def test_function_with_columns() -> None:
    reward = FunctionReward(
        lambda prompts, responses, bonus: [b + len(r) for r, b in zip(responses, bonus, strict=True)]
    )
    assert reward(completions(TEXTS, bonus=[1, 2, 3])).tolist() == [6.0, 5.0, 11.0]


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda p, r: [1.0], "returned 1 scores for 3 responses"),
        (lambda p, r: ["good", 1, 2], "returned 'good' for response 0"),
        (lambda p, r: [None, 1, 2], "returned None for response 0"),
        (lambda p, r: 1 / 0, "raised ZeroDivisionError"),
        (lambda p, r: None, "reward function '<lambda>' raised TypeError"),
    ],
)
def test_bad_functions_are_named(function, named: str) -> None:
    with pytest.raises(RewardError, match=named):
        FunctionReward(function)(completions(TEXTS))


def test_tensors_are_fine_too() -> None:
    assert FunctionReward(lambda p, r: torch.arange(3))(completions(TEXTS)).tolist() == [0.0, 1.0, 2.0]


def test_a_function_of_trls_convention_gets_everything_by_keyword() -> None:
    seen: list[dict[str, Any]] = []

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        seen.append({"completions": completions, **kwargs})
        return [float(len(completion)) for completion in completions]

    texts = replace(
        completions(TEXTS, answer=[1, 2, 3], completion=["a", "b", "c"]),
        response_ids=[[6, 7], [11], [7, 7, 7]],
        trainer={"trainer_state": "state"},
    )
    chat = replace(texts, prompts=[[{"role": "user", "content": prompt}] for prompt in texts.prompts])
    assert as_reward(reward)(texts).tolist() == [5.0, 3.0, 8.0]
    assert as_reward(reward)(chat).tolist() == [1.0, 1.0, 1.0]
    shared = {"answer": [1, 2, 3], "completion_ids": texts.response_ids, "trainer_state": "state"}
    assert seen[0] == {"prompts": texts.prompts, "completions": texts.responses, **shared}
    messages = [[{"role": "assistant", "content": response}] for response in texts.responses]
    assert seen[1] == {"prompts": chat.prompts, "completions": messages, **shared}


class Named:
    """An object with a name, as a `Reward` has one, that is called as TRL does."""

    name = "named"

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)


def weighted(prompts: list[str], completions: list[str], by: float = 1.0, **kwargs: Any) -> list[float]:
    return [by] * len(completions)


async def later(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [3.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "name", "by_keyword"),
    [
        (lambda prompts, responses, **columns: [0.0] * 3, "<lambda>", False),
        (lambda p, r: [0.0] * 3, "<lambda>", False),
        (lambda *lists, **columns: [0.0] * 3, "<lambda>", False),
        (lambda prompts, completions, **kwargs: [0.0] * 3, "<lambda>", True),
        (lambda prompts, completion_ids, **kwargs: [0.0] * 3, "<lambda>", True),
        (lambda prompts, **kwargs: [0.0] * 3, "<lambda>", True),
        (lambda **kwargs: [0.0] * 3, "<lambda>", True),
        (partial(weighted, by=2.0), "weighted", True),
        (Named(), "Named", True),
        (later, "later", True),
    ],
)
def test_the_convention_follows_from_the_parameters(function: Any, name: str, by_keyword: bool) -> None:
    reward = as_reward(function)
    assert isinstance(reward, FunctionReward)
    assert (reward.name, reward.by_keyword) == (name, by_keyword)
    assert len(reward(completions(TEXTS))) == 3


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda completions: [], r"has the parameters \(completions\): .* neither .*; add \*\*kwargs"),
        (lambda prompts, completions: [], "add .*kwargs"),
        (lambda prompts: [], "or take two lists"),
        (lambda completions, responses, **kwargs: [], "completions are TRL's and responses this package's; rename"),
    ],
)
def test_functions_of_neither_convention_are_refused(function: Any, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        as_reward(function)


def test_none_is_no_score_and_other_parts_count() -> None:
    """As in TRL: a part that skips a response is left out of its sum; a response that all skip has no score."""

    def some(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [1.0, None, None]

    def others(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [10.0, 20.0, None]

    total = as_reward([some, others], weights=[2.0, 0.5])
    assert total.may_skip
    assert torch.allclose(total(completions(TEXTS)), torch.tensor([7.0, 10.0, torch.nan]), equal_nan=True)
    assert not as_reward([some, lambda p, r: [1.0] * 3]).may_skip  # a NaN of the second stays a fault
    nan = as_reward([some, lambda p, r: [torch.nan] * 3])(completions(TEXTS))
    assert nan.isnan().all()
    with pytest.raises(RewardError, match="returned nan for response 0; return a finite number, or None for no score"):
        as_reward(lambda completions, **kwargs: [torch.nan, 1, 2])(completions(TEXTS))


def test_weights_beside_the_rewards() -> None:
    one = lambda prompts, responses: [1.0] * len(responses)  # noqa: E731
    assert as_reward([one, one], [2.0, 0.5])(completions(TEXTS)).tolist() == [2.5] * 3
    assert as_reward(one, [3.0])(completions(TEXTS)).tolist() == [3.0] * 3
    for source, weights in (([one, one], [1.0]), (one, [1.0, 2.0]), ([(one, 2.0)], [1.0])):
        with pytest.raises(ValueError, match="give one weight per reward|give weights twice"):
            as_reward(source, weights)


def test_a_model_scores_each_row_as_if_alone() -> None:
    model = tiny.critic()
    batch = completions(TEXTS)
    scores = RewardModel(model, batch_size=2)(batch)
    for row in range(3):
        alone = batch.input_ids[row : row + 1, batch.attention_mask[row].bool()]
        assert float(scores[row]) == pytest.approx(float(model(input_ids=alone).logits), abs=1e-5)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_an_encoder_runs_as_it_is() -> None:
    """Its score is not the last token's; rows are packed, so that padding on the left changes nothing."""
    model, batch = tiny.encoder(), completions(TEXTS)
    scores = RewardModel(model)(batch)
    for row in range(3):
        alone = batch.input_ids[row : row + 1, batch.attention_mask[row].bool()]
        assert float(scores[row]) == pytest.approx(float(model(input_ids=alone).logits), abs=1e-5)


def test_a_model_with_a_tokenizer_of_its_own() -> None:
    """Texts are tokenized again; here the tokenizer is the same, so the scores are too."""
    model, batch = tiny.critic(), completions(TEXTS)
    expected = RewardModel(model)(batch)
    spaced = replace(batch, prompts=[prompt + " " for prompt in batch.prompts])
    assert torch.allclose(RewardModel(model, tokenizer=tiny.tokenizer())(spaced), expected, atol=1e-5)
    chat = replace(batch, prompts=[[{"role": "user", "content": prompt}] for prompt in batch.prompts])
    assert torch.allclose(RewardModel(model, tokenizer=tiny.tokenizer())(chat), expected, atol=1e-5)


def test_weighted_sums_and_what_users_pass() -> None:
    one = lambda prompts, responses: [1.0] * len(responses)  # noqa: E731
    total = as_reward([(one, 2.0), (one, 0.5), tiny.critic()])
    assert isinstance(total, WeightedSum)
    scores = total(completions(TEXTS))
    assert torch.allclose(scores, 2.5 + RewardModel(tiny.critic())(completions(TEXTS)), atol=1e-6)
    assert len(total.last_scores) == 3
    assert isinstance(as_reward(tiny.critic()), RewardModel)
    assert as_reward(total) is total
    with pytest.raises(TypeError, match="is no reward"):
        as_reward(5)
    with pytest.raises(ValueError, match="no score head"):
        as_reward(tiny.policy())


def test_a_language_models_folder_is_no_reward(tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path / "lm")
    with pytest.raises(ValueError, match="no trained score head"):
        as_reward(tmp_path / "lm")
    tiny.critic().save_pretrained(tmp_path / "rm")
    expected = RewardModel(tiny.critic())(completions(TEXTS))
    assert torch.allclose(as_reward([(tmp_path / "rm", 1.0)])(completions(TEXTS)), expected, atol=1e-6)
