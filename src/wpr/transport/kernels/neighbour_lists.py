"""The finite costs of each problem as lists, so that a solver reads neighbours instead of a matrix.

Notation for shapes: ``P`` problems, ``n`` support entries, ``T = 64`` entries of a group.

Radii leave most pairs of a support without an edge: on SmolLM2 a token has 24 neighbours among 160. Entries are ordered
by how many neighbours they have, themselves included, and taken in groups of 64; padding has none and comes last. A
group's lists are as long as its longest, which is its first, and stand side by side:

    slot of the d-th neighbour of entry r  =  first[r // 64] + 64 d + r % 64            r: place in the order

Places beyond a list's end are never read. A problem whose lists would not fit, because nearly all of its pairs have an
edge, is marked as dense and left to the solver that reads the matrix. Nothing waits for the host.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 64
"""Entries whose lists stand side by side."""

CAPACITY = 1.5
"""Slots of a problem, in units of ``64 n``: beyond that a list is read no faster than the matrix."""


@dataclass(frozen=True)
class NeighbourLists:
    """Lists of ``P`` problems; ``G = ceil(n / 64)`` groups, ``S`` slots.

    order: ``(P, 64 G)`` the entries by falling number of neighbours. degree: ``(P, 64 G)`` that number, in this order.
    first: ``(P, G)`` the first slot of each group. index: ``(P, S)`` a neighbour's place in the order. cost: ``(P, S)``.
    dense: ``(P,)`` 1 where the lists did not fit.
    """

    order: Tensor
    degree: Tensor
    first: Tensor
    index: Tensor
    cost: Tensor
    dense: Tensor


def neighbour_lists(log_a: Tensor, log_b: Tensor, cost: Tensor) -> NeighbourLists:
    """Lists of the finite costs ``(P, n, n)`` among entries that have mass in one of two distributions ``(P, n)``."""
    rows, n = log_a.shape
    groups = triton.cdiv(n, GROUP)
    slots = GROUP * round(CAPACITY * n)
    device = log_a.device
    numbers = torch.empty(4, rows, groups * GROUP, dtype=torch.int32, device=device)
    lists = NeighbourLists(
        order=numbers[0],
        degree=numbers[1],
        first=torch.empty(rows, groups, dtype=torch.int32, device=device),
        index=torch.empty(rows, slots, dtype=torch.int16, device=device),
        cost=torch.empty(rows, slots, dtype=torch.float32, device=device),
        dense=torch.empty(rows, dtype=torch.int32, device=device),
    )
    if rows:
        _lists_kernel[(rows,)](
            cost,
            log_a,
            log_b,
            lists.order,
            lists.degree,
            lists.first,
            lists.index,
            lists.cost,
            lists.dense,
            numbers[2],
            numbers[3],
            n,
            cost.stride(0),
            cost.stride(1),
            slots,
            groups,
            GROUP,
            num_warps=8,
        )
    return lists


@triton.jit
def _lists_kernel(
    cost,
    log_a,
    log_b,
    out_order,
    out_degree,
    out_first,
    out_index,
    out_cost,
    out_dense,
    degrees,
    ranks,
    n,
    problem_stride,
    row_stride,
    slots,
    groups,
    T: tl.constexpr,
):
    problem = tl.program_id(0).to(tl.int64)
    cost += problem * problem_stride
    log_a += problem * n
    log_b += problem * n
    padded = groups * T
    out_order += problem * padded
    out_degree += problem * padded
    out_first += problem * groups
    out_index += problem * slots
    out_cost += problem * slots
    degrees += problem * padded
    ranks += problem * padded
    member = tl.arange(0, T)

    for group in range(groups):
        i = group * T + member
        real_i = _has_mass(log_a, log_b, i, n)
        found = tl.zeros([T], tl.int32)
        if tl.max(real_i.to(tl.int32), axis=0) != 0:
            for other in range(groups):
                j = other * T + member
                real_j = _has_mass(log_a, log_b, j, n)
                if tl.max(real_j.to(tl.int32), axis=0) != 0:
                    c = _tile(cost, i, j, real_i, real_j, row_stride)
                    found += tl.sum((c < float("inf")).to(tl.int32), axis=1)
        tl.store(degrees + i, found)
    tl.debug_barrier()

    for group in range(groups):
        i = group * T + member
        own = tl.load(degrees + i)
        rank = tl.zeros([T], tl.int32)
        for other in range(groups):
            j = other * T + member
            theirs = tl.load(degrees + j)
            before = (theirs[None, :] > own[:, None]) | ((theirs[None, :] == own[:, None]) & (j[None, :] < i[:, None]))
            rank += tl.sum(before.to(tl.int32), axis=1)
        tl.store(ranks + i, rank)
        tl.store(out_order + rank, i)
        tl.store(out_degree + rank, own)
    tl.debug_barrier()

    start = 0
    for group in range(groups):
        tl.store(out_first + group, start)
        start += T * tl.load(out_degree + group * T)
    fits = start <= slots
    tl.store(out_dense + problem, (start > slots).to(tl.int32))
    tl.debug_barrier()

    if fits:
        for group in range(groups):
            i = group * T + member
            real_i = _has_mass(log_a, log_b, i, n)
            if tl.max(real_i.to(tl.int32), axis=0) != 0:
                rank_i = tl.load(ranks + i)
                place = tl.load(out_first + rank_i // T) + rank_i % T
                seen = tl.zeros([T], tl.int32)
                for other in range(groups):
                    j = other * T + member
                    real_j = _has_mass(log_a, log_b, j, n)
                    if tl.max(real_j.to(tl.int32), axis=0) != 0:
                        c = _tile(cost, i, j, real_i, real_j, row_stride)
                        edge = c < float("inf")
                        count = edge.to(tl.int32)
                        slot = place[:, None] + T * (seen[:, None] + tl.cumsum(count, 1) - count)
                        rank_j = tl.load(ranks + j).to(tl.int16)
                        tl.store(out_index + slot, tl.broadcast_to(rank_j[None, :], (T, T)), mask=edge)
                        tl.store(out_cost + slot, c, mask=edge)
                        seen += tl.sum(count, axis=1)


@triton.jit
def _has_mass(log_a, log_b, i, n):
    a = tl.load(log_a + i, mask=i < n, other=-float("inf"))
    b = tl.load(log_b + i, mask=i < n, other=-float("inf"))
    return (a != -float("inf")) | (b != -float("inf"))


@triton.jit
def _tile(cost, i, j, real_i, real_j, row_stride):
    mask = real_i[:, None] & real_j[None, :]
    return tl.load(cost + i[:, None] * row_stride + j[None, :], mask=mask, other=float("inf"))
