"""A batch of transport problems, and what is known of its solution: potentials, plan, value.

Notation for shapes: ``P`` problems, ``n`` support entries; ``a`` the policy's masses, ``b`` the reference's.
`sinkhorn` has the solvers, ``docs/numerics.md`` the derivations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """A batch of transport problems.

    log_a, log_b: ``(P, n)`` masses; -inf in both is padding.
    cost: ``(P, n, n)``. lam: inverse entropy. rho: price of mass that is not moved; infinite where all of it must be.
    floor: what the solver adds inside of its logarithms, with exact marginals.
    """

    log_a: Tensor
    log_b: Tensor
    cost: Tensor
    lam: float
    rho: float = math.inf
    floor: float = 0.0

    @property
    def balanced(self) -> bool:
        """Whether marginals are exact."""
        return math.isinf(self.rho)

    @property
    def padding(self) -> Tensor:
        """Entries without mass in either distribution: ``(P, n)``."""
        return (self.log_a == -torch.inf) & (self.log_b == -torch.inf)


@dataclass(frozen=True)
class Solution:
    """Potentials of a batch of transport problems, with what they are worth.

    problem: what was solved.
    f, g: ``(P, n)`` potentials of the policy's and the reference's side, in units of cost; 0 on padding.
    iterations: ``(P,)`` iterations that each problem took.
    marginal_error: ``(P,)`` L1 distance between a marginal of the plan of exactly these f and g and what optimality
        asks of it: the policy's for the balanced problem, the reference's for the unbalanced one. The other one is
        exact.
    change: ``(P,)`` largest change of any potential that one more plain iteration would make.
    converged: ``(P,)`` whether the problem stopped by tolerance.
    """

    problem: Problem
    f: Tensor
    g: Tensor
    iterations: Tensor
    marginal_error: Tensor
    change: Tensor
    converged: Tensor

    @property
    def moved_a(self) -> Tensor:
        """``sum_i a_i exp(-f_i/rho)``: the mass that leaves the policy's side, 1 if all of it must: ``(P,)``."""
        return _moved(self.problem.log_a, self.f, self.problem.rho)

    @property
    def moved_b(self) -> Tensor:
        """``sum_j b_j exp(-g_j/rho)``: the mass that arrives at the reference's side ``(P,)``."""
        return _moved(self.problem.log_b, self.g, self.problem.rho)

    def plan(self) -> Tensor:
        """Mass from entry i of the policy to entry j of the reference: ``(P, n, n)``, so ask for few problems.

        balanced      u_i exp(-lam C_ij) v_j
        unbalanced    a_i b_j exp(lam (f_i + g_j - C_ij)),  row sums a_i exp(-f_i/rho),  column sums b_j exp(-g_j/rho)
        """
        p = self.problem
        if p.balanced:
            log_u, log_v = (
                _without_floor(p.lam * x, p.floor).masked_fill(p.padding, -torch.inf) for x in (self.f, self.g)
            )
        else:
            log_u, log_v = p.log_a + p.lam * self.f, p.log_b + p.lam * self.g
        return (log_u.unsqueeze(-1) + log_v.unsqueeze(-2) - p.lam * p.cost).exp()

    def value(self) -> Tensor:
        """What the transport costs ``(P,)``, where f is the answer to g.

        balanced      <a, f> + <b, g> - 1/lam                             (entropy H(P), plan of mass 1)
        unbalanced    (rho + 1/lam) (1 - moved_a) + rho (1 - moved_b)
        """
        p = self.problem
        if p.balanced:
            return mean_potential(p.log_a, self.f) + mean_potential(p.log_b, self.g) - 1 / p.lam
        return (p.rho + 1 / p.lam) * (1 - self.moved_a) + p.rho * (1 - self.moved_b)


def _without_floor(x: Tensor, floor: float) -> Tensor:
    """``log(exp(x) - floor)``: the solver adds the floor inside its logarithm, but its plan has none."""
    return x if floor == 0 else x + torch.log1p(-(math.log(floor) - x).exp().clamp_max(1))


def _moved(log_mass: Tensor, potential: Tensor, rho: float) -> Tensor:
    """``sum_i mass_i exp(-potential_i / rho)`` ``(P,)``."""
    return (log_mass - potential / rho).exp().sum(-1)


def mean_potential(log_mass: Tensor, potential: Tensor) -> Tensor:
    """``<mass, potential>`` ``(P,)``."""
    return (log_mass.exp() * potential).sum(-1)
