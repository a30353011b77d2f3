"""The losses of PPO: pure functions of what the new and the old policy say of the same tokens.

Notation for shapes: ``B`` responses, ``L`` response tokens; ``mask`` ``(B, L)`` is True on real tokens. Losses are
*sums* over real tokens: the caller divides by the number of tokens of the whole update, over all micro-batches and
processes, so that a token counts the same wherever it was computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

MetricSums = dict[str, Tensor]
"""Sums over real tokens, without gradient."""


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, clip_range: float
) -> tuple[Tensor, MetricSums]:
    """The clipped surrogate, summed, with ``w = p_new / p_old``:

        -min(w A, clip(w, 1 - c, 1 + c) A)

    Sums: ``clip_fraction`` counts tokens where the clipped branch is taken; ``approx_kl`` is ``w - 1 - log w``, an
    unbiased and never negative estimate of KL(old | new).
    """
    log_ratio = log_probs.masked_fill(~mask, 0) - old_log_probs.masked_fill(~mask, 0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = torch.maximum(unclipped, clipped).masked_fill(~mask, 0).sum()
    with torch.no_grad():
        sums = {
            "clip_fraction": ((clipped > unclipped) & mask).sum(),
            "approx_kl": (ratio - 1 - log_ratio).masked_fill(~mask, 0).sum(),
            "ratio": ratio.masked_fill(~mask, 0).sum(),
        }
    return loss, sums


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_range: float | None
) -> tuple[Tensor, MetricSums]:
    """Half the squared error of the critic, summed; with a ``clip_range`` c the larger of this and of the error of the
    value held within c of its old value:

        1/2 max( (V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2 )
    """
    values = values.masked_fill(~mask, 0)  # first: an infinite value on padding would make its gradient NaN
    errors = (values - returns).square()
    sums = {"value_clip_fraction": torch.zeros((), device=values.device)}
    if clip_range is not None:
        held = torch.maximum(torch.minimum(values, old_values + clip_range), old_values - clip_range)
        clipped = (held - returns).square()
        sums = {"value_clip_fraction": ((clipped > errors) & mask).sum()}
        errors = torch.maximum(errors, clipped)
    return 0.5 * errors.masked_fill(~mask, 0).sum(), sums
