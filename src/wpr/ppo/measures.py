"""What two models say of each response token: log-probability, penalty, divergence, KL, entropy.

Notation for shapes: ``p`` positions of a slice, ``P`` of all, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wpr.regularizers import Regularizer, RegularizerOutput
from wpr.regularizers.regularizer import TwoPhaseRegularizer
from wpr.transport import kernels
from wpr.transport.support import Support, row_slices


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


@dataclass(frozen=True)
class SliceMeasures:
    """What is kept of one slice's logits: ``(p,)`` each, and the regularizer's output or what it reduced the logits
    to.
    """

    log_prob: Tensor
    kl: Tensor
    entropy: Tensor
    regularizer: RegularizerOutput | Support
    eval_regularizers: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def measure(
    regularizer: Regularizer,
    policy_logits: Tensor,
    reference_logits: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    first: int = 0,
    eval_regularizers: Mapping[str, Regularizer] | None = None,
) -> SliceMeasures:
    """Measure one slice: logits ``(p, V)`` of both models, tokens ``(p,)``. ``first`` is the slice's place, for
    errors. ``eval_regularizers``: other regularizers, of which the divergence is wanted.
    """
    if temperature != 1.0:  # in float32, as in the update: a quotient rounded to bf16 is another distribution
        policy_logits, reference_logits = policy_logits.float() / temperature, reference_logits.float() / temperature
    log_prob, kl, entropy = _statistics(policy_logits, reference_logits, tokens, first)
    work = regularizer.reduce if isinstance(regularizer, TwoPhaseRegularizer) else regularizer
    others = {
        name: other(policy_logits, reference_logits, tokens).divergence.float()
        for name, other in (eval_regularizers or {}).items()
    }
    return SliceMeasures(log_prob, kl, entropy, work(policy_logits, reference_logits, tokens), others)


def _statistics(policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor, first: int) -> Tensor:
    """Log-probability of the tokens, KL and entropy, in float32: ``(3, p)``."""
    types = {policy_logits.dtype, reference_logits.dtype}
    if torch.float64 not in types and kernels.chosen(policy_logits.device):
        from wpr.transport.kernels.divergence import divergence_sums

        with torch.cuda.device_of(policy_logits):  # Triton launches on the current device, whatever the tensors' is
            sums = divergence_sums(policy_logits, reference_logits, "kl-and-entropy")
        _refuse_totals(sums.log_policy, policy_logits, "policy", first)
        _refuse_totals(sums.log_reference, reference_logits, "reference", first)
        log_prob = policy_logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float() - sums.log_policy
        return torch.stack([log_prob, sums.terms, sums.offset])
    parts = []
    for rows in row_slices(policy_logits):
        log_p = policy_logits[rows].float().log_softmax(-1)
        log_q = reference_logits[rows].float().log_softmax(-1)
        _refuse_non_distributions(log_p, policy_logits[rows], "policy", first + rows.start)
        _refuse_non_distributions(log_q, reference_logits[rows], "reference", first + rows.start)
        log_prob = log_p.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1)
        p = log_p.exp()
        entropy = -(p * log_p.clamp_min(-1e30)).sum(-1)
        kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
        parts.append(torch.stack([log_prob, kl, entropy]))
    return torch.cat(parts, -1)


@torch.no_grad()
def finish(regularizer: Regularizer, slices: list[SliceMeasures]) -> Measures:
    """Measures of all positions, in the order of their slices."""
    if isinstance(regularizer, TwoPhaseRegularizer):
        reduced = [part.regularizer for part in slices if isinstance(part.regularizer, Support)]
        outputs = [regularizer.finish(Support.join(reduced))]
    else:
        outputs = [part.regularizer for part in slices if isinstance(part.regularizer, RegularizerOutput)]
    return Measures(
        log_prob=torch.cat([part.log_prob for part in slices]),
        penalty=torch.cat([out.penalty for out in outputs]).float(),
        divergence=torch.cat([out.divergence for out in outputs]).float(),
        kl=torch.cat([part.kl for part in slices]),
        entropy=torch.cat([part.entropy for part in slices]),
        diagnostics={
            name: torch.cat([out.diagnostics[name] for out in outputs]).float() for name in outputs[0].diagnostics
        },
        eval_regularizers={
            name: torch.cat([part.eval_regularizers[name] for part in slices]) for name in slices[0].eval_regularizers
        },
    )


def _refuse_non_distributions(log_probs: Tensor, logits: Tensor, model: str, first: int) -> None:
    """A NaN or +inf among logits, or nothing but -inf, makes every log-probability of the row NaN."""
    _refuse(
        log_probs[:, 0].isnan().nonzero().squeeze(-1) if len(log_probs) else log_probs.new_empty(0),
        logits,
        model,
        first,
    )


def _refuse_totals(log_totals: Tensor, logits: Tensor, model: str, first: int) -> None:
    """The same by the rows' log-sum-exp ``(p,)``."""
    _refuse((~log_totals.isfinite()).nonzero().squeeze(-1), logits, model, first)


def _refuse(bad: Tensor, logits: Tensor, model: str, first: int) -> None:
    if len(bad):
        row = logits[int(bad[0])].float()
        finite = row[row.isfinite()]
        values = {
            "nan": float(row.isnan().sum()),
            "+inf": float((row == torch.inf).sum()),
            "-inf": float((row == -torch.inf).sum()),
            "largest_finite": float(finite.max()) if len(finite) else float("nan"),
            "smallest_finite": float(finite.min()) if len(finite) else float("nan"),
        }
        raise LogitsError(model, first + int(bad[0]), values, len(bad))
