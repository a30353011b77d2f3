"""What people bring from TRL: reward functions, names of arguments and of settings."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ppo import tiny
from wpr.ppo import PPOConfig, PPOTrainer, TrainingFault
from wpr.ppo.config import TRL_NAMES

DOCS = Path(__file__).parents[2] / "docs" / "ppo.md"


def chats(count: int) -> list[dict[str, Any]]:
    return [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in tiny.prompts(count)]


def logged(trainer: PPOTrainer) -> list[dict[str, Any]]:
    """Train, and give the log."""
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def recording(calls: list[dict[str, Any]]) -> Callable[..., list[float]]:
    """A reward function as TRL's users write them, which keeps what it is called with."""

    def reward(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
        calls.append({"prompts": prompts, "completions": completions, **kwargs})
        return [0.0] * len(prompts)

    return reward


def short_or_long() -> Any:
    """A policy whose most likely completions end after different numbers of tokens, or not at all."""
    model = tiny.policy(4)
    with torch.no_grad():
        model.lm_head.weight[tiny.EOS] = model.lm_head.weight[3:].mean(0) * 3 + 0.1
    return model


@pytest.mark.parametrize("rows", [tiny.prompts, chats])
def test_functions_get_what_trls_grpo_gives_them(rows: Any, tmp_path: Path) -> None:
    """The same keywords, and the same values for the same (most likely) completions of the same prompts."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings = {
        "num_generations": 2, "max_completion_length": 8, "max_steps": 1, "per_device_train_batch_size": 32,
        "temperature": 1.0, "top_k": 1, "use_cpu": True, "report_to": "none", "save_strategy": "no", "bf16": False,
        "disable_tqdm": True,
    }  # fmt: skip
    options = {"train_dataset": Dataset.from_list(rows(16)), "processing_class": tiny.tokenizer()}
    theirs: list[dict[str, Any]] = []
    GRPOTrainer(short_or_long(), recording(theirs), GRPOConfig(str(tmp_path / "grpo"), **settings), **options).train()
    ours: list[dict[str, Any]] = []
    args = PPOConfig(str(tmp_path / "ppo"), log_completions=0, **settings)
    reference = short_or_long()
    trainer = PPOTrainer(
        short_or_long(), args, reward_funcs=recording(ours), ref_model=reference, critic=tiny.critic(), **options
    )
    trainer.train()
    assert trainer.reference is reference
    assert ours[0].keys() == theirs[0].keys()
    lists = {name for name, value in theirs[0].items() if isinstance(value, list)}
    assert lists == {"prompts", "completions", "completion_ids", "number"}
    by_number = [
        {number: {name: call[name][row] for name in lists} for row, number in enumerate(call["number"])}
        for call in (ours[0], theirs[0])
    ]
    assert by_number[0] == by_number[1]
    assert len(by_number[0]) == 16
    assert len({len(ids) for ids in ours[0]["completion_ids"]}) > 1
    assert type(ours[0]["trainer_state"]) is type(theirs[0]["trainer_state"])
    assert ours[0]["trainer_state"].global_step == 1  # the trainer's own, which has gone on


def word_count(completions: list[list[dict[str, str]]], log_metric: Any, log_extra: Any, **kwargs: Any) -> list[float]:
    counts = [float(len(completion[0]["content"].split())) for completion in completions]
    log_metric("longest", max(counts))
    log_extra("words", counts)
    return counts


async def is_even(number: list[int], **kwargs: Any) -> list[float | None]:
    """Scores the prompts of even numbers and skips the others."""
    return [None if one % 2 else 1.0 for one in number]


def test_several_functions_with_weights(tmp_path: Path) -> None:
    """Means by name as in TRL, each over what the function scores; what functions log; and the same in evaluations."""
    parts = {"train_dataset": chats(64), "eval_dataset": chats(6)}
    trainer = tiny.trainer(
        tmp_path, [word_count, is_even], parts=parts, reward_weights=[0.5, 2.0], max_steps=1, log_completions=4,
        responses_per_prompt=2,
    )  # fmt: skip
    (row,) = logged(trainer)
    assert row["rewards/is_even/mean"] == 1.0
    assert row["longest"] >= row["rewards/word_count/mean"] > 0
    assert row["unscored_responses"] == 0
    lines = (tmp_path / "completions" / "step-000000.jsonl").read_text().splitlines()
    assert [json.loads(line)["words"] for line in lines] == [
        len(json.loads(line)["response"].split()) for line in lines
    ]
    found = trainer.evaluate()
    assert found["eval_rewards/is_even/mean"] == 1.0
    assert found["eval_score"] == pytest.approx(0.5 * found["eval_rewards/word_count/mean"] + 2.0 * 0.5)
    assert found["eval_longest"] >= found["eval_rewards/word_count/mean"]


def test_trls_own_functions(tmp_path: Path) -> None:
    from trl.rewards import get_soft_overlong_punishment, think_format_reward

    too_long = get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=6)
    trainer = tiny.trainer(tmp_path, [think_format_reward, too_long], parts={"train_dataset": chats(64)}, max_steps=1)
    (row,) = logged(trainer)
    assert row["rewards/think_format_reward/mean"] == 0.0
    assert -1 < row[f"rewards/{too_long.__name__}/mean"] < 0
    assert row["score"] == pytest.approx(row[f"rewards/{too_long.__name__}/mean"])


def test_what_no_function_scores_teaches_nothing(tmp_path: Path) -> None:
    """Policy and critic change as if the response were not there; means are over the others."""
    skips = {"on": True}

    def score(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float | None]:
        rewards: list[float | None] = [float(len(completion.split())) for completion in completions]
        return [None, *rewards[1:]] if skips["on"] else rewards

    trainer = tiny.trainer(
        tmp_path, score, max_steps=1, normalize_rewards=True, parts={"eval_dataset": tiny.prompts(4)}
    )
    (row,) = logged(trainer)
    assert row["unscored_responses"] == 1 / 8
    assert trainer.shaping.moments.count == 7
    assert row["score"] == pytest.approx(trainer.shaping.moments.mean)
    batch = trainer.data_collator(tiny.prompts(8))
    trainer._begin_rollout(batch)
    assert trainer.rollout is not None
    assert trainer.rollout.mask.any(-1).tolist() == [False] + [True] * 7
    assert not trainer.rollout.advantages[0].any()
    assert trainer.rollout.advantages[1:].isfinite().all()
    trainer.evaluate()
    assert [row["score"] is None for row in trainer.evaluated] == [True, False, False, False]
    skips["on"] = False
    assert trainer.evaluate()["eval_score"] > 0


def test_nothing_scored_changes_nothing(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, lambda completions, **kwargs: [None] * len(completions), max_steps=1)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    (row,) = logged(trainer)
    assert row["unscored_responses"] == 1
    assert "score" not in row
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda completions, log_metric, **kwargs: log_metric("kl", 1.0), "logs 'kl', which the log has already"),
        (lambda completions, log_extra, **kwargs: log_extra("words", [1]), "has 1 values for 8 responses"),
        (lambda completions, solution, **kwargs: [], "missing 1 required positional argument: 'solution'"),
        (lambda completions, **kwargs: ["good"] * 8, "returned 'good' for response 0; return a finite number, or None"),
    ],
)
def test_faults_of_functions_are_named(function: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingFault, match=named):
        tiny.trainer(tmp_path, function, max_steps=1).train()


def test_one_setting_by_two_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="max_completion_length is TRL's name for max_new_tokens; give one of them"):
        tiny.settings(tmp_path, max_completion_length=8)
    with pytest.raises(TypeError, match="num_generations is TRL's name for responses_per_prompt"):
        tiny.settings(tmp_path, num_generations=2, responses_per_prompt=2)
    for name in ("reward_funcs", "ref_model"):
        with pytest.raises(TypeError, match=f"{name} is TRL's name for {TRL_NAMES[name]}; give one of them"):
            tiny.trainer(tmp_path, parts={name: tiny.counts_w7, "reference": None})
    with pytest.raises(ValueError, match=r"reward_weights=\[1.0\] are 1 weights for 2 rewards"):
        tiny.trainer(tmp_path, [tiny.counts_w7, word_count], reward_weights=[1.0])
    with pytest.raises(ValueError, match="reward_weights='1' must be a list of numbers, or None"):
        tiny.settings(tmp_path, reward_weights="1")


def test_the_table_of_names() -> None:
    """What it says is accepted is; all other names are those of our arguments and settings, and of TRL's."""
    from trl import GRPOConfig, GRPOTrainer

    def names_of(config: type, trainer: type) -> set[str]:
        return {field.name for field in fields(config)} | set(inspect.signature(trainer.__init__).parameters)

    text = DOCS.read_text()
    lines = text[text.index("## 9. Coming from TRL") :].splitlines()
    table = [[re.findall("`([a-z_]+)`", cell) for cell in line.split("|")[1:4]] for line in lines if line[:3] == "| `"]
    assert {other: ours for (ours,), others, _ in table for other in others} == TRL_NAMES
    assert {ours for (ours,), _, _ in table} <= names_of(PPOConfig, PPOTrainer)
    assert {name for _, _, grpo in table for name in grpo} <= names_of(GRPOConfig, GRPOTrainer)


@pytest.mark.parametrize("name", ["score", "grad_norm", "eval_score", "rewards/f/mean", "score_shaped", "gold"])
def test_names_that_the_log_has_are_refused(name: str, tmp_path: Path) -> None:
    def score(completions: list[str], log_metric: Any, **kwargs: Any) -> list[float]:
        log_metric(name, 5.0)
        return [1.0] * len(completions)

    watched = {"monitors": {"gold": lambda prompts, responses, **columns: [0.0] * len(responses)}}
    with pytest.raises(TrainingFault, match=f"logs '{name}', which the log has already"):
        tiny.trainer(tmp_path, score, max_steps=1, parts=watched).train()
