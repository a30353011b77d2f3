"""Prompts to batches, and the order of a run."""

from __future__ import annotations

import pytest

from tests.ppo import tiny
from wpr.ppo.prompts import PromptCollator, RolloutSampler


def collate(rows, max_length: int = 16):
    return PromptCollator(tiny.tokenizer(), max_length)(rows)


def test_left_padding_and_columns() -> None:
    batch = collate([{"prompt": "w5", "answer": 1}, {"prompt": "w6 w7 w8", "answer": 2}])
    assert batch["input_ids"].tolist() == [[0, 0, 5], [6, 7, 8]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert batch["prompts"] == ["w5", "w6 w7 w8"]
    assert batch["columns"] == {"answer": [1, 2]}


def test_chat_messages_go_through_the_template() -> None:
    batch = collate([{"prompt": [{"role": "user", "content": "w5 w6"}]}])
    assert batch["input_ids"].tolist() == [[5, 6]]


def test_ready_tokens() -> None:
    batch = collate([{"input_ids": [4, 5]}])
    assert batch["input_ids"].tolist() == [[4, 5]]
    assert batch["prompts"] == ["w4 w5"]


def test_long_prompts_keep_their_end() -> None:
    assert collate([{"prompt": "w5 w6 w7 w8"}], max_length=2)["input_ids"].tolist() == [[7, 8]]


def test_an_empty_prompt_is_the_beginning_of_sequence() -> None:
    assert collate([{"prompt": ""}, {"prompt": "w5"}])["input_ids"].tolist() == [[2], [5]]


def test_an_empty_prompt_without_one_is_refused() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.bos_token = None
    with pytest.raises(ValueError, match="has no tokens"):
        PromptCollator(tokenizer, 8)([{"prompt": ""}])


def test_missing_columns_are_named() -> None:
    with pytest.raises(ValueError, match="'prompt' or 'input_ids'"):
        collate([{"text": "w5"}])


def test_each_group_is_repeated_and_every_epoch_has_its_own_order() -> None:
    done = 0
    sampler = RolloutSampler(range(10), group=4, repeats=3, shuffle=True, seed=0, rollouts_done=lambda: done)
    order = list(sampler)
    assert len(order) == len(sampler) == 24
    groups = [order[i : i + 4] for i in range(0, 24, 4)]
    assert groups[0] == groups[1] == groups[2] != groups[3]
    assert len({*groups[0], *groups[3]}) == 8
    done = 1
    assert list(sampler) == order  # the middle of the first epoch, as a resumed run begins
    done = 2
    assert list(sampler) != order
    assert list(RolloutSampler(range(4), 4, 1, shuffle=False, seed=0)) == [0, 1, 2, 3]


def test_the_attention_mask_of_ready_tokens_counts() -> None:
    batch = collate([{"input_ids": [0, 0, 4, 5], "attention_mask": [0, 0, 1, 1]}])
    assert batch["input_ids"].tolist() == [[4, 5]]


def test_prompts_of_the_wrong_kind_are_named() -> None:
    with pytest.raises(ValueError, match="None is neither text nor"):
        collate([{"prompt": None}])
    with pytest.raises(ValueError, match="there is no tokenizer"):
        PromptCollator(None, 8)([{"prompt": "w5"}])
    assert PromptCollator(None, 8)([{"input_ids": [4, 5]}])["prompts"] == ["4 5"]


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="has 3 prompts, fewer than the 4"):
        RolloutSampler(range(3), 4, 1, shuffle=True, seed=0)


def test_each_prompt_several_times_in_a_row() -> None:
    """Where the rows of a batch are responses; every micro-batch of the rollout comes with all of them."""
    sampler = RolloutSampler(range(7), group=2, repeats=2, shuffle=False, seed=0, each=3)
    assert list(sampler) == [*[0, 0, 0, 1, 1, 1] * 2, *[2, 2, 2, 3, 3, 3] * 2, *[4, 4, 4, 5, 5, 5] * 2]
    assert len(sampler) == 36
