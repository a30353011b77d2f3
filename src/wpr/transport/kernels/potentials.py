"""All Sinkhorn iterations of a problem in one program; same names and results as `transport.sinkhorn`.

Notation for shapes: ``P`` problems, ``n`` support entries. One program solves one problem: first the transport of each
distribution to itself, then the transport between them, as far as they are asked for. It stops when its own problem is
done.

Everything is in the log domain to base 2, potentials multiplied by lam included, so that one operation is left:

    y_i  =  log2 sum_j 2^( x_j - k C_ij ),        k = lam / log 2

It appears once in the program: a loop whose *phase* says which x comes next and what y is for. So the instructions fit
the cache, and any solver is a list of phases.

The sum needs a shift near its largest term to be safe. That is the last y of the same phase, which after the first
iterations differs little; where it does not serve (the sum is beyond 2^60 either way), the largest term is looked up.
So there is one exponential an entry and a search for the maximum only in the beginning: as exact as the log domain, for
every cost.

A cost of 256 x 256 float32 is 256 KB, more than a multiprocessor can hold besides other things. The first rows
(`HELD`) stay in registers, the others are read from the first-level cache once an application. Supports of 2^m + 2
entries, which n = 258 is, are a matrix of 2^m and a border of two entries.

Vectors that all threads need go through a few rows of memory that belong to the program, with barriers between.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from wpr.transport.sinkhorn import LOG_TINY, RAMP, STRIKES, Solution, relaxation_schedule

PANEL = 8192
"""Entries of the cost that are worked on together: 32 a thread of 8 warps."""

HELD = {256: 64}
"""Rows of the cost kept in registers, by the size of the matrix: 64 registers a thread of 8 warps."""

WARPS = {16: 4, 32: 4, 64: 4}
"""Warps of a program, by the size of the matrix; 8 for others."""

_LOG2_E = 1 / math.log(2)

# The phases of the kernel. The first four are also the rows in which it remembers its last results.
_SELF_A, _SELF_B, _TO_F, _TO_G, _LAST_G, _LAST_F, _ANSWER, _DONE = (tl.constexpr(i) for i in range(8))
_ROWS = tl.constexpr(6)
_RAMP, _STRIKES = tl.constexpr(RAMP), tl.constexpr(STRIKES)


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
    return _solve(log_a, log_b, cost, lam, math.inf, iterations, tolerance, floor, own=0, cross=2)[0]


def unbalanced(
    log_a: Tensor, log_b: Tensor, cost: Tensor, *, lam: float, rho: float, iterations: int, tolerance: float = 0.0
) -> Solution:
    """Same as `sinkhorn.unbalanced`, in float32."""
    return _solve(log_a, log_b, cost, lam, rho, iterations, tolerance, 0.0, own=0, cross=1)[0]


def self_transport(
    log_a: Tensor, cost: Tensor, *, lam: float, rho: float = math.inf, iterations: int, tolerance: float = 0.0
) -> Solution:
    """Same as `sinkhorn.self_transport`, in float32."""
    solution, own_a, _ = _solve(log_a, log_a, cost, lam, rho, iterations, tolerance, 0.0, own=1, cross=0)
    return Solution(own_a, own_a, solution.iterations, solution.marginal_error, solution.change, solution.converged)


def debiased(
    log_a: Tensor, log_b: Tensor, cost: Tensor, *, lam: float, rho: float, iterations: int, tolerance: float = 0.0
) -> Debiased:
    """Both self-transports, a hundred times more exact than ``tolerance``, and from their potentials the unbalanced
    transport between the two.
    """
    return Debiased(*_solve(log_a, log_b, cost, lam, rho, iterations, tolerance, 0.0, own=2, cross=1))


def _solve(
    log_a: Tensor,
    log_b: Tensor,
    cost: Tensor,
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
    _check(log_a, log_b, cost)
    rows, n = log_a.shape
    device = log_a.device
    log_a, log_b = log_a.contiguous(), log_b.contiguous()
    f, g, own_a, own_b = torch.empty(4, rows, n, dtype=torch.float32, device=device)
    counts, converged = torch.empty(2, rows, dtype=torch.int32, device=device)
    error, change = torch.empty(2, rows, dtype=torch.float32, device=device)
    if rows:
        core, border = matrix_and_border(n)
        size = max(core, triton.next_power_of_2(n))
        scratch = torch.empty(rows, _ROWS.value, size, dtype=torch.float32, device=device)
        tau = 1.0 if math.isinf(rho) else rho / (rho + 1 / lam)
        full, window, enough, ceiling = relaxation_schedule(tau)
        panel = min(core, max(1, PANEL // core))
        held = HELD.get(core, 0) if n >= core else 0
        _kernel[(rows,)](
            cost,
            log_a,
            log_b,
            f,
            g,
            own_a,
            own_b,
            counts,
            converged,
            error,
            change,
            scratch,
            n,
            cost.stride(0),
            cost.stride(1),
            lam * _LOG2_E,
            lam * _LOG2_E,
            0.0 if math.isinf(rho) else 1 / (lam * rho),
            tau,
            full,
            window,
            enough,
            ceiling,
            LOG_TINY[torch.float32],
            iterations,
            tolerance,
            tolerance / 100 if cross else tolerance,
            math.log2(floor) if floor > 0 else 0.0,
            floor > 0,
            own,
            cross,
            core,
            border,
            size,
            panel,
            held,
            n >= core,
            num_warps=WARPS.get(core, 8),
        )
    return Solution(f, g, counts.long(), error, change, converged.bool()), own_a, own_b


def matrix_and_border(n: int) -> tuple[int, int]:
    """The power of two that ``n`` entries are worked on as, and how many entries are beyond it: 258 is (256, 2)."""
    core = triton.next_power_of_2(n)
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


@triton.jit
def _kernel(
    cost,
    log_a,
    log_b,
    out_f,
    out_g,
    out_own_a,
    out_own_b,
    out_count,
    out_converged,
    out_error,
    out_change,
    scratch,
    n,
    problem_stride,
    row_stride,
    k,
    same_k,
    inverse_lam_rho,
    tau,
    full,
    window,
    enough,
    ceiling,
    log_tiny,
    iterations,
    tolerance,
    own_tolerance,
    log_floor,
    FLOOR: tl.constexpr,
    OWN: tl.constexpr,
    CROSS: tl.constexpr,
    CORE: tl.constexpr,
    BORDER: tl.constexpr,
    SIZE: tl.constexpr,
    PANEL: tl.constexpr,
    HELD: tl.constexpr,
    EVEN: tl.constexpr,
):
    problem = tl.program_id(0).to(tl.int64)
    cost += problem * problem_stride
    scratch += problem * (_ROWS * SIZE)
    to_bits = 1.4426950408889634
    unit = 1.0 / k  # potentials in units of cost
    entry = tl.arange(0, SIZE)
    column = tl.arange(0, CORE)
    panel_row = tl.arange(0, PANEL)
    xs = scratch + 4 * SIZE
    ys = scratch + 5 * SIZE

    inside = entry < n
    a = tl.load(log_a + problem * n + entry, mask=inside, other=-float("inf"))
    b = tl.load(log_b + problem * n + entry, mask=inside, other=-float("inf"))
    real = (a != -float("inf")) | (b != -float("inf"))
    a = tl.where(real, tl.where(a < log_tiny, log_tiny, a) * to_bits, -float("inf"))
    b = tl.where(real, tl.where(b < log_tiny, log_tiny, b) * to_bits, -float("inf"))
    used = tl.max(tl.where(real & (entry < CORE), entry + 1, 0), axis=0)
    for remembered in tl.static_range(4):
        tl.store(scratch + remembered * SIZE + entry, tl.zeros([SIZE], tl.float32))

    if HELD > 0:
        held_row = tl.arange(0, HELD)
        held = tl.load(cost + held_row[:, None] * row_stride + column[None, :])

    f = tl.zeros([SIZE], tl.float32)
    g = tl.zeros([SIZE], tl.float32)
    own_a = tl.zeros([SIZE], tl.float32)
    weight = 2.0 / (2.0 + tau)
    alone = -tau / (1.0 + tau)  # the solution where nothing can be transported
    s = tl.where(real, a * alone, 0.0)
    if OWN > 0:
        phase = _SELF_A
        x = a + s
    elif CROSS == 2:
        phase = _TO_F
        g = tl.where(real, 0.0, -float("inf"))
        x = g
    else:
        phase = _TO_F
        x = b
    count = 0
    converged = 0
    error = float("inf")
    change = float("inf")
    residual = 0.0
    excess = full
    before = float("inf")
    first = 0.0
    strikes = 0
    omega = 1.0

    while phase != _DONE:
        # y = log2 sum_j 2^(x_j - k C_ij), shifted by what it was the last time in this phase.
        shift_row = phase
        if phase >= _LAST_G:
            shift_row = tl.where(phase == _LAST_F, _TO_F, _TO_G)
        shifts = scratch + shift_row * SIZE
        tl.store(xs + entry, x)
        tl.debug_barrier()
        x_columns = tl.load(xs + column)
        if BORDER > 0:
            x_first = tl.load(xs + CORE)
            x_second = tl.load(xs + CORE + 1)
        else:
            x_first = 0.0
            x_second = 0.0
        if HELD > 0:
            held_sums = _log_sums(
                held, held_row, x_columns, x_first, x_second, cost, xs, shifts, k, same_k, row_stride, CORE, BORDER
            )
            tl.store(ys + held_row, held_sums)
        for start in range(HELD, used, PANEL):
            row = start + panel_row
            if EVEN:
                c = tl.load(cost + row[:, None] * row_stride + column[None, :])
            else:
                c = tl.load(
                    cost + row[:, None] * row_stride + column[None, :],
                    mask=(row < n)[:, None] & (column < n)[None, :],
                    other=float("inf"),
                )
            sums = _log_sums(
                c, row, x_columns, x_first, x_second, cost, xs, shifts, k, same_k, row_stride, CORE, BORDER
            )
            tl.store(ys + row, sums)
        for extra in tl.static_range(BORDER):
            border = tl.load(cost + (CORE + extra) * row_stride + entry, mask=inside, other=float("inf"))
            t = x - k * border
            top = tl.max(t, axis=0)
            top = tl.where(top == -float("inf"), 0.0, top)
            tl.store(ys + CORE + extra, top + tl.log2(tl.sum(tl.exp2(t - top), axis=0)))
        tl.debug_barrier()
        y = tl.load(ys + entry, mask=real, other=0.0)
        tl.store(shifts + entry, y)

        # What it is for.
        if phase <= _SELF_B:
            step = tl.where(real, -tau * y - s, 0.0)
            change = tl.max(tl.abs(step), axis=0) * unit
            mass = tl.where(phase == _SELF_A, a, b)
            # Before the update, which shrinks it once more.
            gap = tl.exp2(mass - s * inverse_lam_rho) * (1.0 - tl.exp2(-step / tau))
            error = tl.sum(tl.abs(gap), axis=0)
            s += weight * step
            count += 1
            x = mass + s
            done = (own_tolerance > 0) & (change <= own_tolerance)
            if done | (count >= iterations):
                converged = done.to(tl.int32)
                if phase == _SELF_A:
                    own_a = s
                    if OWN == 2:
                        phase = _SELF_B
                        count = 0
                        s = tl.where(real, b * alone, 0.0)
                        x = b + s
                    else:
                        phase = _DONE
                else:
                    f = own_a
                    g = s
                    phase = _TO_F
                    count = 0
                    converged = 0
                    x = b + g
        elif CROSS == 2:
            if phase == _TO_F:
                # y is what log v reaches. One more plain update would move log u from f to a - y.
                if count > 0:
                    error = tl.sum(tl.where(real, tl.abs(tl.exp2(f + y) - tl.exp2(a)), 0.0), axis=0)
                    change = tl.max(tl.where(real, tl.abs(a - y - f), 0.0), axis=0) * unit
                    converged = ((tolerance > 0) & (error <= tolerance)).to(tl.int32)
                if (converged != 0) | (count >= iterations):
                    phase = _DONE
                else:
                    f = tl.where(real, a - _with_floor(y, log_floor, FLOOR), -float("inf"))
                    x = f
                    phase = _TO_G
            else:
                g = tl.where(real, b - _with_floor(y, log_floor, FLOOR), -float("inf"))
                x = g
                count += 1
                phase = _TO_F
        elif CROSS == 1:
            answer = tl.where(real, -tau * y, 0.0)
            if phase == _TO_F:
                step = answer - f
                residual = tl.max(tl.abs(step), axis=0)
                # The over-relaxation of `sinkhorn.Relaxation`, of this problem.
                first = tl.where(count < _RAMP, tl.maximum(first, residual), first)
                excess = tl.where(residual > ceiling * first, 0.0, excess)
                if (count > 0) & (count % window == 0):
                    stuck = residual > enough * before
                    strikes += stuck.to(tl.int32)
                    raised = tl.minimum(tl.where(strikes < _STRIKES, 1.5 * excess, excess), full)
                    excess = tl.where(stuck, excess * 0.5, raised)
                    before = residual
                omega = 1.0 + excess * tl.minimum(1.0, count * 1.0 / _RAMP)
                f += omega * step
                x = a + f
                phase = _TO_G
            elif phase == _TO_G:
                step = answer - g
                change = tl.maximum(residual, tl.max(tl.abs(step), axis=0)) * unit
                g += omega * step
                count += 1
                converged = ((tolerance > 0) & (change <= tolerance)).to(tl.int32)
                if (converged != 0) | (count >= iterations):
                    phase = _LAST_G
                    x = a + f
                else:
                    phase = _TO_F
                    x = b + g
            elif phase == _LAST_G:  # a plain sweep: f becomes the answer to g
                g = answer
                x = b + g
                phase = _LAST_F
            elif phase == _LAST_F:
                change = tl.max(tl.abs(answer - f), axis=0) * unit
                f = answer
                x = a + f
                phase = _ANSWER
            else:
                change = tl.maximum(change, tl.max(tl.abs(answer - g), axis=0) * unit)
                gap = tl.exp2(b - g * inverse_lam_rho) * (1.0 - tl.exp2((g - answer) / tau))
                error = tl.sum(tl.abs(gap), axis=0)
                phase = _DONE
        else:
            phase = _DONE

    if OWN > 0:
        tl.store(out_own_a + problem * n + entry, own_a * unit, mask=inside)
    if OWN > 1:
        tl.store(out_own_b + problem * n + entry, s * unit, mask=inside)
    if CROSS > 0:
        if CROSS == 2:
            f = tl.where(real, _with_floor(f, log_floor, FLOOR), 0.0)
            g = tl.where(real, _with_floor(g, log_floor, FLOOR), 0.0)
        tl.store(out_f + problem * n + entry, f * unit, mask=inside)
        tl.store(out_g + problem * n + entry, g * unit, mask=inside)
    tl.store(out_count + problem, count)
    tl.store(out_converged + problem, converged)
    tl.store(out_error + problem, error)
    tl.store(out_change + problem, change)


@triton.jit
def _log_sums(
    c,
    row,
    x,
    x_first,
    x_second,
    cost,
    xs,
    shifts,
    k,
    same_k,
    row_stride,
    CORE: tl.constexpr,
    BORDER: tl.constexpr,
):
    """``log2 sum_j 2^(x_j - k c_ij)`` of some rows of the cost, border included.

    ``k`` comes twice: the compiler, which does not know that both are the same, then computes the exponents of the rare
    second sum anew, instead of keeping those of the first in registers that it does not have.
    """
    shift = tl.load(shifts + row)
    sums = tl.sum(tl.exp2(x[None, :] - k * c - shift[:, None]), axis=1)
    if BORDER > 0:
        # The cost is symmetric: the border's rows are also its columns.
        t_first = x_first - k * tl.load(cost + CORE * row_stride + row)
        t_second = x_second - k * tl.load(cost + (CORE + 1) * row_stride + row)
        sums += tl.exp2(t_first - shift) + tl.exp2(t_second - shift)
    fine = ((sums > 8.7e-19) & (sums < 1.15e18)) | (tl.load(xs + row) == -float("inf"))
    if tl.min(fine.to(tl.int32), axis=0) == 0:
        t = x[None, :] - same_k * c
        shift = tl.max(t, axis=1)
        if BORDER > 0:
            shift = tl.maximum(shift, tl.maximum(t_first, t_second))
        shift = tl.where(shift == -float("inf"), 0.0, shift)
        sums = tl.sum(tl.exp2(t - shift[:, None]), axis=1)
        if BORDER > 0:
            sums += tl.exp2(t_first - shift) + tl.exp2(t_second - shift)
    return shift + tl.log2(sums)


@triton.jit
def _with_floor(x, log_floor, FLOOR: tl.constexpr):
    """``log2(2^x + floor)``."""
    if FLOOR:
        top = tl.maximum(x, log_floor)
        x = top + tl.log2(tl.exp2(x - top) + tl.exp2(log_floor - top))
    return x
