"""Rewards of tokens in TRL's trainers: advantages by their definition, and where training ends."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from scipy.special import softmax

from tests.ppo import tiny as models
from tests.ppo.test_optimum import bandit_policy
from tests.trl import tiny
from tests.trl.test_reward_form import EMBEDDINGS
from wpr.rewards import Completions, RewardError, WordList, WordListError
from wpr.trl import GRPOTrainer

WORTH = {token: (-1) ** token * (1 + token % 3) / 2 for token in range(3, 30)}
LISTS = {
    "forbidden": [f"w{token} = {-worth}" for token, worth in WORTH.items() if worth < 0] + ["w10 w11"],
    "preferred": [f"w{token} = {worth}" for token, worth in WORTH.items() if worth > 0],
}
SETTINGS = {"scale_rewards": "none", "max_completion_length": 12, "num_generations": 4}


def per_token(completion_ids: list[list[int]], **columns: Any) -> list[Any]:
    """What a user's function may give: a number per token; None for completions that begin with w5."""
    return [None if ids[0] == 5 else [0.25 * (token % 5) - 0.3 for token in ids] for ids in completion_ids]


def counts(completions: list[str], **columns: Any) -> list[float]:
    return [0.1 * completion.count("w1") for completion in completions]


def made(folder: Path, functions: Any, algorithm: str = "grpo", **changes: Any) -> tuple[Any, dict[str, Any]]:
    """A trainer and a batch of completions of different lengths."""
    parts = {"reward_funcs": functions, "regularizer_beta": 0.0, "regularizer_in": changes.pop("form", "reward")}
    settings = {name: value for name, value in SETTINGS.items() if algorithm == "grpo" or name != "scale_rewards"}
    trainer = tiny.trainer(folder, algorithm, models.policy(4), parts, **{**settings, **changes})
    with torch.no_grad():
        trainer.model.lm_head.weight[models.EOS] += 0.5
    torch.manual_seed(1)
    return trainer, tiny.batch_of(trainer)


def words_of_tokens(ids: list[int]) -> list[float]:
    """`LISTS` by hand, since tokens of the tiny model are whole words."""
    return [WORTH.get(token, 0.0) - float(ids[max(t - 1, 0) : t + 1] == [10, 11]) for t, token in enumerate(ids)]


