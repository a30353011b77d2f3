"""What a trainer is made of: parts that fit each other, or an error that names what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ppo import tiny
from wpr import ReverseKL, TokenGeometry, Wasserstein
from wpr.ppo import PPOTrainer


def test_the_geometry_uses_the_references_embeddings_in_place(tmp_path: Path) -> None:
    policy = tiny.policy()
    geometry = TokenGeometry.from_model(policy, neighbours=8)
    trainer = tiny.trainer(tmp_path, regularizer=Wasserstein(geometry, "unbalanced", k2=16), build=lambda: policy)
    assert trainer.reference is not policy
    weight = trainer.reference.get_input_embeddings().weight
    assert trainer.regularizer.geometry.embeddings.data_ptr() == weight.data_ptr()


def test_so_it_does_with_output_embeddings(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, regularizer="unbalanced:neighbours=8,k2=16,embeddings=output")
    weight = trainer.reference.get_output_embeddings().weight
    assert trainer.regularizer.geometry.embeddings.data_ptr() == weight.data_ptr()
    made = Wasserstein(TokenGeometry.from_embeddings(weight.detach().clone(), neighbours=8), "unbalanced", k2=16)
    again = tiny.trainer(tmp_path, regularizer=made)
    weight = again.reference.get_output_embeddings().weight
    assert again.regularizer.geometry.embeddings.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize(
    ("parts", "changes", "named"),
    [
        ({"critic": None}, {}, "needs a critic"),
        ({}, {"share_backbone": True}, "share_backbone=True has no critic"),
        ({"train_dataset": []}, {}, "has 0 prompts, fewer than the 8"),
        ({"reference": "other"}, {}, "vocabulary of 40 tokens and the reference one of 50"),
        ({"regularizer": "geometry"}, {}, "geometry has 50 tokens but the reference 40"),
        ({"regularizer": "revers-kl"}, {}, "did you mean 'reverse-kl'"),
        ({"regularizer": ReverseKL}, {}, "is no regularizer; pass a name, or an object"),
        ({"regularizer": "semantic:embeddings=some/model"}, {}, "names another model's embeddings"),
        ({"regularizer": None}, {}, "regularizer=None is no regularizer"),
        ({}, {"stop_token_ids": [999]}, r"stop tokens \[999\] are outside the vocabulary"),
        ({}, {"max_new_tokens": 126}, "exceed the 128 positions"),
        ({"critic": "small"}, {}, "critic has a vocabulary of 20 tokens, the policy one of 40"),
        ({"critic": "encoder"}, {}, "BertForSequenceClassification cannot be the critic"),
        ({"critic": "silent encoder"}, {}, "BertForSequenceClassification cannot be the critic"),
        ({"reward": "short"}, {}, "exceed the 8 positions of the reward_model"),
        ({"critic": "frozen"}, {}, "no parameter of critic= is trainable"),
    ],
)
def test_what_does_not_fit_is_named(parts: dict, changes: dict, named: str, tmp_path: Path) -> None:
    parts = dict(parts)
    regularizer: Any = parts.pop("regularizer", "reverse-kl")
    if regularizer == "geometry":
        regularizer = Wasserstein(TokenGeometry.from_embeddings(torch.randn(50, 4), neighbours=8), "unbalanced", k2=16)
    if parts.get("reference") == "other":
        parts["reference"] = tiny.policy(vocab_size=50)
    if parts.get("critic") == "small":
        parts["critic"] = tiny.critic(vocab_size=20)
    if parts.get("critic") == "frozen":
        parts["critic"] = tiny.critic().requires_grad_(False)
    if parts.get("critic") == "silent encoder":
        parts["critic"] = tiny.encoder()
        torch.nn.init.zeros_(parts["critic"].classifier.weight)
    reward: Any = tiny.critic(max_position_embeddings=8) if parts.pop("reward", None) == "short" else tiny.counts_w7
    if parts.get("critic") == "encoder":
        parts["critic"] = tiny.encoder()
    if "share_backbone" in changes:
        parts["critic"] = tiny.critic()
    with pytest.raises((ValueError, TypeError), match=named):
        tiny.trainer(tmp_path, reward, regularizer=regularizer, parts=parts, **changes).train()


def test_one_object_in_two_roles_is_refused(tmp_path: Path) -> None:
    policy = tiny.policy()
    with pytest.raises(ValueError, match="reference and model are the same object"):
        tiny.trainer(tmp_path, build=lambda: policy, parts={"reference": policy})
    for several in (False, True):
        critic = tiny.critic()
        reward = [(critic, 1.0), tiny.counts_w7] if several else critic
        with pytest.raises(ValueError, match="reward model and critic are the same object"):
            tiny.trainer(tmp_path, reward, parts={"critic": critic})


def test_plain_training_arguments_are_refused(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    with pytest.raises(TypeError, match="pass a PPOConfig"):
        PPOTrainer(tiny.policy(), TrainingArguments(str(tmp_path), use_cpu=True), reward=tiny.counts_w7)
