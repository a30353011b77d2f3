"""The finite costs of each problem as lists, so that a solver reads neighbours instead of a matrix.

Notation for shapes: ``P`` problems, ``n`` support entries, ``G = ceil(n / 64)`` groups of 64 entries, ``S`` slots.

Radii leave most pairs of a support without an edge: on SmolLM2 a token has 24 neighbours among 160. Entries are ordered
by how many neighbours they have, themselves included, in steps of 16, and taken in groups of 64; padding has none and
comes last. The lists of a group are as long as its longest, rounded up to 16; the rest of a list is filled with
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

from wpr.transport.kernels import cdiv, next_power_of_2

GROUP = 64
"""Entries whose lists are of one length."""

STEP = 16
"""Lengths are multiples of this, so that a thread reads four neighbours at a time."""

WORD = 32
"""Bits of a word, in which neighbours are marked before they are listed."""

UNROLL = 3
"""Words that are read at once when lists are written. All of them would leave too few registers."""

CAPACITY = 1.0
"""Slots of a problem, in units of ``64 n``: beyond that lists are read hardly faster than the matrix."""


@dataclass(frozen=True)
class NeighbourLists:
    """The lists of ``P`` problems.

    count: ``(P, 64 G)`` neighbours of each entry, itself included; 0 for padding.
    order: ``(P, 64 G)`` the entries by falling count, of which 16 make a step; in a step as they come.
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
    groups = cdiv(n, GROUP)
    slots = GROUP * STEP * round(CAPACITY * n / STEP + 0.5)
    device = log_a.device
    # Each a tensor of its own: they start at a multiple of 16 bytes, which the compiler may rely on.
    count, order, rank = (torch.empty(rows, groups * GROUP, dtype=torch.int32, device=device) for _ in range(3))
    first, width = (torch.empty(rows, groups, dtype=torch.int32, device=device) for _ in range(2))
    index = torch.empty(rows, slots, dtype=torch.int16, device=device)
    listed = torch.empty(rows, slots, dtype=torch.float32, device=device)
    dense = torch.empty(rows, dtype=torch.int32, device=device)
    if rows:
        words = cdiv(n, WORD)
        edges = torch.empty(rows, words, groups * GROUP, dtype=torch.int32, device=device)
        grid = (rows * groups,)
        strides = n, cost.stride(0), cost.stride(1), groups
        _count_kernel[grid](cost, log_a, log_b, count, edges, *strides, words, GROUP, WORD, num_warps=4)
        size = next_power_of_2(groups * GROUP)
        _order_kernel[(rows,)](count, order, rank, first, width, dense, slots, groups, size, GROUP, STEP, num_warps=4)
        _write_kernel[grid](
            cost, edges, count, order, rank, first, width, dense, index, listed, slots, *strides, words, GROUP, STEP,
            WORD, UNROLL, num_warps=4,
        )  # fmt: skip
    return NeighbourLists(count, order, first, width, index, listed, dense)