@pytest.mark.parametrize(
    ("function", "scale", "form"),
    [
        ("words", "none", "reward"),
        ("words", "group", "loss"),
        ("lists", "none", "loss"),
        ("lists", "batch", "reward"),
        ("lists", "group", "reward"),
    ],
)
def test_advantages_by_their_definition(function: str, scale: str, form: str, tmp_path: Path) -> None:
    functions = [WordList(**LISTS) if function == "words" else per_token, counts]
    trainer, batch = made(tmp_path, functions, form=form, scale_rewards=scale, reward_weights=[2.0, 1.0])
    ids, mask = batch["completion_ids"], batch["completion_mask"].bool()
    rows = [tokens[keep].tolist() for tokens, keep in zip(ids, mask, strict=True)]
    texts = trainer.processing_class.batch_decode(rows, skip_special_tokens=True)
    # counts scores all; of an unscored completion its part remains
    placed = [words_of_tokens(row) for row in rows] if function == "words" else per_token(rows)
    placed = [[2 * number for number in row or [0.0] * len(ids)] for row, ids in zip(placed, rows, strict=True)]
    rewards = torch.tensor([sum(row) for row in placed]) + torch.tensor(counts(texts))
    assert len({len(row) for row in rows}) > 2
    assert sum(number != 0 for row in placed for number in row) > 10
    grouped = rewards.view(-1, 4)
    divisor = {"none": torch.ones(2), "group": grouped.std(-1) + 1e-4, "batch": (rewards.std() + 1e-4).expand(2)}[scale]
    for number, row in enumerate(placed):
        group = [other for other in range(number // 4 * 4, number // 4 * 4 + 4) if other != number]
        past = torch.tensor([[sum(placed[one][:t]) for t in range(mask.shape[1])] for one in (number, *group)])
        times = 1 / float(divisor[number // 4])
        most = float(past.std(0).max())
        taken = min(times, 1 / most) if scale != "none" and most > 0 else times
        for t in range(len(row)):
            expected = times * float(rewards[number] - grouped[number // 4].mean())
            expected -= taken * float(past[0, t] - past[:, t].mean())
            assert float(batch["advantages"][number, t]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("case", ["rloo", "sequence"])
def test_one_ratio_per_sequence_takes_the_sum(case: str, tmp_path: Path) -> None:
    algorithm = "rloo" if case == "rloo" else "grpo"
    changes = {} if case == "rloo" else {"importance_sampling_level": "sequence"}
    _, batch = made(tmp_path / "tokens", WordList(**LISTS), algorithm, **changes)
    _, other = made(tmp_path / "end", WordList(**LISTS, placement="end"), algorithm, **changes)
    assert batch["advantages"].shape == (8,)
    assert batch["advantages"].std() > 0.1
    assert torch.equal(batch["advantages"], other["advantages"])


def test_trls_own_trainer_takes_a_word_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny.TRAINERS, "grpo", (trl.GRPOTrainer, trl.GRPOConfig))
    words = WordList(**LISTS)
    trainer = tiny.trainer(tmp_path, parts={"reward_funcs": [words]}, max_steps=1, **SETTINGS)
    batch = tiny.batch_of(trainer)
    assert batch["advantages"].shape == (8,)
    trainer.train()
    assert any("rewards/words/mean" in row for row in trainer.state.log_history)
    texts = ["w7 w3 W7", [{"role": "assistant", "content": "w12"}], "..."]
    assert words(prompts=["", "", ""], completions=texts, completion_ids=[[1], [1], [1]]) == [-2.5, 0.5, None]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WordListError, match=r"1 of 2 entries cannot be written with .* tokens: walk \(entry:2\)"):
        made(tmp_path, WordList(["w7", "walk"]))
    with pytest.raises(RewardError, match="returned 1 numbers for response ., which has"):
        made(tmp_path, lambda completion_ids, **_: [[0.5] for _ in completion_ids], max_completion_length=3)
    with pytest.raises(ValueError, match="multi_objective_aggregation='normalize_then_sum' scales every reward"):
        made(tmp_path, [WordList(**LISTS), counts], multi_objective_aggregation="normalize_then_sum")


# Where training ends: completions of two tokens, all of them gone through, each as often as the policy draws it.
BETA, WORDS = 1.5, 8
PAIRS = [(first, second) for first, second in product(range(WORDS), repeat=2) if first != models.EOS or second == 0]
TABLE, LOGITS = np.random.default_rng(0).standard_normal((2, WORDS))


def of_pairs(model: Any) -> torch.Tensor:
    """Log-probability of every completion."""
    starts = torch.tensor([[models.BOS, first] for first in range(WORDS)])
    logs = model(starts).logits.double().log_softmax(-1)
    first, second = torch.tensor(PAIRS).T
    return logs[0, 0, first] + torch.where(first == models.EOS, 0.0, logs[first, 1, second])


class Weighted(GRPOTrainer):
    """Each completion counts as often as the policy draws it."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        with torch.no_grad():
            batch["advantages"] = batch["advantages"] * of_pairs(self.model).exp().float().unsqueeze(-1) * len(PAIRS)
        return batch


def test_training_ends_at_the_optimum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """p(y) proportional to q(y) exp(R(y) / beta), where R(y) is the sum of what the tokens earn."""

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[list[float]]:
        return [[float(TABLE[token]) for token in ids] for ids in completion_ids]

    monkeypatch.setitem(tiny.TRAINERS, "grpo", (Weighted, tiny.TRAINERS["grpo"][1]))
    trainer = tiny.trainer(
        tmp_path, model=bandit_policy(softmax(LOGITS), EMBEDDINGS[:WORDS]),
        parts={"reward_funcs": reward, "regularizer": "reverse-kl", "regularizer_beta": BETA,
               "train_dataset": Dataset.from_list([{"prompt": "<s>"}])},
        per_device_train_batch_size=len(PAIRS), num_generations=len(PAIRS), max_completion_length=2, max_steps=60,
        scale_rewards="none", loss_type="dr_grpo", learning_rate=3e-2, lr_scheduler_type="cosine", max_grad_norm=0.0,
        logging_steps=1000, shuffle_dataset=False,
    )  # fmt: skip
    drawn = torch.tensor(PAIRS)
    trainer.model.generate = lambda input_ids, **options: torch.cat([input_ids, drawn], -1)
    before = of_pairs(trainer.model).detach().numpy()
    trainer.train()
    rewards = np.array([TABLE[a] + (TABLE[b] if a != models.EOS else 0) for a, b in PAIRS])
    optimum = np.exp(before + rewards / BETA)
    optimum /= optimum.sum()
    reached = of_pairs(trainer.model).exp().detach().numpy()
    to_go, left = (np.abs(p - optimum).sum() / 2 for p in (np.exp(before), reached))
    print(f"{to_go:.3f} to go, {left:.5f} from the optimum")
    assert to_go > 0.15
    assert left < 0.02


def test_a_class_sees_columns_and_prompts(tmp_path: Path) -> None:
    seen: list[Completions] = []

    class Own:
        name = "own"

        def __call__(self, completions: Completions) -> torch.Tensor:
            return self.by_token(completions)[0]

        def by_token(self, completions: Completions) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(completions)
            return torch.zeros(len(completions)), completions.placed([[]] * len(completions))

    rows = Dataset.from_list([{"prompt": "w3 w4", "answer": f"a{row}"} for row in range(8)])
    trainer = tiny.trainer(tmp_path, parts={"reward_funcs": Own(), "train_dataset": rows}, **SETTINGS)
    batch = trainer._generate_and_score_completions([rows[0]] * 4 + [rows[1]] * 4)
    (given,) = seen
    assert given.columns["answer"] == ["a0"] * 4 + ["a1"] * 4
    assert "trainer_state" in given.trainer
    for row, tokens in enumerate(given.response_ids or []):
        whole = [*batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist(), *tokens]
        assert given.input_ids[row][given.attention_mask[row].bool()].tolist() == whole
        assert int(given.last[row]) == len(whole) - 1
