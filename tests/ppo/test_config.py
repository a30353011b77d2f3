"""Settings: limits are named, sizes follow from each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ppo import tiny


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"beta": -1.0}, "beta=-1.0"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"min_new_tokens": 9}, "max_new_tokens=8"),
        ({"clip_range": 1.5}, "clip_range=1.5"),
        ({"beta_schedule": "linear"}, "beta_end"),
        ({"beta_end": 0.1}, "beta_schedule='constant'"),
        ({"target_divergence": 0.1, "beta_schedule": "linear", "beta_end": 0.1}, "not both"),
        ({"responses_per_prompt": 3}, "responses_per_prompt=3"),
        ({"logits_memory_mb": 0.0}, "logits_memory_mb"),
        ({"ppo_epochs": 0}, "ppo_epochs=0"),
        ({"top_k": None}, "top_k=None must be an integer"),
        ({"top_p": None}, "top_p=None must be a finite number"),
        ({"beta": "0.1"}, "beta='0.1' must be a finite number"),
        ({"max_new_tokens": 8.5}, "max_new_tokens=8.5 must be an integer"),
        ({"missing_eos_penalty": float("nan")}, "missing_eos_penalty=nan"),
        ({"critic_learning_rate": -1.0}, "critic_learning_rate=-1.0"),
        ({"log_completions": -1}, "log_completions=-1"),
        ({"normalize_rewards": "False"}, "normalize_rewards='False' must be True or False"),
        ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list of integers"),
        ({"ppo_epochs": True}, "ppo_epochs=True must be an integer"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"train_sampling_strategy": "group_by_length"}, "group_by_length"),
    ],
)
def test_bad_settings_are_named(change: dict, named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        tiny.settings(tmp_path, **change)


def test_an_argument_parser_does_not_switch_the_checks_off(tmp_path: Path) -> None:
    from transformers import HfArgumentParser

    from wpr.ppo import PPOConfig

    command = ["--output_dir", str(tmp_path), "--beta", "0.2", "--use_cpu", "--report_to", "none", "--top_k", "7"]
    (args,) = HfArgumentParser((PPOConfig,)).parse_args_into_dataclasses(command)
    assert (args.beta, args.top_k) == (0.2, 7)
    with pytest.raises(ValueError, match="max_new_tokens=8.5 must be an integer"):
        tiny.settings(tmp_path, max_new_tokens=8.5)


def test_misspelled_settings_are_told_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unknown setting 'temprature'; did you mean 'temperature'?"):
        tiny.settings(tmp_path, temprature=1.0)


def test_the_best_model_is_that_of_the_best_score(tmp_path: Path) -> None:
    args = tiny.settings(tmp_path, load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps")
    assert (args.metric_for_best_model, args.greater_is_better) == ("score", True)


def test_sizes(tmp_path: Path) -> None:
    args = tiny.settings(
        tmp_path, gradient_accumulation_steps=2, num_minibatches=3, ppo_epochs=4, responses_per_prompt=6
    )
    assert (args.responses_per_device, args.prompts_per_device, args.steps_per_rollout) == (48, 8, 12)


def test_every_setting_is_documented(tmp_path: Path) -> None:
    from dataclasses import fields

    from transformers import TrainingArguments

    from wpr.ppo import PPOConfig

    own = {field.name for field in fields(PPOConfig)} - {field.name for field in fields(TrainingArguments)}
    assert len(own) > 30
    for field in fields(PPOConfig):
        if field.name in own:
            assert field.metadata["help"].endswith(".")


def test_the_papers_values_are_the_defaults(tmp_path: Path) -> None:
    from wpr.ppo import PPOConfig

    args = PPOConfig(str(tmp_path), report_to="none", use_cpu=True)
    stated = {
        "clip_range": 0.2, "value_clip_range": 0.2, "gae_lambda": 0.95, "gamma": 1.0, "ppo_epochs": 1,
        "learning_rate": 1.5e-5, "temperature": 0.8, "top_k": 50, "top_p": 1.0, "max_prompt_length": 512,
        "max_new_tokens": 256,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in stated} == stated
