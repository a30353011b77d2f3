"""Sums over the vocabulary of two next-token distributions: f-divergences, entropy; the logits are read twice.

Notation for shapes: ``P`` positions, ``V`` vocabulary; ``p`` the policy, ``q`` the reference, ``d = log(p/q)``.

The first read is the vocabulary pass (`kernels.vocabulary`), for the two log-sum-exps. The second adds up, with ``p``
and ``q`` in registers only,

    terms    q f(u)                      offset    q (f(u) - u f'(u))                      u = p / q

whose formulas stand in `wpr.regularizers.f_divergences`. They are written here in ``d``, which is exact to the rounding
of two logits, not of two log-probabilities. Tokens that neither distribution can emit add nothing, and 0 times infinity
is 0.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from wpr.transport.kernels import cdiv, next_power_of_2
from wpr.transport.kernels.vocabulary import block_statistics, log_totals, side_by_side

KINDS = (
    "reverse-kl",
    "forward-kl",
    "jensen-shannon",
    "alpha",
    "total-variation",
    "chi-squared",
    "squared-hellinger",
    "kl-and-entropy",
)
"""The last one has KL(p | q) without its linear terms as ``terms``, and the entropy of p as ``offset``."""

TOKENS_OF_A_PROGRAM = 4096
"""Tokens that one program reads of both rows: 8 KB each in bf16."""


@dataclass(frozen=True)
class Sums:
    """Per position ``(P,)``: the two sums, of which the first may be that of ``p f'(u)`` instead, and the log-sum-exp
    of both rows, not finite where a row is no distribution.
    """

    terms: Tensor
    offset: Tensor
    log_policy: Tensor
    log_reference: Tensor


def divergence_sums(
    policy_logits: Tensor,
    reference_logits: Tensor,
    kind: str,
    alpha: float = 0.5,
    totals: tuple[Tensor, Tensor] | None = None,
    derivative: bool = False,
) -> Sums:
    """The sums of one of `KINDS` over logits ``(P, V)`` in float32, float16 or bfloat16. totals: the log-sum-exps of
    both rows ``(P,)``, where they are known. derivative: the first sum is the mean of f'(u) over what the policy can
    emit, in the place of the terms.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; use one of {', '.join(KINDS)}")
    policy_logits, reference_logits = both = side_by_side(policy_logits), side_by_side(reference_logits)
    rows, vocabulary = policy_logits.shape
    if totals is None and policy_logits.dtype == reference_logits.dtype:
        totals = tuple(log_totals(block_statistics(*both)))
    elif totals is None:
        totals = tuple(torch.cat([log_totals(block_statistics(logits)) for logits in both]))
    size = min(TOKENS_OF_A_PROGRAM, next_power_of_2(vocabulary))
    programs = cdiv(vocabulary, size)
    parts = torch.empty(2, rows, programs, dtype=torch.float32, device=policy_logits.device)
    if rows:
        _sums_kernel[(rows * programs,)](
            policy_logits,
            reference_logits,
            *totals,
            parts[0],
            parts[1],
            vocabulary,
            policy_logits.stride(0),
            reference_logits.stride(0),
            programs,
            alpha,
            KINDS.index(kind),
            derivative,
            size,
            num_warps=4,
        )
    terms, offset = parts.sum(-1)
    return Sums(terms, offset, *totals)


@triton.jit(do_not_specialize=["log_reference", "out_offset"])
def _sums_kernel(
    policy,
    reference,
    log_policy,
    log_reference,
    out_terms,
    out_offset,
    vocabulary,
    policy_stride,
    reference_stride,
    programs,
    alpha,
    KIND: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    SIZE: tl.constexpr,
):
    program = tl.program_id(0)
    row, token = place_of(programs, SIZE)
    inside = token < vocabulary
    x = tl.load(policy + row * policy_stride + token, mask=inside, other=-float("inf")).to(tl.float32)
    y = tl.load(reference + row * reference_stride + token, mask=inside, other=-float("inf")).to(tl.float32)
    log_total_p = tl.load(log_policy + row)
    log_total_q = tl.load(log_reference + row)
    possible = (x != -float("inf")) | (y != -float("inf"))
    log_p = x - log_total_p
    log_q = y - log_total_q
    d = tl.where(possible, (x - y) - (log_total_p - log_total_q), 0.0)
    terms, offset = _terms(log_p, log_q, d, alpha, KIND)
    if DERIVATIVE:
        terms = tl.where(x == -float("inf"), 0.0, weighted_derivative(log_p, log_q, d, alpha, KIND))
    # A row with a NaN is refused by its log-sum-exp; what its sums are does not matter.
    tl.store(out_terms + program, tl.sum(tl.where(possible, terms, 0.0), axis=0))
    tl.store(out_offset + program, tl.sum(tl.where(possible, offset, 0.0), axis=0))


