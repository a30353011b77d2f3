"""verl's on-policy distillation by any regularizer: the loss alone, where verl has the student's logits.

Notation for shapes: ``N`` tokens of packed sequences, ``V`` vocabulary, ``k`` most likely tokens of the teacher.

The student is the policy, the teacher the reference, of which verl knows the k most likely tokens: the loss is
`wpr.regularizers.top_k`'s. Imported by verl, with VERL_USE_EXTERNAL_MODULES=wpr.verl, this module makes every
f-divergence a loss_mode, ``wpr-reverse-kl`` and so on; `register` adds others. See docs/verl.md.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wpr.regularizers import FDivergence, Regularizer
from wpr.regularizers.registry import REGULARIZERS
from wpr.regularizers.spec import RegularizerSpec
from wpr.regularizers.top_k import TopK, top_k_loss

__all__ = ["register", "top_k_loss"]

DIVERGENCE = "wpr_divergence"
"""What verl carries from the logits to the reduction. Its own loss has another name, so that the two never mix."""

_PLACED: dict[str, Callable[[torch.device], Regularizer]] = {}  # by loss_mode


def register(loss_mode: str, regularizer: Regularizer | str | Callable[[], Regularizer]) -> None:
    """Make a regularizer the ``distillation.distillation_loss.loss_mode`` of that name, in this process.

    regularizer: an object; a name with settings, ``alpha:alpha=0.3``, or a sum; or a function without arguments that
        makes it, which is called once, in the processes that compute losses.
    """
    try:
        from verl.trainer.distillation import losses
        from verl.trainer.distillation.fsdp import losses as on_logits
    except ModuleNotFoundError as error:
        raise ImportError(f"wpr.verl.register needs verl ({error}); `pip install verl==0.9.1`") from error
    if isinstance(regularizer, str):
        spec = RegularizerSpec.parse(regularizer)
        if spec.is_wasserstein:
            raise ValueError(
                f"{regularizer!r} has costs between tokens, from embeddings that verl does not hand over; pass a "
                f"function that makes it: register({loss_mode!r}, lambda: Wasserstein.from_model(teacher))"
            )
        regularizer = spec.build()

    @functools.cache
    def placed(device: torch.device) -> Regularizer:
        made: Any = regularizer if isinstance(regularizer, Regularizer) else regularizer()
        geometry = getattr(made, "geometry", None)
        return made if geometry is None else made.with_geometry(geometry.to(device))  # type: ignore[no-any-return]

    losses.register_distillation_loss(losses.DistillationLossSettings(names=[loss_mode], use_topk=True))(_on_responses)
    _PLACED[loss_mode] = placed
    # The registry's function sees no logits. On them verl calls this one, whatever the loss_mode.
    own = on_logits.compute_forward_kl_topk
    if getattr(own, "func", None) is not _by_loss_mode:
        on_logits.compute_forward_kl_topk = functools.partial(_by_loss_mode, own)


def _by_loss_mode(own: Callable[..., dict[str, Tensor]], **given: Any) -> dict[str, Tensor]:
    """What verl calls on logits: its own function, or ours."""
    placed = _PLACED.get(given["config"].distillation_loss.loss_mode)
    return own(**given) if placed is None else _on_logits(placed, **given)


def _on_logits(
    placed: Callable[[torch.device], Regularizer],
    student_logits: Tensor,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    config: Any,
    data_format: str,
) -> dict[str, Tensor]:
    """Losses and the k tokens' masses ``(1, N)`` from logits ``(1, N, V)``, which verl has divided by the temperature,
    and the teacher's nested ``(sequences, tokens, k)``.
    """
    from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size, slice_input_tensor

    _check(config.distillation_loss)
    teacher = [side.values().unsqueeze(0) for side in (teacher_topk_ids, teacher_topk_log_probs)]
    if get_ulysses_sequence_parallel_world_size() > 1:  # this process has some of the tokens
        teacher = [slice_input_tensor(side, dim=1) for side in teacher]
    ids, log_probs = (side.flatten(0, 1) for side in teacher)
    k = ids.shape[-1]
    # After a sequence's last token nothing is predicted. verl puts k zeros there, and no loss reads that row.
    nothing = ((ids == 0) & (log_probs == 0)).all(-1, keepdim=True) & (k > 1)
    ids = torch.where(nothing, torch.arange(k, device=ids.device), ids)
    log_probs = log_probs.masked_fill(nothing, -math.log(k + 1))
    both = TopK.of(student_logits.flatten(0, 1), ids, log_probs)
    divergence = both.loss(placed(student_logits.device)).masked_fill(nothing.squeeze(-1), 0)
    masses = [side.detach().softmax(-1)[:, :-1].sum(-1) for side in (both.policy, both.reference)]
    names = (DIVERGENCE, "student_mass", "teacher_mass")
    return {name: row.unsqueeze(0) for name, row in zip(names, (divergence, *masses), strict=True)}


def _check(loss: Any) -> None:
    """Refuse what has no meaning for a divergence of two distributions."""
    if loss.use_policy_gradient:
        raise ValueError(
            f"use_policy_gradient=True with loss_mode={loss.loss_mode!r}: a position's divergence is the same for all "
            "tokens that may be drawn there, so as their reward it has no gradient; set use_policy_gradient=False"
        )
    if loss.log_prob_min_clamp is not None:
        raise ValueError(
            f"log_prob_min_clamp={loss.log_prob_min_clamp} with loss_mode={loss.loss_mode!r}, which compares "
            "probabilities that sum to one; set log_prob_min_clamp=null"
        )


def _on_responses(config: Any, distillation_config: Any, model_output: Any, data: Any) -> tuple[Tensor, dict[str, Any]]:
    """Losses of response tokens ``(sequences, tokens)``, which verl reduces, and its metrics of the masses."""
    from verl.trainer.distillation import losses
    from verl.workers.utils.padding import no_padding_2_padding

    if DIVERGENCE not in model_output:
        raise ValueError(
            f"strategy={config.strategy!r} did not ask loss_mode={distillation_config.distillation_loss.loss_mode!r} "
            "for the loss of its logits; set actor_rollout_ref.actor.strategy to fsdp, fsdp2 or veomni, and "
            "actor_rollout_ref.model.use_fused_kernels=False"
        )
    measured = {**model_output, "distillation_losses": model_output[DIVERGENCE]}
    _, metrics = losses.compute_forward_kl_topk(config, distillation_config, measured, data)
    divergence: Tensor = no_padding_2_padding(model_output[DIVERGENCE], data)
    return divergence, metrics


# Where verl is in use, or is told to load this module.
if sys.modules.get("verl") or __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    for _name, _kind in REGULARIZERS.items():
        if isinstance(_kind, type) and issubclass(_kind, FDivergence):
            register(f"wpr-{_name}", _name)
