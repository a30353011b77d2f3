"""The Sinkhorn solvers on a GPU; same names and results as `transport.sinkhorn`.

Notation for shapes: ``P`` problems, ``n`` support entries. Whatever the solver, the cost is first turned into
`neighbour_lists`, and then one launch of `iterations` does everything.
"""

# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wpr.transport.kernels import next_power_of_2
from wpr.transport.kernels.iterations import SCRATCH_ROWS, Matrix, Results, Settings, iterate
from wpr.transport.kernels.log_sums import Lists
from wpr.transport.kernels.neighbour_lists import GROUP, NeighbourLists, neighbour_lists
from wpr.transport.problem import Problem, Solution
from wpr.transport.sinkhorn import LOG_TINY, relaxation_schedule

DEPTH = 16
"""Neighbours of each of a group's 64 entries that are worked on together: 4 a thread of 8 warps. It divides 16."""

WARPS = 8
"""Warps of a program that reads lists."""

PANEL = 4096
"""Entries of the matrix that are worked on together, where a problem is dense: 16 a thread of 8 warps."""

_LOG2_E = 1 / math.log(2)


@dataclass(frozen=True)
class Debiased:
    """The transport between two distributions, and the potentials ``(P, n)`` of each one's transport to itself."""

    cross: Solution
    own_a: Tensor
    own_b: Tensor


def balanced(
    log_a: Tensor,
    log_b: Tensor,
    cost: Tensor,
    *,
    lam: float,
    iterations: int,
    tolerance: float = 0.0,
    floor: float = 0.0,
) -> Solution:
    """Same as `sinkhorn.balanced`, in float32."""
    return _solve(log_a, log_b, cost, None, lam, math.inf, iterations, tolerance, floor, own=0, cross=2)[0]


def unbalanced(
    log_a: Tensor, log_b: Tensor, cost: Tensor, *, lam: float, rho: float, iterations: int, tolerance: float = 0.0
) -> Solution:
    """Same as `sinkhorn.unbalanced`, in float32."""
    return _solve(log_a, log_b, cost, None, lam, rho, iterations, tolerance, 0.0, own=0, cross=1)[0]


def self_transport(
    log_a: Tensor,
    cost: Tensor,
    *,
    lam: float,
    rho: float = math.inf,
    iterations: int,
    tolerance: float = 0.0,
    lists: NeighbourLists | None = None,
) -> Solution:
    """Same as `sinkhorn.self_transport`, in float32."""
    solution, own_a, _ = _solve(log_a, log_a, cost, lists, lam, rho, iterations, tolerance, 0.0, own=1, cross=0)
    return replace(solution, f=own_a, g=own_a)


def debiased(
    log_a: Tensor, log_b: Tensor, cost: Tensor, *, lam: float, rho: float, iterations: int, tolerance: float = 0.0
) -> Debiased:
    """Both self-transports, a hundred times more exact than ``tolerance``, and from their potentials the unbalanced
    transport between the two.
    """
    return Debiased(*_solve(log_a, log_b, cost, None, lam, rho, iterations, tolerance, 0.0, own=2, cross=1))


def solve(
    log_a: Tensor,
    log_b: Tensor,
    cost: Tensor,
    lists: NeighbourLists,
    *,
    lam: float,
    rho: float,
    iterations: int,
    tolerance: float,
    floor: float,
    debias: bool,
) -> tuple[Solution, tuple[Tensor, Tensor] | None]:
    """The transport between the two, and if asked for the potentials of each one's transport to itself. ``rho`` is
    infinity for balanced marginals. ``lists`` are those of ``cost``.
    """
    arguments = (log_a, log_b, cost, lists, lam, rho, iterations, tolerance)
    if not math.isinf(rho):
        cross, own_a, own_b = _solve(*arguments, 0.0, own=2 if debias else 0, cross=1)
        return cross, (own_a, own_b) if debias else None
    cross = _solve(*arguments, floor, own=0, cross=2)[0]
    if not debias:
        return cross, None
    own_a, own_b = (
        self_transport(x, cost, lam=lam, iterations=iterations, tolerance=tolerance / 100, lists=lists).f
        for x in (log_a, log_b)
    )
    return cross, (own_a, own_b)