@triton.jit
def place_of(programs, SIZE: tl.constexpr):
    """The row of this program, of which there are so many for a row, and its tokens."""
    program = tl.program_id(0)
    return (program // programs).to(tl.int64), (program % programs) * SIZE + tl.arange(0, SIZE)


@triton.jit
def _terms(log_p, log_q, d, alpha, KIND: tl.constexpr):
    """Each token's term of the divergence and of what the penalty is shifted by; ``d`` is log p - log q."""
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    if KIND == 0:  # reverse KL
        terms = _weighted(p, d) - p + q
        offset = tl.zeros_like(p)
    elif KIND == 1:  # forward KL
        offset = _weighted(q, -d)
        terms = offset - q + p
    elif KIND == 2:  # Jensen-Shannon: log(p/m) = log(2 / (1 + exp(-d)))
        # log(1 + exp(d)) without exp(d), which is beyond float32 while q, about exp(-d), still is above 0
        rest = 0.6931471805599453 - tl.log(1.0 + tl.exp(-tl.abs(d)))
        offset = _weighted(q, rest - tl.maximum(d, 0.0))
        terms = _weighted(p, rest - tl.maximum(-d, 0.0)) + offset
    elif KIND == 3:  # alpha
        mixed = tl.exp((1.0 - alpha) * log_p + alpha * log_q)
        terms = ((1.0 - alpha) * p + alpha * q - mixed) / (alpha * (1.0 - alpha))
        offset = (q - mixed) / (1.0 - alpha)
    elif KIND == 4:  # total variation
        terms = tl.abs(p - q) * 0.5
        offset = tl.where(d > 0, -0.5 * q, tl.where(d < 0, 0.5 * q, 0.0))
    elif KIND == 5:  # chi-squared
        terms = _weighted(p - q, _expm1(d))
        offset = q - tl.exp(log_p + d)
    elif KIND == 6:  # squared Hellinger
        root = tl.exp(log_p * 0.5) - tl.exp(log_q * 0.5)
        terms = root * root
        offset = q - tl.exp((log_p + log_q) * 0.5)
    else:
        terms = _weighted(p, d)
        offset = -_weighted(p, log_p)
    return terms, offset


@triton.jit
def _weighted(weight, factor):
    """``weight * factor`` with ``0 * inf = 0``."""
    return tl.where(weight == 0, 0.0, weight * factor)


@triton.jit
def weighted_derivative(log_p, log_q, d, alpha, KIND: tl.constexpr):
    """p f'(u) of `KINDS` for p > 0, ``d`` being log u: f'(u) alone may be infinite where p is next to none.
    Where u is near 1, the difference of two probabilities is their ratio's.
    """
    p = tl.exp(log_p)
    near = tl.abs(d) < 1.0
    if KIND == 0:  # reverse KL: d
        found = _weighted(p, d)
    elif KIND == 1:  # forward KL: 1 - 1 / u
        found = tl.where(near, -p * _expm1(-d), p - tl.exp(log_q))
    elif KIND == 2:  # Jensen-Shannon: log 2 - log(1 + 1 / u)
        found = _weighted(p, 0.6931471805599453 - tl.log(1.0 + tl.exp(-tl.abs(d))) - tl.maximum(-d, 0.0))
    elif KIND == 3:  # alpha: (1 - u^-alpha) / alpha
        mixed = tl.exp((1.0 - alpha) * log_p + alpha * log_q)
        found = tl.where(near, -p * _expm1(-alpha * d), p - mixed) / alpha
    elif KIND == 4:  # total variation: the sign of d, halved
        found = tl.where(d > 0, 0.5 * p, tl.where(d < 0, -0.5 * p, 0.0))
    elif KIND == 5:  # chi-squared: 2 (u - 1)
        found = 2.0 * tl.where(near, p * _expm1(d), tl.exp(log_p + d) - p)
    else:  # squared Hellinger: 1 - 1 / sqrt(u)
        found = tl.where(near, -p * _expm1(-0.5 * d), p - tl.exp((log_p + log_q) * 0.5))
    return found


@triton.jit
def _expm1(x):
    """exp(x) - 1, which by itself would lose the digits of small x."""
    return tl.where(tl.abs(x) < 0.01, x * (1.0 + x * (0.5 + x * 0.16666667)), tl.exp(x) - 1.0)
