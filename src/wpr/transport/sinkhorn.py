"""Sinkhorn solvers: balanced, unbalanced and self-transport; batched, accurate in float32 for every cost.

Notation for shapes: ``P`` problems, ``n`` support entries; ``a`` the policy's masses, ``b`` the reference's, each row
summing to one. Masses come as logarithms ``(P, n)`` and costs as ``(P, n, n)``: symmetric, zero on the diagonal,
infinite where no transport is possible. ``lse_i(x) = log sum_j exp(x_j - lam C_ij)`` is `gibbs.GibbsKernel`. The
formulas are derived in ``docs/numerics.md``. Solutions carry no gradient: the envelope theorem needs none.

Masses of zero. An entry without mass in both distributions is padding: it takes no part, and its potentials are 0. In
one distribution, a mass below `LOG_TINY` (1e-100 in float32) counts as that, so that every potential stays finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from wpr.transport.gibbs import GibbsKernel
from wpr.transport.precision import full_precision
from wpr.transport.problem import Problem, Solution

LOG_TINY = {torch.float32: math.log(1e-100), torch.float64: -1000.0}
"""The least log mass. It keeps potentials small enough for their digits, and is far below what any result can show."""

CHUNK_BYTES = 8 << 20
"""Bytes of one cost matrix stack worked on at a time on a CPU: it should stay in the cache over all iterations."""

CHUNK_SHARE = 1 / 128
"""The same on a GPU, as a share of its memory: large enough to outweigh the launches of kernels. The workspace of a
solver is about 6.5 times as much.
"""


@torch.no_grad()
def balanced(
    log_a: Tensor,
    log_b: Tensor,
    cost: Tensor,
    *,
    lam: float,
    iterations: int,
    tolerance: float = 0.0,
    floor: float = 0.0,
    method: str = "auto",
) -> Solution:
    """The paper's iteration: v starts at one, u is updated first.

        u <- a / (K v)          v <- b / (K^T u)          K = exp(-lam C)          f = (1/lam) log u,  g = (1/lam) log v

    floor: the released code adds 1e-16 to both denominators and inside the logarithm; 0 is exact.
    tolerance: stop a problem once its marginal error is at most this. If the supports are disconnected pieces of
        unequal mass, the problem has no solution, the potentials drift for ever, and the number of iterations is part
        of the definition of the penalty.
    """
    _check(log_a, log_b, cost, lam, iterations)
    problem = make_problem(log_a, log_b, cost, lam, floor=floor)
    return _in_chunks(lambda part, kernel: solve_balanced(part, kernel, iterations, tolerance), problem, method)


@torch.no_grad()
def unbalanced(
    log_a: Tensor,
    log_b: Tensor,
    cost: Tensor,
    *,
    lam: float,
    rho: float,
    iterations: int,
    tolerance: float = 0.0,
    method: str = "auto",
) -> Solution:
    """Transport with entropy relative to a (x) b whose marginals are held by ``rho * KL`` instead of exactly.

        f <- -(tau/lam) lse(log b + lam g)        g <- -(tau/lam) lse(log a + lam f)        tau = rho / (rho + 1/lam)

    Every problem has one solution, whatever its cost. The updates are over-relaxed (`Relaxation`), with a safeguard
    that makes them converge always.
    tolerance: stop a problem once no potential changes by more than this.
    """
    _check(log_a, log_b, cost, lam, iterations, rho)
    problem = make_problem(log_a, log_b, cost, lam, rho)
    return _in_chunks(lambda part, kernel: solve_unbalanced(part, kernel, iterations, tolerance), problem, method)


@torch.no_grad()
def self_transport(
    log_a: Tensor,
    cost: Tensor,
    *,
    lam: float,
    rho: float = math.inf,
    iterations: int,
    tolerance: float = 0.0,
    method: str = "auto",
) -> Solution:
    """Transport of a distribution to itself, whose two potentials are equal; ``rho = inf`` is the balanced problem.

        s <- s - w ( s + (tau/lam) lse(log a + lam s) )             w = 2 / (2 + tau)

    Errors and changes are those before the last update, which shrinks them once more.
    """
    _check(log_a, log_a, cost, lam, iterations, rho)
    problem = make_problem(log_a, log_a, cost, lam, rho)
    return _in_chunks(lambda part, kernel: solve_self(part, kernel, iterations, tolerance), problem, method)


def solve_balanced(problem: Problem, kernel: GibbsKernel, iterations: int, tolerance: float) -> Solution:
    """`balanced` against a kernel that exists already."""
    log_a, log_b, padding, lam = problem.log_a, problem.log_b, problem.padding, problem.lam
    log_floor = math.log(problem.floor) if problem.floor > 0 else None
    to_u, to_v = kernel.operator(), kernel.operator()
    log_u, log_v = torch.zeros_like(log_a), torch.zeros_like(log_b).masked_fill(padding, -torch.inf)
    tally = _Tally(problem, tolerance)
    reached = to_u(log_v)
    for _ in range(iterations):
        new_u = (log_a - _with_floor(reached, log_floor)).masked_fill(padding, -torch.inf)
        new_v = (log_b - _with_floor(to_v(new_u), log_floor)).masked_fill(padding, -torch.inf)
        log_u, log_v = tally.keep(new_u, log_u), tally.keep(new_v, log_v)
        reached = to_u(log_v)
        # One more plain update would move log u from where it is to log a - reached.
        error = ((log_u + reached).exp() - log_a.exp()).masked_fill(padding, 0).abs().sum(-1)
        change = (log_a - reached - log_u).masked_fill(padding, 0).abs().amax(-1) / lam
        if tally.count(error, error, change):
            break
    f, g = (_with_floor(x, log_floor).masked_fill(padding, 0) / lam for x in (log_u, log_v))
    return tally.solution(f, g)


def solve_unbalanced(
    problem: Problem,
    kernel: GibbsKernel,
    iterations: int,
    tolerance: float,
    start: tuple[Tensor, Tensor] | None = None,
) -> Solution:
    """`unbalanced` against a kernel that exists already, from potentials ``start`` if given.

    Over-relaxation moves each potential past its update by a factor omega. Its optimum is known before solving, because
    one plain iteration shrinks errors by tau^2 or better whatever the cost. Far from the solution the iteration is not
    linear and a fixed omega can cycle, so omega starts at 1 and rises over `RAMP` iterations, and `Relaxation` takes it
    back for problems that make no progress.
    """
    log_a, log_b, padding, lam, rho = problem.log_a, problem.log_b, problem.padding, problem.lam, problem.rho
    tau = rho / (rho + 1 / lam)
    to_f, to_g = kernel.operator(), kernel.operator()

    def update(operator: Callable[[Tensor], Tensor], log_mass: Tensor, other: Tensor) -> Tensor:
        return (operator(log_mass + lam * other) * (-tau / lam)).masked_fill(padding, 0)

    f, g = (torch.zeros_like(log_a), torch.zeros_like(log_b)) if start is None else start
    relaxation = Relaxation(log_a, tau)
    tally = _Tally(problem, tolerance)
    for iteration in range(iterations):
        step = update(to_f, log_b, g) - f
        residual = step.abs().amax(-1, keepdim=True)
        omega = relaxation.omega(iteration, residual)
        f = tally.keep(f + omega * step, f)
        step = update(to_g, log_a, f) - g
        g = tally.keep(g + omega * step, g)
        change = torch.maximum(residual, step.abs().amax(-1, keepdim=True)).squeeze(-1)
        if tally.count(change, change, change):
            break
    # A plain sweep at the end: f becomes the answer to g, which the formulas of penalty and divergence assume.
    g = update(to_g, log_a, f)
    before, f = f, update(to_f, log_b, g)
    answer = update(to_g, log_a, f)
    change = torch.maximum((f - before).abs(), (answer - g).abs()).amax(-1)
    error = (log_b - g / rho).exp() * (1 - (lam / tau * (g - answer)).exp())
    return tally.solution(f, g, error.abs().sum(-1), change)


RAMP = 6
"""Iterations over which over-relaxation rises to its full strength."""

WINDOW = 12
"""Iterations, at least, after which a problem's progress is judged: over-relaxed errors may grow before they shrink."""

