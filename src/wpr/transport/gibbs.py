"""The one operation that every solver repeats: log-sum-exp against the Gibbs kernel of a symmetric cost.

Notation for shapes: ``P`` problems, ``n`` support entries.

    apply(x)_i  =  log sum_j exp( x_j - lam C_ij )                                  x: (P, n), C: (P, n, n)

`LogDomain` computes it as written: n^2 exponentials a call, right for every input. `Absorbed` computes the same number
with one matrix-vector product: with a reference point r for x, and m_i = max_j ( r_j - lam C_ij ),

    A_ij     = exp( r_j - lam C_ij - m_i )                     in [0, 1], every row has a 1
    apply(x) = log( A exp(x - r) ) + m

and the matrix is rebuilt (the reference *absorbs* x) whenever x has moved more than ``LIMIT`` away from r. What float32
flushes to zero in A is below exp(-87); after a move of at most LIMIT = 30 in either direction it is below n exp(-87 +
60) = 5e-10 of the row's sum for n = 258. So no cost, however large, and no potential, however far out, costs more than
float32 rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LIMIT = {torch.float32: 30.0, torch.float64: 300.0}
"""How far x may move from its reference, in nats."""

SMALLEST = {torch.float32: -87.0, torch.float64: -708.0}
"""Exponents whose exponential is still a normal number. Below them a CPU's exponentials and products are 10 to 50 times
slower (denormal numbers), so exponents are clamped here first.
"""


class GibbsKernel:
    """``-lam C`` and ``exp(-lam C)`` of a batch of problems, shared by the operators that run against it."""

    def __init__(self, cost: Tensor, lam: float, method: str = "auto") -> None:
        """cost: ``(P, n, n)``, symmetric, zero on the diagonal, infinite where no transport is possible."""
        self.exponent = cost * -lam
        self.method = resolve_method(method)
        self.matrix = _exp_(self.exponent.clone()) if self.method == "absorbed" else None

    def operator(self) -> LogDomain | Absorbed:
        """A fresh operator; a solver takes one for each of the vectors that it applies the kernel to."""
        return LogDomain(self.exponent) if self.matrix is None else Absorbed(self.exponent, self.matrix)


class LogDomain:
    """The operator as the formula says it, in a buffer of its own: new memory for each call costs more than the
    sums.
    """

    def __init__(self, exponent: Tensor) -> None:
        self.exponent = exponent
        self.buffer = torch.empty_like(exponent)

    def __call__(self, x: Tensor) -> Tensor:
        """``(P, n)`` to ``(P, n)``; ``x = -inf`` is a mass of zero."""
        exponent = torch.add(self.exponent, x.unsqueeze(-2), out=self.buffer)
        highest = exponent.amax(-1)
        nothing = highest == -torch.inf
        highest = highest.masked_fill(nothing, 0)
        sums = _exp_(exponent.sub_(highest.unsqueeze(-1))).sum(-1)
        return sums.log_().add_(highest).masked_fill_(nothing, -torch.inf)


class Absorbed:
    """The operator as a matrix-vector product around a moving reference, which it remembers from call to call."""

    def __init__(self, exponent: Tensor, matrix: Tensor) -> None:
        self.exponent = exponent
        self.matrix = matrix  # indexed (P, j, i): row vector times matrix is the fast orientation on a CPU
        self.buffer: Tensor | None = None  # the matrix above is shared; one of its own comes with the first absorption
        self.reference: Tensor | None = None
        self.shift: Tensor | None = None
        self.limit = LIMIT[exponent.dtype]

    def __call__(self, x: Tensor) -> Tensor:
        """``(P, n)`` to ``(P, n)``; ``x = -inf`` is a mass of zero and must stay one. What comes out at such an entry
        is not defined.
        """
        moved = x if self.reference is None else x - self.reference
        if not (moved.masked_fill(x == -torch.inf, 0).abs() <= self.limit).all():
            self._absorb(x)
            moved = x.masked_fill(x > -torch.inf, 0)
        sums = torch.bmm(moved.exp().unsqueeze(-2), self.matrix).squeeze(-2)
        return sums.log_() if self.shift is None else sums.log_().add_(self.shift)

    def _absorb(self, x: Tensor) -> None:
        if self.buffer is None:
            self.buffer = torch.empty_like(self.exponent)
        exponent = torch.add(self.exponent, x.unsqueeze(-1), out=self.buffer)
        highest = exponent.amax(-2)
        self.shift = highest.masked_fill(highest == -torch.inf, 0)
        self.reference = x.masked_fill(x == -torch.inf, 0)
        self.matrix = _exp_(exponent.sub_(self.shift.unsqueeze(-2)))


def _exp_(exponent: Tensor) -> Tensor:
    """``exp`` in place, with what is below ``exp(SMALLEST)`` set to zero."""
    smallest = SMALLEST[exponent.dtype]
    return torch.threshold_(exponent.clamp_min_(smallest).exp_(), math.exp(smallest) * 1.001, 0.0)


def resolve_method(method: str) -> str:
    """``"auto"`` is ``"absorbed"``, the faster on CPUs and GPUs alike (docs/numerics.md has the figures)."""
    if method not in ("auto", "absorbed", "log"):
        raise ValueError(f"method={method!r} is unknown; use 'auto', 'absorbed' or 'log'")
    return "absorbed" if method == "auto" else method
