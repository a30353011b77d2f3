"""The iterations of all solvers: one program solves one problem, start to end.

Notation for shapes: ``P`` problems, ``n`` support entries. Everything is in the log domain to base 2, potentials
multiplied by lam included, so that one operation is left:

    y_i  =  log2 sum_j 2^( x_j - k C_ij ),        k = lam / log 2

It appears once in the program: a loop whose *phase* says which x comes next and what y is for. So the instructions fit
the cache, and any solver is a list of phases. A program stops when its own problem is done.

The sum needs a shift near its largest term to be safe. That is the last y of the same phase, which after the first
iterations differs little; where it does not serve (the sum is beyond 2^60 either way), the largest term is looked up.
So there is one exponential an entry and a search for the maximum only in the beginning: as exact as the log domain, for
every cost.

Two ways to the sums. Usually costs are read as `neighbour_lists`, and the program works in their order. Problems that
are marked as dense read the matrix, in panels of rows; supports of 2^m + 2 entries, which n = 258 is, are a matrix of
2^m and a border of two entries. The kernel is launched once for each way, and a program without work ends at once.

Vectors that all threads need go through a few rows of memory that belong to the program, with barriers between.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from wpr.transport.sinkhorn import RAMP, STRIKES

# The phases of the kernel. The first four are also the rows in which it remembers its last results.
_SELF_A, _SELF_B, _TO_F, _TO_G, _LAST_G, _LAST_F, _ANSWER, _DONE = (tl.constexpr(i) for i in range(8))
SCRATCH_ROWS = tl.constexpr(6)
_RAMP, _STRIKES = tl.constexpr(RAMP), tl.constexpr(STRIKES)
_LEAST, _MOST = tl.constexpr(8.7e-19), tl.constexpr(1.15e18)
"""2^-60 and 2^60."""


@triton.jit(do_not_specialize=["group_width", "log_a", "log_b", "out_g", "out_own_a", "out_own_b", "out_change"])
def iterate(
    cost,
    order,
    group_first,
    group_width,
    list_index,
    list_cost,
    is_dense,
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
    slots,
    groups,
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
    LISTS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    CORE: tl.constexpr,
    BORDER: tl.constexpr,
    PANEL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """OWN: how many self-transports come first. CROSS: 0 none, 1 unbalanced, 2 balanced."""
    problem = tl.program_id(0).to(tl.int64)
    mine = tl.load(is_dense + problem) == 0 if LISTS else tl.load(is_dense + problem) != 0
    scratch += problem * (SCRATCH_ROWS * SIZE)
    xs = scratch + 4 * SIZE
    ys = scratch + 5 * SIZE
    to_bits = 1.4426950408889634
    unit = 1.0 / k  # potentials in units of cost
    place = tl.arange(0, SIZE)
    if LISTS:
        order += problem * groups * GROUP
        group_first += problem * groups
        group_width += problem * groups
        list_index += problem * slots
        list_cost += problem * slots
        entry = tl.load(order + place, mask=place < groups * GROUP, other=n)
    else:
        cost += problem * problem_stride
        entry = place

    inside = entry < tl.where(mine, n, 0)
    a = tl.load(log_a + problem * n + entry, mask=inside, other=-float("inf"))
    b = tl.load(log_b + problem * n + entry, mask=inside, other=-float("inf"))
    real = (a != -float("inf")) | (b != -float("inf"))
    a = tl.where(real, tl.where(a < log_tiny, log_tiny, a) * to_bits, -float("inf"))
    b = tl.where(real, tl.where(b < log_tiny, log_tiny, b) * to_bits, -float("inf"))
    if LISTS:
        used = tl.max(tl.where(real, place + 1, 0), axis=0)
    else:
        used = tl.max(tl.where(real & (place < CORE), place + 1, 0), axis=0)
    for remembered in tl.static_range(4):
        tl.store(scratch + remembered * SIZE + place, tl.zeros([SIZE], tl.float32))

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

    if mine == 0:
        phase = _DONE

    while phase != _DONE:
        # y = log2 sum_j 2^(x_j - k C_ij), shifted by what it was the last time in this phase.
        shift_row = phase
        if phase >= _LAST_G:
            shift_row = tl.where(phase == _LAST_F, _TO_F, _TO_G)
        shifts = scratch + shift_row * SIZE
        if LISTS:
            tl.debug_barrier()
            for group in range(0, used, GROUP):
                _group_sums(
                    group, group_first, group_width, list_index, list_cost, x, shifts, ys, k, GROUP, DEPTH, False
                )  # fmt: skip
            tl.debug_barrier()
            sums = tl.load(ys + place, mask=real, other=1.0)
            y = tl.load(shifts + place) + tl.log2(sums)
            if tl.min(((sums > _LEAST) & (sums < _MOST)).to(tl.int32), axis=0) == 0:
                tl.debug_barrier()
                for group in range(0, used, GROUP):
                    _group_sums(
                        group, group_first, group_width, list_index, list_cost, x, shifts, ys, k, GROUP, DEPTH, True
                    )  # fmt: skip
                tl.debug_barrier()
                y = tl.load(ys + place, mask=real, other=0.0)
        else:
            tl.store(xs + place, x)
            tl.debug_barrier()
            _matrix_sums(cost, x, xs, shifts, ys, used, n, k, same_k, row_stride, SIZE, CORE, BORDER, PANEL, EVEN)
            tl.debug_barrier()
            y = tl.load(ys + place, mask=real, other=0.0)
        y = tl.where(real, y, 0.0)
        tl.store(shifts + place, y)

        # What it is for.
        if phase <= _SELF_B:
            step = tl.where(real, -tau * y - s, 0.0)
            change = tl.max(tl.abs(step), axis=0) * unit
            mass = tl.where(phase == _SELF_A, a, b)
            at_rest = s
            s += weight * step
            count += 1
            x = mass + s
            done = (own_tolerance > 0) & (change <= own_tolerance)
            if done | (count >= iterations):
                converged = done.to(tl.int32)
                # Before the update, which shrinks it once more.
                gap = tl.exp2(mass - at_rest * inverse_lam_rho) * (1.0 - tl.exp2(-step / tau))
                error = tl.sum(tl.abs(gap), axis=0)
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
                if (count > 0) & ((tolerance > 0) | (count >= iterations)):
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
    if mine:
        tl.store(out_count + problem, count)
        tl.store(out_converged + problem, converged != 0)
        tl.store(out_error + problem, error)
        tl.store(out_change + problem, change)


@triton.jit
def _group_sums(
    start,
    group_first,
    group_width,
    list_index,
    list_cost,
    x,
    shifts,
    ys,
    k,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    SAFE: tl.constexpr,
):
    """Write ``sum_j 2^(x_j - k c_ij - shift_i)`` of a group's entries; or if ``SAFE`` its logarithm, shift included,
    with the largest exponent as the shift.
    """
    member = tl.arange(0, GROUP)
    first = tl.multiple_of(tl.load(group_first + start // GROUP), 16)
    width = tl.multiple_of(tl.load(group_width + start // GROUP), 16)
    slot = first + member[:, None] * width + tl.arange(0, DEPTH)[None, :]
    if SAFE:
        tops = tl.full([GROUP, DEPTH], -float("inf"), tl.float32)
        for beyond in range(0, width, DEPTH):
            tops = tl.maximum(tops, _exponents(slot + beyond, list_index, list_cost, x, k, GROUP, DEPTH))
        shift = tl.max(tops, axis=1)
        shift = tl.where(shift == -float("inf"), 0.0, shift)
    else:
        shift = tl.load(shifts + start + member)
    sums = tl.zeros([GROUP, DEPTH], tl.float32)
    for beyond in range(0, width, DEPTH):
        t = _exponents(slot + beyond, list_index, list_cost, x, k, GROUP, DEPTH)
        sums += tl.exp2(t - shift[:, None])
    total = tl.sum(sums, axis=1)
    if SAFE:
        total = shift + tl.log2(total)
    tl.store(ys + start + member, total)


@triton.jit
def _exponents(slot, list_index, list_cost, x, k, GROUP: tl.constexpr, DEPTH: tl.constexpr):
    """``x_j - k c_ij`` of some neighbours of a group's entries; -inf beyond the end of a list. Looking x up in shared
    memory (`tl.gather`) takes two thirds of the time of looking it up in global memory.
    """
    j = tl.reshape(tl.load(list_index + slot).to(tl.int32), [GROUP * DEPTH])
    return tl.reshape(tl.gather(x, j, 0), [GROUP, DEPTH]) - k * tl.load(list_cost + slot)


@triton.jit
def _matrix_sums(
    cost,
    x,
    xs,
    shifts,
    ys,
    used,
    n,
    k,
    same_k,
    row_stride,
    SIZE: tl.constexpr,
    CORE: tl.constexpr,
    BORDER: tl.constexpr,
    PANEL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Write ``log2 sum_j 2^(x_j - k c_ij)`` of all entries, from the matrix."""
    column = tl.arange(0, CORE)
    x_columns = tl.load(xs + column)
    if BORDER > 0:
        x_first = tl.load(xs + CORE)
        x_second = tl.load(xs + CORE + 1)
    else:
        x_first = 0.0
        x_second = 0.0
    there = (x_columns != -float("inf"))[None, :]  # a cost that is not there may be anything
    for start in range(0, used, PANEL):
        row = start + tl.arange(0, PANEL)
        if EVEN:
            c = tl.load(cost + row[:, None] * row_stride + column[None, :], mask=there, other=float("inf"))
        else:
            inside = (row < n)[:, None] & (column < n)[None, :]
            c = tl.load(cost + row[:, None] * row_stride + column[None, :], mask=there & inside, other=float("inf"))
        sums = _log_sums(c, row, x_columns, x_first, x_second, cost, xs, shifts, k, same_k, row_stride, CORE, BORDER)
        tl.store(ys + row, sums)
    for extra in tl.static_range(BORDER):
        entry = tl.arange(0, SIZE)
        there = (entry < n) & (x != -float("inf"))
        border = tl.load(cost + (CORE + extra) * row_stride + entry, mask=there, other=float("inf"))
        t = x - k * border
        top = tl.max(t, axis=0)
        top = tl.where(top == -float("inf"), 0.0, top)
        tl.store(ys + CORE + extra, top + tl.log2(tl.sum(tl.exp2(t - top), axis=0)))


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
        t_first = tl.where(x_first == -float("inf"), x_first, x_first - k * tl.load(cost + CORE * row_stride + row))
        t_second = x_second - k * tl.load(cost + (CORE + 1) * row_stride + row)
        t_second = tl.where(x_second == -float("inf"), x_second, t_second)
        sums += tl.exp2(t_first - shift) + tl.exp2(t_second - shift)
    fine = ((sums > _LEAST) & (sums < _MOST)) | (tl.load(xs + row) == -float("inf"))
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
