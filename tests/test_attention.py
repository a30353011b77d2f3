"""Which attention kernels forward passes with gradients may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import RewardConfig, SFTConfig

from tests.ppo import tiny
from wpr.language_models import cudnn_attention_disabled
from wpr.pipeline.training import ResumableRewardTrainer, ResumableSFTTrainer
from wpr.ppo.generation import TransformersGeneration

QUIET = {
    "max_steps": 2, "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True, "bf16": False,
    "save_strategy": "no",
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether cuDNN's attention was allowed, at every attention but those that draw responses."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    found: list[bool] = []
    generating = False
    plain, draw = torch.nn.functional.scaled_dot_product_attention, TransformersGeneration.generate

    def watched(query: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        if not generating:
            found.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(query, *args, **options)  # type: ignore[arg-type]

    def generate(*args: Any, **options: Any) -> Any:
        nonlocal generating
        generating = True
        try:
            return draw(*args, **options)
        finally:
            generating = False

    monkeypatch.setattr(TransformersGeneration, "generate", generate)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    yield found
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_ppo(asked: list[bool], tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, max_steps=2)
    asked.clear()  # what it tried on its models before
    trainer.train()
    assert asked
    assert not any(asked)


def test_ppo_that_computes_states_again_in_the_backward_pass(asked: list[bool], tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, max_steps=2, gradient_checkpointing=True)
    asked.clear()
    trainer.train()
    assert asked
    assert not any(asked)


def test_sft(asked: list[bool], tmp_path: Path) -> None:
    rows = Dataset.from_list([{"prompt": "w1 w2", "completion": " w3"}, {"prompt": "w4", "completion": " w5 w6"}])
    ResumableSFTTrainer(
        tiny.policy(), SFTConfig(str(tmp_path), **QUIET), train_dataset=rows, processing_class=tiny.tokenizer()
    ).train()
    assert asked
    assert not any(asked)


def test_reward_model(asked: list[bool], tmp_path: Path) -> None:
    rows = Dataset.from_list([{"prompt": "w1 w2", "chosen": " w3", "rejected": " w4 w5"}] * 2)
    ResumableRewardTrainer(
        tiny.critic(), RewardConfig(str(tmp_path), **QUIET), train_dataset=rows, processing_class=tiny.tokenizer()
    ).train()
    assert asked
    assert not any(asked)


@pytest.mark.needs("gpu")
def test_the_gradient_is_finite_where_the_default_s_was_not() -> None:
    """320 tokens of bf16, all scores about -120, and padding on the left."""
    size, tokens = 64, 320
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (2, 3, tokens, size)
    query, key, value = (torch.randn(shape, device="cuda", generator=generator).bfloat16() * 0.1 for _ in range(3))
    query[..., 0], key[..., 0] = 1.0, -120 * size**0.5
    query.requires_grad_()
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device="cuda").tril().repeat(2, 1, 1, 1)
    mask[1, :, :, :40] = False
    with cudnn_attention_disabled():
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out[:, :, 40:].float().square().sum().backward()
    assert query.grad is not None
    assert query.grad.isfinite().all()
