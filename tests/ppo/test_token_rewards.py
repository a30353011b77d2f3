"""Rewards of tokens through PPO's trainer: a word is paid for where it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ppo import tiny
from tests.trl.test_token_rewards import LISTS, words_of_tokens
from wpr.rewards import WordList, WordListError

PLAIN = {"gamma": 1.0, "gae_lambda": 1.0, "whiten_advantages": False, "beta": 0.0}


def rolled_out(folder: Path, reward: Any, **changes: Any) -> tuple[Any, list[list[int]]]:
    """A trainer after its first rollout, and the tokens of its responses."""
    trainer = tiny.trainer(folder, reward, build=lambda: tiny.policy(4), **{**PLAIN, **changes})
    trainer.state.max_steps = 1
    trainer._begin_rollout(next(iter(trainer.get_train_dataloader())))
    rollout = trainer.rollout
    length = rollout.mask.shape[1]
    return trainer, [row[-length:][keep].tolist() for row, keep in zip(rollout.input_ids, rollout.mask, strict=True)]


@pytest.mark.parametrize("shaped", [False, True])
def test_returns_are_what_is_still_to_come(shaped: bool, tmp_path: Path) -> None:
    """Of a word list with weight 2 beside a function that knows nothing of tokens; as they are, and normalised."""
    reward = [(WordList(**LISTS), 2.0), (tiny.counts_w7, 10.0)]
    changes = {"normalize_rewards": True, "missing_eos_penalty": 0.7} if shaped else {}
    trainer, rows = rolled_out(tmp_path, reward, max_new_tokens=16, **changes)
    assert sum(7 in row for row in rows) > 0
    moments = trainer.shaping.moments
    mean, deviation = (moments.mean, moments.deviation) if shaped else (0.0, 1.0)
    for number, row in enumerate(rows):
        placed = [2 * worth / deviation for worth in words_of_tokens(row)]
        score = 2 * sum(words_of_tokens(row)) + 10 * row.count(7)
        score -= 0.7 * (row[-1] != tiny.EOS) if shaped else 0
        rest = (score - mean) / deviation - sum(placed)
        for t in range(len(row)):
            expected = sum(placed[t:]) + rest
            assert float(trainer.rollout.returns[number, t]) == pytest.approx(expected, abs=1e-4), (row, t)


def test_where_it_lands_is_the_only_difference(tmp_path: Path) -> None:
    on_tokens, rows = rolled_out(tmp_path / "token", WordList(**LISTS))
    at_end, same = rolled_out(tmp_path / "end", WordList(**LISTS, placement="end"))
    assert rows == same
    first = on_tokens.rollout.returns[:, 0]
    assert torch.allclose(first, at_end.rollout.returns[:, 0], atol=1e-5)
    assert first.std() > 0.1
    assert not torch.allclose(on_tokens.rollout.returns, at_end.rollout.returns, atol=0.1)


def test_a_function_with_a_number_per_token_trains(tmp_path: Path) -> None:
    """w7 is paid for in place, and comes more often."""

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[list[float]]:
        return [[float(token == 7) for token in ids] for ids in completion_ids]

    trainer = tiny.trainer(
        tmp_path, reward, max_steps=12, beta=0.01, learning_rate=1e-2, critic_learning_rate=1e-2,
        per_device_train_batch_size=32,
    )  # fmt: skip
    trainer.train()
    scores = [row["score"] for row in trainer.state.log_history if "score" in row]
    assert scores[-1] > scores[0] + 0.5


def test_bad_numbers_of_tokens_are_faults(tmp_path: Path) -> None:
    class Odd:
        name = "odd"

        def __call__(self, completions: Any) -> Any:
            return self.by_token(completions)[0]

        def by_token(self, completions: Any) -> Any:
            placed = completions.placed([[0.0, float("inf")]] * len(completions))
            return torch.zeros(len(completions)), placed

    trainer = tiny.trainer(tmp_path, Odd(), max_steps=1)
    with pytest.raises(Exception, match="the token's score is inf at token 1 of response 0"):
        trainer.train()


def test_a_tokenizer_that_cannot_spell_the_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WordListError, match="1 of 1 entries cannot be written with the model's tokens: walk"):
        tiny.trainer(tmp_path, WordList(["walk"]))
    with pytest.raises(WordListError, match="there is none; give the trainer its tokenizer"):
        tiny.trainer(tmp_path, WordList(["w7"]), parts={"processing_class": None})
