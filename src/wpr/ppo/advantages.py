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
    scores: Tensor,
    penalties: Tensor,
    mask: Tensor,
    beta: float,
    placed: Tensor | None = None,
    penalty_clip: float | None = None,
) -> Tensor:
    """Reward of each token ``(B, L)``: ``-beta * penalty``, within plus and minus ``penalty_clip`` where that is given,
    plus what of the response's score is ``placed`` on it ``(B, L)``; the last real token gets what is left of the
    score, which is all of it where nothing is placed.

    An empty response has no token that could carry its score; its row is zero.
    """
    own = torch.zeros_like(penalties) if placed is None else placed.to(penalties.dtype)
    costs = beta * penalties if penalty_clip is None else (beta * penalties).clamp(-penalty_clip, penalty_clip)
    rewards = (own - costs).masked_fill(~mask, 0)
    rows = mask.any(-1).nonzero().squeeze(-1)
    last = mask.sum(-1)[rows] - 1
    rewards[rows, last] += scores[rows].to(rewards.dtype) - own.masked_fill(~mask, 0).sum(-1)[rows]
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


def earned_before(placed: Tensor, scored: Tensor, group: int) -> Tensor:
    """What a response earned before each of its tokens ``(B, T)``, less the mean of that over its group.

    placed: ``(B, T)`` rewards of tokens, 0 on padding: after its end a response has earned all of them. scored:
        ``(B,)`` responses without a score are 0 here, and no part of the mean. group: as in `beyond_the_others`.

    GRPO's advantage less this is what is still to come, less the group's mean of that (0 after the end). Of m scored
    responses, it is (m - 1) / m of what `beyond_the_others` would give, as GRPO's advantage is. What was earned before
    depends on earlier tokens alone: taking it off leaves the expectation of the policy gradient as it is.
    """
    past = (placed.cumsum(-1) - placed).reshape(-1, group, placed.shape[-1])
    there = scored.to(past.dtype).view(-1, group, 1)
    mean = (past * there).sum(1, keepdim=True) / there.sum(1, keepdim=True).clamp(min=1)
    return ((past - mean) * there).reshape(placed.shape)


def group_scale(advantages: Tensor, rewards: Tensor, past: Tensor, group: int) -> Tensor:
    """What ``past`` ``(B, T)``, of `earned_before`, is multiplied by ``(B,)`` before advantages ``(B,)`` lose it.

    It is what rewards ``(B,)``, less their group's mean, were multiplied by to become the advantages; 0 for a group of
    rewards that are equal but for rounding. Where responses earned so far differ more than whole ones do, that can be
    any number: there it is 1 / deviation of what was earned so far, at the token where that is largest. So nothing
    larger is taken off than the (m - 1) / sqrt(m) that an advantage of m responses can be. Rewards that are NaN do not
    count. group: as in `beyond_the_others`.
    """
    own, made = rewards.view(-1, group), advantages.view(-1, group)
    rounding = 16 * torch.finfo(rewards.dtype).eps * own.nan_to_num(0).abs().amax(-1)
    beyond = (own - own.nanmean(-1, keepdim=True)).nan_to_num(0)
    spread, made = (values.square().sum(-1) for values in (beyond, made.masked_fill(own.isnan(), 0)))
    equal = beyond.abs().amax(-1) <= rounding
    scale = (made / spread.masked_fill(equal, 1)).sqrt().masked_fill(equal, 0)
    degrees = (~own.isnan()).sum(-1, keepdim=True) - 1
    deviation = (past.view(*own.shape, -1).square().sum(1) / degrees.clamp(min=1)).sqrt().amax(-1)
    return torch.minimum(scale, 1 / deviation).repeat_interleave(group)
