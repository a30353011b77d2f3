"""Pairs whose cost needs more digits than tensor cores give: the squared differences of their rows, added in float64.

`cost` marks them by a cost of -1. Few pairs are marked, and most programs have nothing to do; a kernel of its own
leaves that of `cost` its registers.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

NEAR_COLUMNS, NEAR_FEW = 2048, 8
"""Embedding columns of a pair that are subtracted in one step, and of how many pairs of a row one after the other: of
more, all 64 together, a few columns at a time.
"""


@triton.jit(do_not_specialize=["pairs"])  # one pair, known as such, breaks the compiler
def near_kernel(
    ids,
    embeddings,
    weight,
    radius,
    out,
    near_tiles,
    n,
    width,
    row_stride,
    out_stride,
    pairs,
    slack,
    factor,
    COSINE: tl.constexpr,
    POWER: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    FEW: tl.constexpr,
):
    """One program per tile: the marked pairs above its diagonal, both sides of each."""
    if tl.load(near_tiles + tl.program_id(0)) == 0:
        return
    position = (tl.program_id(0) // pairs).to(tl.int64)
    first, second = tile_of(tl.program_id(0) % pairs)
    ids += position * n
    out += position * n * out_stride
    i = first * TILE + tl.arange(0, TILE)
    j = second * TILE + tl.arange(0, TILE)
    above = (i[:, None] < j[None, :]) & (j < n)[None, :]  # tiles on the diagonal have marks on both sides
    cost = tl.load(out + i[:, None] * out_stride + j[None, :], mask=above, other=0.0)
    marked_rows = tl.max((cost < 0).to(tl.int32), axis=1)
    left = tl.sum(marked_rows, axis=0)
    row_j = tl.maximum(tl.load(ids + j, mask=j < n, other=0), 0)
    radius_j = tl.load(radius + row_j)
    while left > 0:
        row = tl.argmax(marked_rows, axis=0)
        entry = first * TILE + row
        own = tl.load(ids + entry)
        marked = tl.load(out + entry * out_stride + j, mask=(j > entry) & (j < n), other=0.0) < 0
        number = tl.sum(marked.to(tl.int32), axis=0)
        if number <= FEW:
            sums = _few_distances(
                own, ids + second * TILE, marked, number, embeddings, weight, width, row_stride, COSINE, TILE, WIDE
            )
        else:
            sums = _many_distances(own, row_j, marked, embeddings, weight, width, row_stride, COSINE, TILE, COLUMNS)
        distance = sums * 0.5 if COSINE else tl.sqrt(sums)
        reach = tl.maximum(tl.load(radius + own), radius_j) * slack
        exact = tl.where(distance <= reach, raised(distance.to(tl.float32) * factor, POWER), float("inf"))
        tl.store(out + entry * out_stride + j, exact, mask=marked)
        tl.store(out + j * out_stride + entry, exact, mask=marked)
        marked_rows = tl.where(tl.arange(0, TILE) == row, 0, marked_rows)
        left -= 1


@triton.jit
def _few_distances(
    own,
    ids,
    marked,
    number,
    embeddings,
    weight,
    width,
    row_stride,
    COSINE: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Squared distances ``(TILE,)`` of the token ``own`` to the marked ones, one after the other."""
    sums = tl.zeros([TILE], tl.float64)
    # Of each the whole difference at once: what takes the time is waiting for the rows.
    to_do = marked.to(tl.int32)
    while number > 0:
        place = tl.argmax(to_do, axis=0)
        is_place = tl.arange(0, TILE) == place
        other = tl.load(ids + place)
        total = tl.zeros([], tl.float64)
        for start in range(0, width, WIDE):
            column = start + tl.arange(0, WIDE)
            x = tl.load(embeddings + own * row_stride + column, mask=column < width, other=0.0)
            y = tl.load(embeddings + other * row_stride + column, mask=column < width, other=0.0)
            total += tl.sum(_squared_difference(x, y, weight + own, weight + other, COSINE), axis=0)
        sums = tl.where(is_place, total, sums)
        to_do = tl.where(is_place, 0, to_do)
        number -= 1
    return sums


@triton.jit
def _many_distances(
    own,
    others,
    marked,
    embeddings,
    weight,
    width,
    row_stride,
    COSINE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Squared distances ``(TILE,)`` of the token ``own`` to the marked ones, all at once."""
    sums = tl.zeros([TILE], tl.float64)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = marked[:, None] & (column < width)[None, :]
        x = tl.load(embeddings + own * row_stride + column, mask=column < width, other=0.0)[None, :]
        y = tl.load((embeddings + others * row_stride)[:, None] + column[None, :], mask=mask, other=0.0)
        squares = _squared_difference(x, y, weight + own, (weight + others)[:, None], COSINE)
        sums += tl.sum(squares, axis=1)
    return sums


@triton.jit
def _squared_difference(x, y, weight_x, weight_y, COSINE: tl.constexpr):
    x = x.to(tl.float64)
    y = y.to(tl.float64)
    if COSINE:
        x *= tl.load(weight_x)
        y *= tl.load(weight_y)
    return (x - y) * (x - y)


@triton.jit
def raised(distance, POWER: tl.constexpr):
    """Distances to a power."""
    if POWER == 1.0:
        cost = distance
    elif POWER == 2.0:
        cost = distance * distance
    elif POWER == 0.5:
        cost = tl.sqrt(distance)
    else:
        cost = tl.exp2(POWER * tl.log2(distance))  # of 0: the logarithm is -inf, and the power 0
    return cost


@triton.jit
def tile_of(pair):
    """Row and column of a tile in the upper triangle, counted column by column."""
    first = pair
    second = 0
    while first > second:
        second += 1
        first -= second
    return first, second