LARGEST_PRODUCT = 1e6
"""Of lam and rho; iterations grow with its root. The presets have 40 and 80."""

STRIKES = 6
"""Windows without progress after which a problem's over-relaxation is never raised again."""


class Relaxation:
    """The over-relaxation of each problem.

    Full strength is ``omega = 2 / (1 + sqrt(1 - tau^2))``, the best value when plain iterations shrink the slowest
    error by tau^2. It turns that factor into ``omega - 1``: for lam=10, rho=4, from 0.952 to 0.640. A problem whose
    residual has not shrunk within a window has its excess over 1 halved; with progress it recovers by half. After
    `STRIKES` such windows it only falls: plain updates, which converge for every cost, are the limit.
    """

    def __init__(self, like: Tensor, tau: float) -> None:
        self.full, self.window, self.enough, self.ceiling = relaxation_schedule(tau)
        self.excess = torch.full_like(like[:, :1], self.full)
        self.before = torch.full_like(self.excess, torch.inf)
        self.strikes = torch.zeros_like(self.excess)
        self.first = torch.zeros_like(self.excess)

    def omega(self, iteration: int, residual: Tensor) -> Tensor:
        """The factor ``(P, 1)`` of this iteration, given the residual ``(P, 1)`` that it starts from."""
        if iteration < RAMP:
            self.first = torch.maximum(self.first, residual)
        self.excess = self.excess.masked_fill(residual > self.ceiling * self.first, 0)
        # The first residual is no measure: steps grow before they shrink.
        if iteration and iteration % self.window == 0:
            stuck = residual > self.enough * self.before
            self.strikes += stuck
            raised = torch.where(self.strikes < STRIKES, 1.5 * self.excess, self.excess).clamp_max(self.full)
            self.excess = torch.where(stuck, self.excess / 2, raised)
            self.before = residual
        return 1 + self.excess * min(1.0, iteration / RAMP)