def _solve(
    log_a: Tensor,
    log_b: Tensor,
    cost: Tensor,
    lists: NeighbourLists | None,
    lam: float,
    rho: float,
    iterations: int,
    tolerance: float,
    floor: float,
    *,
    own: int,
    cross: int,
) -> tuple[Solution, Tensor, Tensor]:
    """Launch the kernel; own: how many self-transports. cross: 0 none, 1 unbalanced, 2 balanced."""
    assert cross or own < 2, "two self-transports lead to the transport between the two"
    _check(log_a, log_b, cost)
    rows, n = log_a.shape
    device = log_a.device
    log_a, log_b = log_a.contiguous(), log_b.contiguous()
    # Each a tensor of its own: they start at a multiple of 16 bytes, which the compiler may rely on.
    potentials = (torch.empty(rows, n, dtype=torch.float32, device=device) for _ in range(4))
    kinds = torch.int64, torch.bool, torch.float32, torch.float32
    results = Results(*potentials, *(torch.empty(rows, dtype=kind, device=device) for kind in kinds))
    if rows:
        core, border = matrix_and_border(n)
        size = max(GROUP, core, next_power_of_2(n))
        scratch = torch.empty(rows, SCRATCH_ROWS.value, size, dtype=torch.float32, device=device)
        tau = 1.0 if math.isinf(rho) else rho / (rho + 1 / lam)
        lists = neighbour_lists(log_a, log_b, cost) if lists is None else lists
        arguments = (
            Matrix(cost, cost.stride(0), cost.stride(1)),
            Lists(
                *(lists.order, lists.first, lists.width, lists.index, lists.cost, lists.dense),
                groups=lists.first.shape[1],
                slots=lists.index.shape[1],
            ),
            *(log_a, log_b, results, scratch, n),
            Settings(
                *(lam * _LOG2_E, lam * _LOG2_E, 0.0 if math.isinf(rho) else 1 / (lam * rho), tau),
                *relaxation_schedule(tau),
                *(LOG_TINY[torch.float32], iterations, tolerance, tolerance / 100 if cross else tolerance),
                log_floor=math.log2(floor) if floor > 0 else 0.0,
            ),
            *(floor > 0, own, cross),
        )
        shape = (size, GROUP, DEPTH, core, border, min(core, max(1, PANEL // core)), n >= core)
        iterate[(rows,)](*arguments, True, *shape, num_warps=WARPS)
        iterate[(rows,)](*arguments, False, *shape, num_warps=8 if core > 64 else 4)
    problem = Problem(log_a, log_b, cost, lam, rho, floor)
    solution = Solution(problem, results.f, results.g, results.count, results.error, results.change, results.converged)
    return solution, results.own_a, results.own_b


def matrix_and_border(n: int) -> tuple[int, int]:
    """The power of two that ``n`` entries are worked on as, and how many entries are beyond it: 258 is (256, 2)."""
    core = next_power_of_2(n)
    if n >= 18 and n - 2 == core // 2:
        return core // 2, 2
    return max(16, core), 0


def _check(log_a: Tensor, log_b: Tensor, cost: Tensor) -> None:
    if log_a.ndim != 2 or log_a.shape != log_b.shape or cost.shape != (*log_a.shape, log_a.shape[-1]):
        raise ValueError(
            f"log masses of shape {tuple(log_a.shape)} and {tuple(log_b.shape)} with costs {tuple(cost.shape)}; they "
            f"must be (P, n), (P, n) and (P, n, n)"
        )
    if not log_a.dtype == log_b.dtype == cost.dtype == torch.float32:
        raise ValueError(
            f"log masses are {log_a.dtype} and {log_b.dtype}, costs {cost.dtype}; the kernels solve in float32: use "
            f"wpr.transport.sinkhorn for others"
        )
    if cost.shape[-1] > 1 and cost.stride(-1) != 1:
        raise ValueError(f"costs with strides {cost.stride()}; a row's costs must lie side by side")
