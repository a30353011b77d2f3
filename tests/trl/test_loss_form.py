"""The divergence in the loss: its gradient against autograd's through full logits, its average against TRL's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ppo import tiny as models
from tests.trl import tiny

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo"]


def ready(folder: Path, algorithm: str = "grpo", steps: int = 1, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """A trainer whose policy has moved, and a batch with completions of different lengths."""
    parts = {"regularizer": "reverse-kl", "regularizer_in": "loss", "regularizer_beta": 0.3, **changes.pop("parts", {})}
    trainer = tiny.trainer(folder, algorithm, models.policy(4), parts, max_completion_length=12, **changes)
    tiny.moved(trainer.model)
    with torch.no_grad():
        trainer.model.lm_head.weight[models.EOS] += 0.5
    torch.manual_seed(1)
    batch = tiny.batch_of(trainer)
    assert len(set(batch["completion_mask"].sum(-1).tolist())) > 2
    trainer.current_gradient_accumulation_steps = steps
    return trainer, batch


def gradient(trainer: Any, loss: Tensor) -> Tensor:
    parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(parameters, found, strict=True)]
    )


def full_kl(trainer: Any, batch: dict[str, Tensor], temperature: float) -> Tensor:
    """KL of each completion token's distribution ``(B, T)``, through full logits."""
    sequences = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    length = batch["completion_ids"].shape[1]
    log_p, log_q = (
        (model(input_ids=sequences, attention_mask=attention).logits[:, -length - 1 : -1] / temperature).log_softmax(-1)
        for model in (trainer.model, trainer.reference)
    )
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def trl_loss(trainer: Any, batch: dict[str, Any]) -> Tensor:
    """TRL's own."""
    return tiny.trls(trainer).compute_loss(trainer, trainer.model, batch)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_the_added_gradient_is_autograds(algorithm: str, temperature: float, tmp_path: Path) -> None:
    trainer, batch = ready(tmp_path, algorithm, temperature=temperature)
    model, mask = trainer.model, batch["completion_mask"]
    added = gradient(trainer, trainer.compute_loss(model, batch)) - gradient(trainer, trl_loss(trainer, batch))
    summed = (full_kl(trainer, batch, temperature) * mask).sum()
    exact = gradient(trainer, 0.3 * summed / (mask.sum() if algorithm == "grpo" else len(mask)))
    assert exact.norm() > 0.01
    print(f"{algorithm}, temperature {temperature}: {float((added - exact).norm() / exact.norm()):.1e}")
    assert (added - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_tokens_are_averaged_as_trls(loss_type: str, tmp_path: Path) -> None:
    """TRL's loss is linear in the advantages, so that its gradient in them has the weight of every token."""
    trainer, batch = ready(
        tmp_path, loss_type=loss_type, steps=2, gradient_accumulation_steps=2, steps_per_generation=4, epsilon_high=5.0
    )
    mask = batch["completion_mask"].float()
    batch["advantages"] = torch.zeros_like(mask).requires_grad_()
    batch.pop("old_per_token_logps", None)
    weights = -torch.autograd.grad(trl_loss(trainer, batch), batch["advantages"])[0]
    if loss_type == "cispo":  # there the loss of a token is its log-probability
        sequences = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        logits = trainer.model(input_ids=sequences, attention_mask=attention).logits[:, -mask.shape[1] - 1 : -1]
        weights = weights / logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    values = torch.rand(mask.shape) * mask
    ours = trainer._average(values, mask.bool(), batch)
    torch.testing.assert_close(ours, (weights * values).sum().detach(), rtol=1e-4, atol=0)


def test_at_zero_beta_the_divergence_is_logged_and_the_loss_is_trls(tmp_path: Path) -> None:
    trainer, batch = ready(tmp_path, parts={"regularizer_beta": 0.0, "regularizer": "reverse-kl + 2*chi-squared"})
    loss = trainer.compute_loss(trainer.model, batch)
    assert torch.equal(loss, trl_loss(trainer, batch))
    mask, logged = batch["completion_mask"], trainer._metrics["train"]
    exact = float((full_kl(trainer, batch, 1.0).detach() * mask).sum() / mask.sum())
    assert logged["regularizer/reverse-kl"] == pytest.approx([exact], rel=1e-5)
    both = logged["regularizer/reverse-kl"][0] + 2 * logged["regularizer/chi-squared"][0]
    assert logged["regularizer/divergence"] == pytest.approx([both], rel=1e-5)


def test_without_hidden_states_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, batch = ready(tmp_path)
    zero = torch.zeros((), requires_grad=True)
    monkeypatch.setattr(tiny.trls(trainer), "compute_loss", lambda *_: zero)
    with pytest.raises(RuntimeError, match="ran the model 0 time.*regularizer_in='reward'"):
        trainer.compute_loss(trainer.model, batch)
    assert not trainer.model.model._forward_hooks


def test_nothing_to_score(tmp_path: Path) -> None:
    """All completions are truncated, and masked for that."""
    trainer, batch = ready(tmp_path)
    batch["completion_mask"] = torch.zeros_like(batch["completion_mask"])
    assert gradient(trainer, trainer.compute_loss(trainer.model, batch)).abs().max() == 0
    batch["advantages"] = torch.zeros(len(batch["prompt_ids"]))
    assert trainer._penalties(batch, batch["completion_mask"].bool(), "train")[0].abs().max() == 0