def relaxation_schedule(tau: float) -> tuple[float, int, float, float]:
    """The numbers that `Relaxation` goes by: the full excess of omega over 1; the iterations of a window; what share of
    the residual a window may leave; and how many times the first residual is too far.
    """
    full = optimal_relaxation(tau) - 1
    # In the linear regime errors fall like t (omega - 1)^t; three times its decay time is past the hump.
    window = max(WINDOW, math.ceil(3 / (1 - full))) if full < 1 else WINDOW
    enough = max(0.9, (1 + tau ** (2 * window)) / 2)
    # The solution is at most the first plain step over 1 - tau^2 away, and a converging run's steps are at most about
    # 1 - (omega - 1) of that. What steps four times farther runs away, and goes on with plain updates.
    ceiling = 4 * (1 - full) / (1 - tau * tau) if full < 1 else math.inf
    return full, window, enough, ceiling


def optimal_relaxation(tau: float) -> float:
    """``2 / (1 + sqrt(1 - tau^2))``."""
    return 2 / (1 + math.sqrt(1 - tau * tau))


def solve_self(
    problem: Problem, kernel: GibbsKernel, iterations: int, tolerance: float, start: Tensor | None = None
) -> Solution:
    """`self_transport` against a kernel that exists already: of the policy's side of ``problem``, from a potential
    ``start`` if given.

    Averaging keeps the update from oscillating. If the kernel's conditional matrix has eigenvalues in [0, 1], as
    positive kernels have, the factor an iteration is at most |1 - w| = tau / (2 + tau), a third; with weight 1/2 it
    would be a half. For other kernels it is below one all the same.
    """
    log_a, padding, lam, rho = problem.log_a, problem.padding, problem.lam, problem.rho
    tau = 1.0 if problem.balanced else rho / (rho + 1 / lam)
    weight = 2 / (2 + tau)
    apply = kernel.operator()
    s = (log_a * (-tau / (lam * (1 + tau)))).masked_fill(padding, 0)  # the solution where nothing can be transported
    s = s if start is None else start
    tally = _Tally(problem, tolerance)
    for _ in range(iterations):
        step = (apply(log_a + lam * s) * (-tau / lam) - s).masked_fill(padding, 0)
        change = step.abs().amax(-1)
        error = (log_a - s / rho).exp() * (1 - (-lam / tau * step).exp())
        s = tally.keep(s + weight * step, s)
        if tally.count(change, error.abs().sum(-1), change):
            break
    return tally.solution(s, s)


