"""The clipped losses, against a token-by-token loop, and their gradients where the clip is active."""

from __future__ import annotations

import math

import pytest
import torch

from wpr.ppo.losses import policy_loss, value_loss


def tokens(seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages, values, old_values, returns = torch.randn(6, 3, 5, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([[5], [2], [0]])
    return new, old, advantages, values, old_values, returns, mask


def test_policy_loss_token_by_token() -> None:
    new, old, advantages, *_, mask = tokens()
    loss, sums = policy_loss(new, old, advantages, mask, 0.2)
    total = clipped = kl = 0.0
    for row, t in mask.nonzero().tolist():
        ratio, advantage = math.exp(new[row, t] - old[row, t]), float(advantages[row, t])
        held = min(max(ratio, 0.8), 1.2)
        total += -min(ratio * advantage, held * advantage)
        clipped += held * advantage < ratio * advantage
        kl += ratio - 1 - math.log(ratio)
    assert float(loss) == pytest.approx(total)
    assert float(sums["clip_fraction"]) == clipped
    assert float(sums["approx_kl"]) == pytest.approx(kl)


def test_policy_gradient_where_the_ratio_is_one_is_the_advantage() -> None:
    new, _, advantages, *_, mask = tokens()
    new.requires_grad_()
    policy_loss(new, new.detach(), advantages, mask, 0.2)[0].backward()
    assert torch.allclose(new.grad, (-advantages).masked_fill(~mask, 0))


def test_no_gradient_beyond_the_clip() -> None:
    new = torch.tensor([[1.0, 1.0]], requires_grad=True)
    policy_loss(new, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool), 0.2)[
        0
    ].backward()
    assert new.grad[0, 0] == 0  # already likelier than the clip allows, and rewarded
    assert new.grad[0, 1] > 0  # likelier although punished: pulled back


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_token_by_token(clip: float | None) -> None:
    _, _, _, values, old, returns, mask = tokens()
    loss, sums = value_loss(values, old, returns, mask, clip)
    total = clipped = 0.0
    for row, t in mask.nonzero().tolist():
        error = (float(values[row, t]) - float(returns[row, t])) ** 2
        if clip is not None:
            held = min(max(float(values[row, t]), float(old[row, t]) - clip), float(old[row, t]) + clip)
            other = (held - float(returns[row, t])) ** 2
            clipped += other > error
            error = max(error, other)
        total += error / 2
    assert float(loss) == pytest.approx(total)
    assert float(sums["value_clip_fraction"]) == clipped


def test_padding_has_no_say() -> None:
    new, old, advantages, values, old_values, returns, mask = tokens()
    poison = torch.full_like(new, torch.inf)
    new = torch.where(mask, new, poison).requires_grad_()
    values = torch.where(mask, values, poison).requires_grad_()
    loss = policy_loss(new, old, advantages, mask, 0.2)[0] + value_loss(values, old_values, returns, mask, 0.2)[0]
    assert loss.isfinite()
    loss.backward()
    assert new.grad.isfinite().all()
    assert values.grad.isfinite().all()
