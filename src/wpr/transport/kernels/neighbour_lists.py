"""The finite costs of each problem as lists, so that a solver reads neighbours instead of a matrix.

Notation for shapes: ``P`` problems, ``n`` support entries, ``G = ceil(n / 64)`` groups of 64 entries, ``S`` slots.

Radii leave most pairs of a support without an edge: on SmolLM2 a token has 24 neighbours among 160. Entries are ordered
by how many neighbours they have, themselves included, and taken in groups of 64; padding has none and comes last. The
lists of a group are as long as its longest, which is its first, rounded up to 16; the rest of a list is filled with
infinite costs.

    slot of the d-th neighbour of entry r  =  first[r // 64] + (r % 64) width[r // 64] + d        r: place in the order

A problem whose lists would not fit, because nearly all of its pairs have an edge, is marked as dense and left to the
solver that reads the matrix. Nothing waits for the host.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 64
"""Entries whose lists are of one length."""

STEP = 16
"""Lengths are multiples of this, so that a thread reads four neighbours at a time."""

WRITE_COLUMNS, WRITE_WARPS = 16, 4
"""Of a group's costs, the columns that are turned into lists in one step: few, so that many programs run beside each
other and hide the time that their scattered stores take.
"""

CAPACITY = 1.0
"""Slots of a problem, in units of ``64 n``: beyond that lists are read hardly faster than the matrix."""


@dataclass(frozen=True)
class NeighbourLists:
    """The lists of ``P`` problems.

    count: ``(P, 64 G)`` neighbours of each entry, itself included; 0 for padding.
    order: ``(P, 64 G)`` the entries by falling count.
    first, width: ``(P, G)`` the first slot of each group, and the length of its lists.
    index: ``(P, S)`` a neighbour's place in the order. cost: ``(P, S)`` the cost to it.
    dense: ``(P,)`` 1 where the lists did not fit.
    """

    count: Tensor
    order: Tensor
    first: Tensor
    width: Tensor
    index: Tensor
    cost: Tensor
    dense: Tensor


def neighbour_lists(log_a: Tensor, log_b: Tensor, cost: Tensor) -> NeighbourLists:
    """Lists of the finite costs ``(P, n, n)`` among entries that have mass in one of two distributions ``(P, n)``."""
    rows, n = log_a.shape
    log_a, log_b = log_a.contiguous(), log_b.contiguous()
    groups = triton.cdiv(n, GROUP)
    slots = GROUP * STEP * round(CAPACITY * n / STEP + 0.5)
    device = log_a.device
    # Each a tensor of its own: they start at a multiple of 16 bytes, which the compiler may rely on.
    count, order, rank = (torch.empty(rows, groups * GROUP, dtype=torch.int32, device=device) for _ in range(3))
    first, width = (torch.empty(rows, groups, dtype=torch.int32, device=device) for _ in range(2))
    index = torch.empty(rows, slots, dtype=torch.int16, device=device)
    listed = torch.empty(rows, slots, dtype=torch.float32, device=device)
    dense = torch.empty(rows, dtype=torch.int32, device=device)
    if rows:
        grid = (rows * groups,)
        strides = n, cost.stride(0), cost.stride(1), groups
        _count_kernel[grid](cost, log_a, log_b, count, *strides, GROUP, num_warps=4)
        _order_kernel[(rows,)](count, order, rank, first, width, dense, slots, groups, GROUP, STEP, num_warps=4)
        _write_kernel[grid](
            cost,
            log_a,
            log_b,
            order,
            rank,
            first,
            width,
            dense,
            index,
            listed,
            slots,
            *strides,
            GROUP,
            STEP,
            WRITE_COLUMNS,
            num_warps=WRITE_WARPS,
        )
    return NeighbourLists(count, order, first, width, index, listed, dense)


@triton.jit(do_not_specialize=["log_a", "log_b"])
def _count_kernel(cost, log_a, log_b, count, n, problem_stride, row_stride, groups, T: tl.constexpr):
    problem = (tl.program_id(0) // groups).to(tl.int64)
    cost += problem * problem_stride
    log_a += problem * n
    log_b += problem * n
    i = tl.program_id(0) % groups * T + tl.arange(0, T)
    real_i = _has_mass(log_a, log_b, i, n)
    found = tl.zeros([T], tl.int32)
    if tl.max(real_i.to(tl.int32), axis=0) != 0:
        for other in range(groups):
            j = other * T + tl.arange(0, T)
            real_j = _has_mass(log_a, log_b, j, n)
            if tl.max(real_j.to(tl.int32), axis=0) != 0:
                found += tl.sum((_tile(cost, i, j, real_i, real_j, row_stride) < float("inf")).to(tl.int32), axis=1)
    tl.store(count + problem * groups * T + i, found)


@triton.jit
def _order_kernel(
    count, order, rank, out_first, out_width, out_dense, slots, groups, T: tl.constexpr, STEP: tl.constexpr
):
    problem = tl.program_id(0).to(tl.int64)
    count += problem * groups * T
    order += problem * groups * T
    rank += problem * groups * T
    out_first += problem * groups
    out_width += problem * groups
    for group in range(groups):
        i = group * T + tl.arange(0, T)
        own = tl.load(count + i)
        place = tl.zeros([T], tl.int32)
        for other in range(groups):
            j = other * T + tl.arange(0, T)
            theirs = tl.load(count + j)
            before = (theirs[None, :] > own[:, None]) | ((theirs[None, :] == own[:, None]) & (j[None, :] < i[:, None]))
            place += tl.sum(before.to(tl.int32), axis=1)
        tl.store(rank + i, place)
        tl.store(order + place, i)
    tl.debug_barrier()
    start = 0
    for group in range(groups):
        longest = tl.load(count + tl.load(order + group * T))
        width = (longest + STEP - 1) // STEP * STEP
        tl.store(out_first + group, start)
        tl.store(out_width + group, width)
        start += T * width
    tl.store(out_dense + problem, (start > slots).to(tl.int32))


@triton.jit(do_not_specialize=["log_a", "log_b"])
def _write_kernel(
    cost,
    log_a,
    log_b,
    order,
    rank,
    first,
    width,
    dense,
    out_index,
    out_cost,
    slots,
    n,
    problem_stride,
    row_stride,
    groups,
    T: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    problem = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    own_width = tl.load(width + problem * groups + group)
    if (own_width > 0) & (tl.load(dense + problem) == 0):
        cost += problem * problem_stride
        log_a += problem * n
        log_b += problem * n
        out_index += problem * slots
        out_cost += problem * slots
        place = tl.arange(0, T)
        i = tl.load(order + problem * groups * T + group * T + place)
        real_i = _has_mass(log_a, log_b, i, n)
        start = tl.load(first + problem * groups + group) + place * own_width
        seen = tl.zeros([T], tl.int32)
        for begin in range(0, n, COLUMNS):
            j = begin + tl.arange(0, COLUMNS)
            real_j = _has_mass(log_a, log_b, j, n)
            if tl.max(real_j.to(tl.int32), axis=0) != 0:
                c = _tile(cost, i, j, real_i, real_j, row_stride)
                edge = c < float("inf")
                number = edge.to(tl.int32)
                slot = start[:, None] + seen[:, None] + tl.cumsum(number, 1) - number
                rank_j = tl.load(rank + problem * groups * T + j).to(tl.int16)
                tl.store(out_index + slot, tl.broadcast_to(rank_j[None, :], (T, COLUMNS)), mask=edge)
                tl.store(out_cost + slot, c, mask=edge)
                seen += tl.sum(number, axis=1)
        for begin in range(0, own_width, STEP):
            d = begin + tl.arange(0, STEP)
            slot = start[:, None] + d[None, :]
            beyond = d[None, :] >= seen[:, None]
            tl.store(out_index + slot, tl.zeros([T, STEP], tl.int16), mask=beyond)
            tl.store(out_cost + slot, tl.full([T, STEP], float("inf"), tl.float32), mask=beyond)


@triton.jit
def _has_mass(log_a, log_b, i, n):
    a = tl.load(log_a + i, mask=i < n, other=-float("inf"))
    b = tl.load(log_b + i, mask=i < n, other=-float("inf"))
    return (a != -float("inf")) | (b != -float("inf"))


@triton.jit
def _tile(cost, i, j, real_i, real_j, row_stride):
    mask = real_i[:, None] & real_j[None, :]
    return tl.load(cost + i[:, None] * row_stride + j[None, :], mask=mask, other=float("inf"))
