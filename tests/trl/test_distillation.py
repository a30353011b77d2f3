"""Distillation by a regularizer: TRL's own loss and gradient where TRL has the divergence, and others beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl import DistillationConfig
from trl import DistillationTrainer as TRLs

from tests.ppo import tiny as models
from tests.trl import tiny
from wpr.trl import DistillationTrainer


def trainer(
    folder: Path,
    kind: Any = DistillationTrainer,
    parts: dict[str, Any] | None = None,
    model: Any = None,
    **changes: Any,
) -> Any:
    settings = {
        "per_device_train_batch_size": 4, "max_completion_length": 8, "max_steps": 2, "learning_rate": 1e-2,
        "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
        "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    given = {
        "teacher_model": models.policy(5, hidden_size=48), "train_dataset": tiny.prompts(),
        "processing_class": models.tokenizer(), **(parts or {}),
    }  # fmt: skip
    args = DistillationConfig(str(folder), **{**settings, **changes})
    return kind(models.policy(4) if model is None else model, args=args, **given)


def batch_of(trainer: Any) -> dict[str, Any]:
    trainer.model.train()
    torch.manual_seed(0)
    return trainer._generate_and_score_completions(list(trainer.train_dataset)[:4])


def loss_and_gradient(trainer: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    loss = trainer.compute_loss(trainer.model, batch)
    found = torch.autograd.grad(loss, list(trainer.model.parameters()))
    return loss.detach(), torch.cat([each.flatten() for each in found])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("name", "beta"), [("reverse-kl", 1.0), ("forward-kl", 0.0)])
def test_where_trl_has_the_divergence(name: str, beta: float, temperature: float, tmp_path: Path) -> None:
    ours = trainer(tmp_path, parts={"regularizer": name}, temperature=temperature)
    trls = trainer(tmp_path, TRLs, beta=beta, temperature=temperature)
    batch = batch_of(ours)
    trls.model.train()
    (loss, gradient), (expected, wanted) = loss_and_gradient(ours, batch), loss_and_gradient(trls, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert (gradient - wanted).norm() < 1e-5 * wanted.norm()
    logged = ours._metrics["train"], trls._metrics["train"]
    assert logged[0]["entropy"] == pytest.approx(logged[1]["entropy"], rel=1e-5)
    assert logged[0][f"regularizer/{name}"] == pytest.approx([float(loss)], rel=1e-5)


@pytest.mark.parametrize("adapter", [False, True])
def test_the_student_comes_nearer(adapter: bool, tmp_path: Path) -> None:
    lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")} if adapter else {}
    parts = {"regularizer": "reverse-kl + 4*semantic", **lora}
    made = trainer(tmp_path, parts=parts, max_steps=12, gradient_accumulation_steps=2, learning_rate=2e-2)
    teacher = [parameter.detach().clone() for parameter in made.teacher_model.parameters()]
    made.train()
    logged = [row for row in made.state.log_history if "loss" in row]
    first, last = logged[0], logged[-1]
    assert last["regularizer/divergence"] < 0.7 * first["regularizer/divergence"]
    assert first["regularizer/divergence"] == pytest.approx(
        first["regularizer/reverse-kl"] + 4 * first["regularizer/semantic"], rel=1e-4
    )
    assert all(torch.equal(a, b) for a, b in zip(teacher, made.teacher_model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("parts", "settings", "message"),
    [
        ({"teacher_model": None}, {}, "teacher_model=None leaves nothing to measure"),
        ({}, {"beta": 0.5}, "beta=0.5 of DistillationConfig chooses TRL's divergence"),
        ({}, {"use_liger_kernel": True}, "use_liger_kernel=True .* set it to False"),
        ({"regularizer": "reverse-lk"}, {}, "did you mean 'reverse-kl'"),
    ],
)
def test_refused(parts: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, parts=parts, **settings)
