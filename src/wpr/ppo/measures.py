"""What two models say of each response token: log-probability, penalty, divergence, KL, entropy.

Notation for shapes: ``p`` positions of a slice, ``P`` of all, ``V`` vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wpr.transport import kernels
from wpr.transport.support import row_slices


@dataclass(frozen=True)
class Measures:
    """Per token, ``(P,)`` each, in float32: everything that a rollout keeps of full-vocabulary logits.

    kl: the exact KL(policy | reference) of the position, whatever the regularizer is.
    eval_regularizers: divergences by other regularizers, by name, where they were asked for.
    """

    log_prob: Tensor
    penalty: Tensor
    divergence: Tensor
    kl: Tensor
    entropy: Tensor
    diagnostics: dict[str, Tensor] = field(default_factory=dict)
    eval_regularizers: dict[str, Tensor] = field(default_factory=dict)


class LogitsError(FloatingPointError):
    """Logits that are no distribution.

    model: whose. position: index among all response tokens of the batch. values: what is known of them.
    """

    def __init__(self, model: str, position: int, values: dict[str, float], count: int) -> None:
        self.model, self.position, self.values = model, position, values
        shown = ", ".join(f"{name} {value:g}" for name, value in values.items())
        super().__init__(f"the {model}'s logits are not a distribution at {count} position(s); the first has {shown}")


def reading_once(policy_logits: Tensor, reference_logits: Tensor) -> AbstractContextManager[None]:
    """A context in which measures and regularizers share one read of these logits, where kernels are used."""
    if not kernels.chosen(policy_logits.device):
        return nullcontext()
    from wpr.transport.kernels.vocabulary import read_once

    return read_once(policy_logits, reference_logits)


@torch.no_grad()
def token_statistics(policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor, first: int = 0) -> Tensor:
    """Log-probability of the tokens ``(p,)``, KL and entropy, in float32: ``(3, p)``, from logits ``(p, V)``.

    first: how many positions stood before, for errors.
    """
    types = {policy_logits.dtype, reference_logits.dtype}
    if torch.float64 not in types and kernels.chosen(policy_logits.device):
        from wpr.transport.kernels.divergence import divergence_sums

        with torch.cuda.device_of(policy_logits):  # Triton launches on the current device, whatever the tensors' is
            sums = divergence_sums(policy_logits, reference_logits, "kl-and-entropy")
        _refuse(~sums.log_policy.isfinite(), policy_logits, "policy", first)
        _refuse(~sums.log_reference.isfinite(), reference_logits, "reference", first)
        log_prob = policy_logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float() - sums.log_policy
        return torch.stack([log_prob, sums.terms, sums.offset])
    parts = []
    for rows in row_slices(policy_logits):
        log_p = policy_logits[rows].float().log_softmax(-1)
        log_q = reference_logits[rows].float().log_softmax(-1)
        # A NaN or +inf among logits, or nothing but -inf, makes every log-probability of the row NaN.
        _refuse(log_p[:, 0].isnan(), policy_logits[rows], "policy", first + rows.start)
        _refuse(log_q[:, 0].isnan(), reference_logits[rows], "reference", first + rows.start)
        log_prob = log_p.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1)
        p = log_p.exp()
        entropy = -(p * log_p.clamp_min(-1e30)).sum(-1)
        kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
        parts.append(torch.stack([log_prob, kl, entropy]))
    return torch.cat(parts, -1)


def _refuse(bad: Tensor, logits: Tensor, model: str, first: int) -> None:
    """Raise if a row of the logits ``(p, V)`` is bad ``(p,)``."""
    places = bad.nonzero().squeeze(-1)
    if len(places):
        row = logits[int(places[0])].float()
        finite = row[row.isfinite()]
        values = {
            "nan": float(row.isnan().sum()),
            "+inf": float((row == torch.inf).sum()),
            "-inf": float((row == -torch.inf).sum()),
            "largest_finite": float(finite.max()) if len(finite) else float("nan"),
            "smallest_finite": float(finite.min()) if len(finite) else float("nan"),
        }
        raise LogitsError(model, first + int(places[0]), values, len(places))