class _Tally:
    """Which problems still run, and what they reached. A problem that is done is frozen, whatever its batch mates
    do.
    """

    def __init__(self, problem: Problem, tolerance: float) -> None:
        self.problem, self.tolerance, like = problem, tolerance, problem.log_a
        self.running = torch.ones(len(like), dtype=torch.bool, device=like.device)
        self.iterations = torch.zeros(len(like), dtype=torch.long, device=like.device)
        self.error = torch.full((len(like),), torch.inf, dtype=like.dtype, device=like.device)
        self.change = self.error

    def keep(self, new: Tensor, old: Tensor) -> Tensor:
        return new if self.tolerance == 0 else torch.where(self.running.unsqueeze(-1), new, old)

    def count(self, criterion: Tensor, error: Tensor, change: Tensor) -> bool:
        """Record an iteration; True if no problem is left running."""
        self.iterations += self.running
        if self.tolerance == 0:
            self.error, self.change = error, change
            return False
        self.error = torch.where(self.running, error, self.error)
        self.change = torch.where(self.running, change, self.change)
        self.running = self.running & ~(criterion <= self.tolerance)
        return not self.running.any()

    def solution(self, f: Tensor, g: Tensor, error: Tensor | None = None, change: Tensor | None = None) -> Solution:
        error = self.error if error is None else error
        change = self.change if change is None else change
        return Solution(self.problem, f, g, self.iterations, error, change, ~self.running)


def make_problem(
    log_a: Tensor, log_b: Tensor, cost: Tensor, lam: float, rho: float = math.inf, floor: float = 0.0
) -> Problem:
    """The problem of masses as they come, the module's rule for zeros applied."""
    log_a, log_b, _ = prepare_masses(log_a, log_b)
    return Problem(log_a, log_b, cost, lam, rho, floor)


def prepare_masses(log_a: Tensor, log_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Masses with the module's rule for zeros applied, and the mask of padding: three ``(P, n)``."""
    padding = (log_a == -torch.inf) & (log_b == -torch.inf)
    log_a, log_b = (x.clamp_min(LOG_TINY[x.dtype]).masked_fill(padding, -torch.inf) for x in (log_a, log_b))
    return log_a, log_b, padding


def _with_floor(x: Tensor, log_floor: float | None) -> Tensor:
    """``log(exp(x) + floor)``."""
    return x if log_floor is None else torch.logaddexp(x, x.new_tensor(log_floor))


def _in_chunks(solve: Callable[[Problem, GibbsKernel], Solution], problem: Problem, method: str) -> Solution:
    """Solve a few problems at a time, so that their kernels stay in the cache."""
    cost = problem.cost
    size = chunk_size(cost.shape[-1], cost.element_size(), cost.device)
    chunks = zip(problem.log_a.split(size), problem.log_b.split(size), cost.split(size), strict=True)
    with full_precision(cost.device):
        parts = [
            solve(replace(problem, log_a=a, log_b=b, cost=c), GibbsKernel(c, problem.lam, method)) for a, b, c in chunks
        ]
    if len(parts) == 1:
        return parts[0]
    found = [field.name for field in fields(Solution) if field.name != "problem"]
    return Solution(problem, *(torch.cat([getattr(part, name) for part in parts]) for name in found))


def chunk_size(n: int, itemsize: int, device: torch.device) -> int:
    """Problems of ``n`` entries worked on at a time."""
    size = CHUNK_BYTES
    if device.type == "cuda":
        size = int(CHUNK_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return max(1, size // (n * n * itemsize))


def _check(log_a: Tensor, log_b: Tensor, cost: Tensor, lam: float, iterations: int, rho: float = math.inf) -> None:
    if log_a.ndim != 2 or log_a.shape != log_b.shape or cost.shape != (*log_a.shape, log_a.shape[-1]):
        raise ValueError(
            f"log masses of shape {tuple(log_a.shape)} and {tuple(log_b.shape)} with costs {tuple(cost.shape)}; they "
            f"must be (P, n), (P, n) and (P, n, n)"
        )
    if not (log_a.dtype == log_b.dtype == cost.dtype) or cost.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"log masses are {log_a.dtype} and {log_b.dtype}, costs {cost.dtype}; all must be float32 or all float64"
        )
    if not (math.isfinite(lam) and lam > 0):
        raise ValueError(f"lam={lam} must be a finite positive number")
    if not rho > 0:
        raise ValueError(f"rho={rho} must be positive")
    if LARGEST_PRODUCT < lam * rho < math.inf:
        raise ValueError(
            f"lam * rho = {lam * rho:g} exceeds {LARGEST_PRODUCT:g}, where the unbalanced problem needs millions of "
            "iterations; lower rho, or use the balanced problem"
        )
    if iterations < 1:
        raise ValueError(f"iterations={iterations} must be at least 1")