@triton.jit(do_not_specialize=["log_a", "log_b"])
def _count_kernel(
    cost,
    log_a,
    log_b,
    count,
    edges,
    n,
    problem_stride,
    row_stride,
    groups,
    WORDS: tl.constexpr,
    T: tl.constexpr,
    WORD: tl.constexpr,
):
    """Of each entry, which others are neighbours, a bit each, and how many."""
    problem = (tl.program_id(0) // groups).to(tl.int64)
    cost += problem * problem_stride
    log_a += problem * n
    log_b += problem * n
    i = tl.program_id(0) % groups * T + tl.arange(0, T)
    edges += problem * WORDS * groups * T + i
    real_i = _has_mass(log_a, log_b, i, n)
    found = tl.zeros([T], tl.int32)
    if tl.max(real_i.to(tl.int32), axis=0) != 0:
        for word in range(WORDS):
            j = word * WORD + tl.arange(0, WORD)
            mask = real_i[:, None] & _has_mass(log_a, log_b, j, n)[None, :]
            c = tl.load(cost + i[:, None] * row_stride + j[None, :], mask=mask, other=float("inf"))
            bits = tl.sum((c < float("inf")).to(tl.int32) << tl.arange(0, WORD)[None, :], axis=1)
            tl.store(edges + word * groups * T, bits)
            found += _bits_set(bits.to(tl.uint32, bitcast=True))
    tl.store(count + problem * groups * T + i, found)


@triton.jit
def _order_kernel(
    count,
    order,
    rank,
    out_first,
    out_width,
    out_dense,
    slots,
    groups,
    SIZE: tl.constexpr,
    T: tl.constexpr,
    STEP: tl.constexpr,
):
    problem = tl.program_id(0).to(tl.int64)
    count += problem * groups * T
    order += problem * groups * T
    rank += problem * groups * T
    out_first += problem * groups
    out_width += problem * groups
    i = tl.arange(0, SIZE)
    inside = i < groups * T
    steps = tl.where(inside, (tl.load(count + i, mask=inside, other=0) + STEP - 1) // STEP, -1)
    place = tl.zeros([SIZE], tl.int32)
    begin = 0
    level = tl.max(steps, axis=0)
    while level >= 0:
        here = (steps == level).to(tl.int32)
        place += here * (begin + tl.cumsum(here, 0) - 1)
        begin += tl.sum(here, axis=0)
        level -= 1
    tl.store(rank + i, place, mask=inside)
    tl.store(order + place, i, mask=inside)
    tl.debug_barrier()
    start = 0
    for group in range(groups):
        longest = tl.load(count + tl.load(order + group * T))
        width = (longest + STEP - 1) // STEP * STEP
        tl.store(out_first + group, start)
        tl.store(out_width + group, width)
        start += T * width
    tl.store(out_dense + problem, (start > slots).to(tl.int32))


@triton.jit
def _write_kernel(
    cost,
    edges,
    count,
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
    WORDS: tl.constexpr,
    T: tl.constexpr,
    STEP: tl.constexpr,
    WORD: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The lists of a group, slot by slot: the neighbour of slot d is the d-th bit that is set."""
    problem = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    own_width = tl.load(width + problem * groups + group)
    if (own_width > 0) & (tl.load(dense + problem) == 0):
        entries = problem * groups * T
        place = tl.arange(0, T)
        i = tl.load(order + entries + group * T + place)
        known = tl.load(count + entries + i)
        marked = edges + entries * WORDS + i
        costs = cost + problem * problem_stride + i * row_stride
        start = problem * slots + tl.load(first + problem * groups + group) + place * own_width
        for begin in range(0, own_width, STEP):
            d = tl.broadcast_to((begin + tl.arange(0, STEP))[None, :], (T, STEP))
            left = d
            bits = tl.zeros([T, STEP], tl.uint32)
            above = tl.zeros([T, STEP], tl.int32)
            for word in tl.range(0, WORDS, loop_unroll_factor=UNROLL):
                these = tl.load(marked + word * groups * T).to(tl.uint32, bitcast=True)
                number = _bits_set(these)[:, None]
                here = (left >= 0) & (left < number)
                bits = tl.where(here, these[:, None], bits)
                above = tl.where(here, word * WORD + left, above)  # the word, and which of its bits that are set
                left = tl.where(here, -1, left - number)
            j = above - above % WORD + _place_of_bit(bits, above % WORD)
            there = d < known[:, None]
            c = tl.load(costs[:, None] + j, mask=there, other=float("inf"))
            tl.store(out_cost + start[:, None] + d, c)
            tl.store(out_index + start[:, None] + d, tl.load(rank + entries + j, mask=there, other=0).to(tl.int16))


@triton.jit
def _bits_set(x):
    """How many bits of a number are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _place_of_bit(x, k):
    """The place of the k-th bit that is set, counted from 0, by halves."""
    place = tl.zeros_like(k)
    for step in tl.static_range(5):
        half = 16 >> step
        lower = _bits_set(x & ((1 << half) - 1))
        upper = k >= lower
        k = tl.where(upper, k - lower, k)
        x = tl.where(upper, x >> half, x)
        place += tl.where(upper, half, 0)
    return place


@triton.jit
def _has_mass(log_a, log_b, i, n):
    a = tl.load(log_a + i, mask=i < n, other=-float("inf"))
    b = tl.load(log_b + i, mask=i < n, other=-float("inf"))
    return (a != -float("inf")) | (b != -float("inf"))
