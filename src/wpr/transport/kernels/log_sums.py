"""The one operation of all solvers on a GPU: sums of exponentials over a problem's costs.

    y_i  =  log2 sum_j 2^( x_j - k C_ij ),        k = lam / log 2

The sum needs a shift near its largest term to be safe. That is the last y of the same kind, which after the first
iterations differs little; where it does not serve (the sum is beyond 2^60 either way), the largest term is looked up.
So there is one exponential an entry and a search for the maximum only in the beginning: as exact as the log domain, for
every cost.

Two ways to the sums. Usually costs are read as `neighbour_lists`, and the program works in their order. Problems that
are marked as dense read the matrix, in panels of rows; supports of 2^m + 2 entries, which n = 258 is, are a matrix of
2^m and a border of two entries.

Vectors that all threads need go through two rows of memory that belong to the program, with barriers between.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

_LEAST, _MOST = tl.constexpr(8.7e-19), tl.constexpr(1.15e18)
"""2^-60 and 2^60."""


class Lists(NamedTuple):
    """The costs as `neighbour_lists`: see `NeighbourLists` for the tensors, ``G`` groups and ``S`` slots."""

    order: Any
    first: Any
    width: Any
    index: Any
    cost: Any
    dense: Any
    groups: Any
    slots: Any


@triton.jit
def lists_of(lists, problem, GROUP: tl.constexpr):
    """The lists of one problem."""
    return Lists(
        lists.order + problem * lists.groups * GROUP,
        lists.first + problem * lists.groups,
        lists.width + problem * lists.groups,
        lists.index + problem * lists.slots,
        lists.cost + problem * lists.slots,
        lists.dense + problem,
        lists.groups,
        lists.slots,
    )


@triton.jit
def list_log_sums(
    lists, x, shifts, vectors, real, used, k, SIZE: tl.constexpr, GROUP: tl.constexpr, DEPTH: tl.constexpr
):
    """``log2 sum_j 2^(x_j - k c_ij)`` of all entries, from the lists; 0 where there is none."""
    place = tl.arange(0, SIZE)
    ys = vectors + SIZE
    tl.debug_barrier()
    for group in range(0, used, GROUP):
        _group_sums(group, lists, x, shifts, ys, k, GROUP, DEPTH, False)
    tl.debug_barrier()
    sums = tl.load(ys + place, mask=real, other=1.0)
    y = tl.load(shifts + place) + tl.log2(sums)
    if tl.min(((sums > _LEAST) & (sums < _MOST)).to(tl.int32), axis=0) == 0:
        tl.debug_barrier()
        for group in range(0, used, GROUP):
            _group_sums(group, lists, x, shifts, ys, k, GROUP, DEPTH, True)
        tl.debug_barrier()
        y = tl.load(ys + place, mask=real, other=0.0)
    return tl.where(real, y, 0.0)


@triton.jit
def _group_sums(start, lists, x, shifts, ys, k, GROUP: tl.constexpr, DEPTH: tl.constexpr, SAFE: tl.constexpr):
    """Write ``sum_j 2^(x_j - k c_ij - shift_i)`` of a group's entries; or if ``SAFE`` its logarithm, shift included,
    with the largest exponent as the shift.
    """
    member = tl.arange(0, GROUP)
    first = tl.multiple_of(tl.load(lists.first + start // GROUP), 16)
    width = tl.multiple_of(tl.load(lists.width + start // GROUP), 16)
    slot = first + member[:, None] * width + tl.arange(0, DEPTH)[None, :]
    if SAFE:
        tops = tl.full([GROUP, DEPTH], -float("inf"), tl.float32)
        for beyond in range(0, width, DEPTH):
            tops = tl.maximum(tops, _exponents(slot + beyond, lists, x, k, GROUP, DEPTH))
        shift = tl.max(tops, axis=1)
        shift = tl.where(shift == -float("inf"), 0.0, shift)
    else:
        shift = tl.load(shifts + start + member)
    sums = tl.zeros([GROUP, DEPTH], tl.float32)
    for beyond in range(0, width, DEPTH):
        t = _exponents(slot + beyond, lists, x, k, GROUP, DEPTH)
        sums += tl.exp2(t - shift[:, None])
    total = tl.sum(sums, axis=1)
    if SAFE:
        total = shift + tl.log2(total)
    tl.store(ys + start + member, total)


@triton.jit
def _exponents(slot, lists, x, k, GROUP: tl.constexpr, DEPTH: tl.constexpr):
    """``x_j - k c_ij`` of some neighbours of a group's entries; -inf beyond the end of a list. Looking x up in shared
    memory (`tl.gather`) takes two thirds of the time of looking it up in global memory.
    """
    j = tl.reshape(tl.load(lists.index + slot).to(tl.int32), [GROUP * DEPTH])
    return tl.reshape(tl.gather(x, j, 0), [GROUP, DEPTH]) - k * tl.load(lists.cost + slot)


@triton.jit
def matrix_log_sums(
    cost,
    row_stride,
    x,
    shifts,
    vectors,
    real,
    used,
    n,
    k,
    same_k,
    SIZE: tl.constexpr,
    CORE: tl.constexpr,
    BORDER: tl.constexpr,
    PANEL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """``log2 sum_j 2^(x_j - k c_ij)`` of all entries, from the matrix; 0 where there is none."""
    entry = tl.arange(0, SIZE)
    xs = vectors
    ys = vectors + SIZE
    tl.store(xs + entry, x)
    tl.debug_barrier()
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
        sums = _row_log_sums(
            c, row, x_columns, x_first, x_second, cost, xs, shifts, k, same_k, row_stride, CORE, BORDER
        )
        tl.store(ys + row, sums)
    for extra in tl.static_range(BORDER):
        there = (entry < n) & (x != -float("inf"))
        border = tl.load(cost + (CORE + extra) * row_stride + entry, mask=there, other=float("inf"))
        t = x - k * border
        top = tl.max(t, axis=0)
        top = tl.where(top == -float("inf"), 0.0, top)
        tl.store(ys + CORE + extra, top + tl.log2(tl.sum(tl.exp2(t - top), axis=0)))
    tl.debug_barrier()
    return tl.where(real, tl.load(ys + entry, mask=real, other=0.0), 0.0)


@triton.jit
def _row_log_sums(
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
    second sum again, instead of keeping those of the first in registers that it does not have.
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
