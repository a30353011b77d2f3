"""f-divergences between next-token distributions, as penalties per token.

Notation for shapes: ``P`` positions, ``V`` vocabulary; ``p`` the policy, ``q`` the reference, ``u = p / q``,
``d = log u``.

    D_f(p, q) = sum_v q_v f(u_v)

    name               f(u)                                              f'(u)
    reverse KL         u log u - u + 1                                   log u
    forward KL         -log u + u - 1                                    1 - 1/u
    Jensen-Shannon     u log u - (u + 1) log((u + 1) / 2)                log(2 u / (u + 1))
    alpha              (u^(1-alpha) - (1-alpha) u - alpha)               (1 - u^(-alpha)) / alpha
                         / (alpha (alpha - 1))
    total variation    |u - 1| / 2                                       sign(u - 1) / 2
    chi-squared        (u - 1)^2                                         2 (u - 1)
    squared Hellinger  (sqrt(u) - 1)^2                                   1 - 1/sqrt(u)

A linear term c (u - 1) in f changes no divergence; it is chosen here so that f'(1) = 0 and the penalty vanishes where
the policy equals the reference.

Two estimators. The gradient of ``sum_v p_v penalty_v`` with the penalties held constant, which is what policy gradient
follows, is the gradient of D_f exactly if the penalty is f'(u) plus a constant of the position:
``estimator="gradient"``. The paper uses f(u)/u, whose *mean* is D_f but whose gradient is another one, in parts of
opposite sign: ``estimator="paper"``. Only for reverse KL do the two agree.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from wpr.regularizers.regularizer import (
    Combinable,
    Gauge,
    RegularizerOutput,
    check_inputs,
    check_shapes,
    check_tensors,
    checked_loss,
    refuse_impossible_tokens,
    validation,
)
from wpr.transport import kernels
from wpr.transport.support import Support, refuse_rows_without_total, row_slices, working_dtype

if TYPE_CHECKING:
    from wpr.transport.kernels.divergence import Sums
    from wpr.transport.kernels.losses import HeldLoss
    from wpr.transport.kernels.support import ReducedLogits

Estimator = Literal["gradient", "paper"]


class FDivergence(Combinable, ABC):
    """A divergence ``sum_v q_v f(p_v / q_v)``; subclasses state its formulas in ``d = log(p/q)``.

    estimator: ``"gradient"`` penalises with f'(u), ``"paper"`` with f(u)/u.
    gauge: for the gradient estimator, ``"value"`` adds the constant of the position that makes the mean penalty under
        the policy the divergence, so that a token's return counts the divergence of the positions after it; ``"raw"``
        leaves f'(u). The paper's estimator has that mean by itself.
    """

    name: ClassVar[str]

    def __init__(self, estimator: Estimator = "gradient", gauge: Gauge = "value") -> None:
        if estimator not in ("gradient", "paper"):
            raise ValueError(f"estimator={estimator!r} is unknown; use 'gradient' or 'paper'")
        if gauge not in ("raw", "value"):
            raise ValueError(f"gauge={gauge!r} is unknown; use 'raw' or 'value'")
        self.estimator = estimator
        self.gauge = gauge

    def __repr__(self) -> str:
        return f"{type(self).__name__}(estimator={self.estimator!r}, gauge={self.gauge!r})"

    @abstractmethod
    def derivative(self, d: Tensor) -> Tensor:
        """``f'(u)``."""

    @abstractmethod
    def ratio(self, d: Tensor) -> Tensor:
        """``f(u) / u`` with the paper's f."""

    @abstractmethod
    def terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """``q f(u)``, never negative; their sum over the vocabulary is the divergence."""

    @abstractmethod
    def offset_terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """``q (f(u) - u f'(u))``; their sum is the divergence minus the mean of f'(u) under the policy."""

    @torch.no_grad()
    def __call__(self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor) -> RegularizerOutput:
        """See `Regularizer.__call__`."""
        check_tensors(policy_logits=policy_logits, reference_logits=reference_logits)
        if self.uses_kernels(policy_logits, reference_logits):
            return self._call_by_kernels(policy_logits, reference_logits, tokens)
        tokens = check_inputs(policy_logits, reference_logits, tokens)
        penalties, divergences = [], []
        for part in row_slices(policy_logits):
            log_p, log_q = _log_softmax(policy_logits[part], reference_logits[part], part.start)
            here = tokens[part].unsqueeze(-1)
            token_p, token_q = log_p.gather(-1, here).squeeze(-1), log_q.gather(-1, here).squeeze(-1)
            refuse_impossible_tokens(token_p, tokens[part], part.start)
            penalties.append(self._penalty(token_p - token_q) + self._offset(log_p, log_q))
            divergences.append(_sum_over_vocabulary(self.terms(log_p, log_q), log_p, log_q))
        return RegularizerOutput(torch.cat(penalties), torch.cat(divergences))

    def uses_kernels(self, policy_logits: Tensor, reference_logits: Tensor) -> bool:
        """Whether the Triton kernels do the work: they know this module's formulas by name, and none of a subclass."""
        if torch.float64 in (policy_logits.dtype, reference_logits.dtype) or not kernels.chosen(policy_logits.device):
            return False
        from wpr.transport.kernels.divergence import KINDS

        return type(self).__module__ == __name__ and self.name in KINDS

    def _call_by_kernels(self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor) -> RegularizerOutput:
        from wpr.transport.kernels.divergence import divergence_sums

        tokens = check_shapes(policy_logits, reference_logits, tokens)
        with torch.cuda.device_of(policy_logits):  # Triton launches on the current device, whatever the tensors' is
            sums = divergence_sums(policy_logits, reference_logits, self.name, getattr(self, "alpha", 0.5))
        out, token_p = self._from_sums(policy_logits, reference_logits, tokens, sums)
        validation(tokens, policy_logits.shape[-1], sums.log_policy, sums.log_reference, token_p)()
        return out

    def beside_transport(
        self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor, reduced: ReducedLogits
    ) -> RegularizerOutput:
        """The same where the logits were reduced for a Wasserstein penalty, whose read of them gave the log-sum-exps:
        reverse KL needs no other read, the others one. Nothing is refused here.
        """
        from wpr.transport.kernels.divergence import Sums, divergence_sums

        tokens, totals = tokens.long(), (reduced.log_policy, reduced.log_reference)
        if self.name == "reverse-kl" and reduced.reverse_kl is not None:
            sums = Sums(reduced.reverse_kl, torch.zeros_like(reduced.reverse_kl), *totals)
        else:
            with torch.cuda.device_of(policy_logits):
                sums = divergence_sums(policy_logits, reference_logits, self.name, getattr(self, "alpha", 0.5), totals)
        return self._from_sums(policy_logits, reference_logits, tokens, sums)[0]

    def _from_sums(
        self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor, sums: Sums
    ) -> tuple[RegularizerOutput, Tensor]:
        """The output, and the log-probabilities of the tokens ``(P,)`` under the policy."""
        here = tokens.clamp(0, policy_logits.shape[-1] - 1).unsqueeze(-1)
        token_p = policy_logits.gather(-1, here).squeeze(-1).float() - sums.log_policy
        token_q = reference_logits.gather(-1, here).squeeze(-1).float() - sums.log_reference
        penalty = self._penalty(token_p - token_q)
        if self.gauge == "value" and self.estimator == "gradient":
            penalty = penalty + sums.offset.masked_fill(~sums.offset.isfinite(), 0)
        return RegularizerOutput(penalty, sums.terms), token_p

    def loss(self, policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor | None = None) -> Tensor:
        """See `Regularizer.loss`. ``tokens`` are not needed: the expectation runs over the whole vocabulary."""
        check_tensors(policy_logits=policy_logits, reference_logits=reference_logits)
        check_inputs(policy_logits, reference_logits, _any_tokens(policy_logits) if tokens is None else tokens)
        if self.holds_loss(policy_logits, reference_logits):
            return checked_loss(self, policy_logits, reference_logits)
        log_p, log_q = _log_softmax(policy_logits, reference_logits, 0)
        with torch.no_grad():
            weighted = (
                self.weighted_derivative(log_p, log_q)
                if self.estimator == "gradient"
                else self.paper_terms(log_p, log_q)
            )
            weighted = weighted + log_p.exp() * self._offset(log_p, log_q).unsqueeze(-1)
            impossible = log_p == -torch.inf
        # p * penalty, formed above without 0 * inf; its gradient in log p, the penalty held constant, is itself.
        carrier = 1 + (log_p - log_p.detach()).masked_fill(impossible, 0)
        return (weighted.masked_fill(impossible, 0) * carrier).sum(-1)

    def holds_loss(self, policy_logits: Tensor, reference_logits: Tensor) -> bool:
        """See `LossHolder`."""
        return self.estimator == "gradient" and self.uses_kernels(policy_logits, reference_logits)

    @torch.no_grad()
    def held_loss(self, policy_logits: Tensor, reference_logits: Tensor) -> HeldLoss:
        """See `LossHolder`."""
        from wpr.transport.kernels.losses import DivergenceLoss

        with torch.cuda.device_of(policy_logits):
            return DivergenceLoss.measure(
                policy_logits, reference_logits, self.name, getattr(self, "alpha", 0.5), self.gauge == "value"
            )

    @torch.no_grad()
    def penalties(self, support: Support) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Penalties of all entries of a support ``(P, n)``, which is taken for the whole vocabulary, the divergence
        ``(P,)``, and no diagnostics.
        """
        log_p, log_q = support.log_policy, support.log_reference
        penalties = self._penalty(log_p - log_q) + self._offset(log_p, log_q).unsqueeze(-1)
        nothing = (log_p == -torch.inf) & (log_q == -torch.inf)
        return penalties.masked_fill(nothing, 0), _sum_over_vocabulary(self.terms(log_p, log_q), log_p, log_q), {}

    def weighted_derivative(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """``p f'(u)``, finite also where f'(u) is not."""
        return self.terms(log_p, log_q) - self.offset_terms(log_p, log_q)

    def paper_terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """``q f(u)`` with the paper's f, which for the two KL divergences lacks the linear term."""
        return self.terms(log_p, log_q)

    def _penalty(self, d: Tensor) -> Tensor:
        return self.derivative(d) if self.estimator == "gradient" else self.ratio(d)

    def _offset(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """The constant of each position ``(P,)``. Where it is infinite, the divergence is infinite too, and no constant
        is added.
        """
        if self.gauge == "raw" or self.estimator == "paper":
            return log_p.new_zeros(len(log_p))
        offset = _sum_over_vocabulary(self.offset_terms(log_p, log_q), log_p, log_q)
        return offset.masked_fill(~offset.isfinite(), 0)


class ReverseKL(FDivergence):
    """``KL(policy | reference)``, the usual regularizer: the penalty is ``log(p/q)``."""

    name = "reverse-kl"

    def derivative(self, d: Tensor) -> Tensor:
        return d

    def ratio(self, d: Tensor) -> Tensor:
        return d

    def terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        p = log_p.exp()
        return _weighted(p, log_p - log_q) - p + log_q.exp()

    def offset_terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return torch.zeros_like(log_p)  # q - p, whose sum is zero

    def weighted_derivative(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return _weighted(log_p.exp(), log_p - log_q)

    def paper_terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return _weighted(log_p.exp(), log_p - log_q)


class ForwardKL(FDivergence):
    """``KL(reference | policy)``."""

    name = "forward-kl"

    def derivative(self, d: Tensor) -> Tensor:
        return -torch.expm1(-d)

    def ratio(self, d: Tensor) -> Tensor:
        return torch.where(d == torch.inf, 0, -d * torch.exp(-d))

    def terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        q = log_q.exp()
        return _weighted(q, log_q - log_p) - q + log_p.exp()

    def offset_terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return _weighted(log_q.exp(), log_q - log_p)

    def paper_terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return _weighted(log_q.exp(), log_q - log_p)


class JensenShannon(FDivergence):
    """``KL(p | m) + KL(q | m)`` with ``m = (p + q) / 2``: the paper's normalisation, twice the usual one."""

    name = "jensen-shannon"

    def derivative(self, d: Tensor) -> Tensor:
        return math.log(2) - softplus(-d)

    def ratio(self, d: Tensor) -> Tensor:
        # d - softplus(d) = -softplus(-d); where d = inf, exp(-d) softplus(d) vanishes.
        rest = torch.where(d == torch.inf, 0, torch.exp(-d) * (softplus(d) - math.log(2)))
        return math.log(2) - softplus(-d) - rest

    def terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        return _weighted(log_p.exp(), log_p - log_m) + _weighted(log_q.exp(), log_q - log_m)

    def offset_terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return _weighted(log_q.exp(), log_q - torch.logaddexp(log_p, log_q) + math.log(2))


class Alpha(FDivergence):
    """The alpha-divergence; alpha -> 0 is reverse KL, alpha -> 1 forward KL, alpha = 1/2 twice the squared Hellinger
    distance.
    """

    name = "alpha"

    def __init__(self, alpha: float = 0.5, estimator: Estimator = "gradient", gauge: Gauge = "value") -> None:
        if not 0 < alpha < 1:
            raise ValueError(f"alpha={alpha} must lie between 0 and 1; the limits are ReverseKL (0) and ForwardKL (1)")
        super().__init__(estimator, gauge)
        self.alpha = alpha

    def __repr__(self) -> str:
        return f"Alpha({self.alpha}, estimator={self.estimator!r}, gauge={self.gauge!r})"

    def derivative(self, d: Tensor) -> Tensor:
        return -torch.expm1(-self.alpha * d) / self.alpha

    def ratio(self, d: Tensor) -> Tensor:
        a = self.alpha
        # a e^-d - e^-ad is e^-d (a - e^(1-a)d): the form without a difference of two infinities, on either side of 0
        rest = torch.where(d > 0, a * torch.exp(-d) - torch.exp(-a * d), torch.exp(-d) * (a - torch.exp((1 - a) * d)))
        return (rest + (1 - a)) / (a * (1 - a))

    def terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        a = self.alpha
        return ((1 - a) * log_p.exp() + a * log_q.exp() - ((1 - a) * log_p + a * log_q).exp()) / (a * (1 - a))

    def offset_terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        a = self.alpha
        return (log_q.exp() - ((1 - a) * log_p + a * log_q).exp()) / (1 - a)


class TotalVariation(FDivergence):
    """Half the sum of absolute differences. f' is a sign: it says which way, not how far."""

    name = "total-variation"

    def derivative(self, d: Tensor) -> Tensor:
        return torch.sign(d) / 2

    def ratio(self, d: Tensor) -> Tensor:
        return torch.expm1(-d).abs() / 2

    def terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p.exp() - log_q.exp()).abs() / 2

    def offset_terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        # q (|u - 1| - u sign(u - 1)) / 2; where p = q both vanish only with sign(0) = 0 on either side
        return -log_q.exp() * torch.sign(log_p - log_q) / 2


class ChiSquared(FDivergence):
    """``sum (p - q)^2 / q``. Explodes where the reference has little mass."""

    name = "chi-squared"

    def derivative(self, d: Tensor) -> Tensor:
        return 2 * torch.expm1(d)

    def ratio(self, d: Tensor) -> Tensor:
        return 4 * torch.sinh(d / 2).square()

    def terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return _weighted(log_p.exp() - log_q.exp(), torch.expm1(log_p - log_q))

    def offset_terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return log_q.exp() - (2 * log_p - log_q).exp()


class SquaredHellinger(FDivergence):
    """``sum (sqrt p - sqrt q)^2``: what the unbalanced Wasserstein form becomes when no token has neighbours, and
    so its control.
    """

    name = "squared-hellinger"

    def derivative(self, d: Tensor) -> Tensor:
        return -torch.expm1(-d / 2)

    def ratio(self, d: Tensor) -> Tensor:
        return torch.expm1(-d / 2).square()

    def terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return ((log_p / 2).exp() - (log_q / 2).exp()).square()

    def offset_terms(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return log_q.exp() - ((log_p + log_q) / 2).exp()


def _log_softmax(policy_logits: Tensor, reference_logits: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of both, two ``(P, V)`` in working precision; refuses rows that are no distribution."""
    dtype = working_dtype(policy_logits, reference_logits)
    both = []
    for name, logits in (("policy", policy_logits), ("reference", reference_logits)):
        logits = logits.to(dtype)
        total = logits.logsumexp(-1, keepdim=True)
        refuse_rows_without_total(total.detach().squeeze(-1), name, first)
        both.append(logits - total)
    return both[0], both[1]


def _weighted(weight: Tensor, factor: Tensor) -> Tensor:
    """``weight * factor`` with ``0 * inf = 0``."""
    return torch.where(weight == 0, 0, weight * factor)


def _sum_over_vocabulary(terms: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Sum ``(P, V)`` to ``(P,)``, leaving out tokens that neither distribution can emit."""
    return terms.masked_fill((log_p == -torch.inf) & (log_q == -torch.inf), 0).sum(-1)


def _any_tokens(logits: Tensor) -> Tensor:
    return torch.zeros(len(logits), dtype=torch.long, device=logits.device)
