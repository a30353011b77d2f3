"""From scores and penalties to advantages: pure functions.

Notation for shapes: ``B`` responses, ``L`` response tokens; ``mask`` ``(B, L)`` is True on real tokens, which stand
first in each row. Values outside the mask are ignored and returned as 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes."""


def assemble_rewards(
    scores: Tensor, penalties: Tensor, mask: Tensor, beta: float, penalty_clip: float | None = None
) -> Tensor:
    """Reward of each token ``(B, L)``: ``-beta * penalty``, within plus and minus ``penalty_clip`` where that is given,
    plus the response's score at its last real token.

    An empty response has no token that could carry its score; its row is zero.
    """
    rewards = (-beta * penalties).masked_fill(~mask, 0)
    if penalty_clip is not None:
        rewards = rewards.clamp(-penalty_clip, penalty_clip)
    rows = mask.any(-1).nonzero().squeeze(-1)
    last = mask.sum(-1)[rows] - 1
    rewards[rows, last] += scores[rows].to(rewards.dtype)
    return rewards


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: advantages and returns, ``(B, L)`` each.

        delta_t = r_t + gamma V_{t+1} - V_t,     A_t = delta_t + gamma gae_lambda A_{t+1},     G_t = A_t + V_t

    ``V_t`` is the value of the state *before* token t. After a row's last real token the episode is over: V = A = 0.
    """
    values, rewards = values.masked_fill(~mask, 0), rewards.masked_fill(~mask, 0)
    advantages = torch.zeros_like(rewards)
    following_advantage = following_value = torch.zeros_like(rewards[:, 0]) if rewards.shape[1] else None
    for t in reversed(range(rewards.shape[1])):
        assert following_advantage is not None
        assert following_value is not None
        delta = rewards[:, t] + gamma * following_value - values[:, t]
        following_advantage = (delta + gamma * gae_lambda * following_advantage) * mask[:, t]
        following_value = values[:, t]
        advantages[:, t] = following_advantage
    return advantages, (advantages + values).masked_fill(~mask, 0)


def whiten(values: Tensor, mask: Tensor, reduce: Reduce = lambda total: total) -> Tensor:
    """Real tokens shifted to mean 0 and scaled to variance 1 over the batch of all processes ``(B, L)``."""
    real = values[mask].double()
    count, total = reduce(torch.stack([real.new_tensor(real.numel()), real.sum()]))
    mean = total / count.clamp_min(1)
    variance = reduce((real - mean).square().sum()) / count.clamp_min(1)
    whitened: Tensor = (values.double() - mean) / (variance + 1e-8).sqrt()
    return whitened.to(values.dtype).masked_fill(~mask, 0)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, reduce: Reduce = lambda total: total) -> Tensor:
    """``1 - Var(returns - values) / Var(returns)`` over real tokens: 1 for a perfect critic, 0 for a constant one."""
    target, error = returns[mask].double(), (returns - values)[mask].double()
    count, *sums = reduce(torch.stack([target.new_tensor(target.numel()), target.sum(), error.sum()]))
    means = [total / count.clamp_min(1) for total in sums]
    spread = reduce(torch.stack([(target - means[0]).square().sum(), (error - means[1]).square().sum()]))
    return torch.where(spread[0] > 0, 1 - spread[1] / spread[0].clamp_min(1e-300), torch.zeros_like(spread[0]))


def costs_to_go(own: Tensor, later: Tensor) -> Tensor:
    """What a token and those after it cost ``(B, T)``: ``own_t + later_{t+1} + later_{t+2} + ...``"""
    return own + pad(later[:, 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)


def beyond_the_others(values: Tensor, present: Tensor, group: int) -> Tensor:
    """Values ``(B, T)`` less the mean of the others of their group at the same position; 0 where none is present.

    present: ``(B, T)`` 1 where there is a value, else 0; others that are not present do not count, and a value without
        others is left as it is. group: how many rows in sequence are responses to one prompt.

    What the others' values are does not depend on a response's own tokens, so that the mean is a baseline: it changes
    the variance of the policy gradient, not its expectation. A mean over the whole group would scale it by
    (group - 1) / group.
    """
    grouped, there = (rows.reshape(-1, group, rows.shape[-1]) for rows in (values * present, present))
    others = (grouped.sum(1, keepdim=True) - grouped) / (there.sum(1, keepdim=True) - there).clamp(min=1)
    return ((grouped - others) * there).reshape(values.shape)
