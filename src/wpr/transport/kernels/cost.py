"""Costs among the tokens of each support: gathered embedding rows multiplied on tensor cores; same result as
`TokenGeometry.cost`.

Notation for shapes: ``V`` vocabulary, ``d`` embedding size, ``P`` positions, ``n`` support entries.

Costs are computed in tiles of 64 x 64 entries, straight from the rows of the embedding matrix, a few columns at a time,
so that gathered rows never exist in memory. Tiles below the diagonal are mirrored, not computed, and tiles without
tokens are only filled. What bounds this is the second-level cache: tiles that were computed one by one would read each
row as often as there are tiles beside it. So one program takes a position's first three tiles of entries, which hold
nearly all tokens of a usual support, with all products among them (`_panel_kernel`): the first two tiles together with
themselves and with the third, and the third with itself. Programs of one tile at a time (`_tile_kernel`) do the rest.

    |x - y|^2  =  size_x + size_y - 2 weight_x weight_y <e_x, e_y>            euclidean: size = |e|^2, weight = 1
                                                                              cosine: size = 1, weight = 1 / |e|

A power is taken of distances in units of the scale, whose logarithms are small, so that they keep their digits.

The products of bf16 (or fp16) numbers are exact in float32, and are added in float32. float32 embeddings are multiplied
as three TF32 products, which keeps 21 bits. Two kinds of pairs need more digits than that: those whose difference loses
them, ``|x - y|^2 < NEAR (size_x + size_y)``, and those so close to the radius that rounding would decide whether their
cost is finite (`_tie_margin`). They are marked by a cost of -1 and computed again by `near_pairs`. So the costs that
are infinite are those that float64 finds.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from wpr.transport.distances import COSINE, EUCLIDEAN
from wpr.transport.geometry import RADIUS_SLACK, TokenGeometry
from wpr.transport.kernels import cdiv, next_power_of_2
from wpr.transport.kernels.near_pairs import NEAR_COLUMNS, NEAR_FEW, near_kernel, raised, tile_of

NEAR = 0.1
"""Pairs with ``|x-y|^2 < NEAR (size_x + size_y)`` are computed again from their differences. It is more than in
`transport.distances`, because tensor cores cut off digits where a float32 sum would round (see `_tie_margin`).
"""

TILE = 64
"""Side of a tile; a panel has seven of them, whose sums are 112 registers a thread of 8 warps."""

PANEL_TILES = 3
"""Tiles of entries that a panel holds."""

PANEL_COLUMNS, PANEL_STAGES = 64, 4
"""Embedding columns that a panel multiplies in one step, and how many steps are in flight: 24 KB of bf16 each,
of which four fit even where a program has 99 KB.
"""

COLUMNS = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 64}
STAGES = {torch.bfloat16: 3, torch.float16: 3, torch.float32: 2}
"""The same for programs of one tile: 32 KB each."""

PROGRAMS = 2048
"""Programs for tiles one by one, if positions are fewer. Beyond panels nearly all have nothing to do, and starting them
takes the time.
"""

_factors: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Sizes and weights of each geometry's tokens: 4 bytes a token, 12 under the cosine metric."""


def supports(geometry: TokenGeometry) -> str | None:
    """Why the kernel cannot compute this geometry's costs, if so: a user's metric is a torch function."""
    if geometry.metric not in (EUCLIDEAN, COSINE):
        return f"the metric {geometry.metric.name} is a torch function"
    if geometry.embeddings.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the embeddings are {geometry.embeddings.dtype}"
    if geometry.embeddings.stride(1) != 1:
        return "the embedding matrix is stored column by column"
    return None


def cost(geometry: TokenGeometry, ids: Tensor, *, scaled: bool = True, fill: bool = True) -> Tensor:
    """Same as `TokenGeometry.cost`, in float32: ids ``(P, n)`` to costs ``(P, n, n)``.

    The rows of the result are padded to a multiple of 16 entries, so that solvers can read them 16 bytes at a time. Ids
    are not checked: they come from `kernels.support`, tokens first, in increasing order, and the dummy last.
    fill: without it, costs of entries that are no tokens are left as they come where a whole tile has none; the
        solvers do not read them.
    """
    obstacle = supports(geometry)
    if obstacle:
        raise ValueError(f"the cost kernel cannot run because {obstacle}; use TokenGeometry.cost")
    rows, n = ids.shape
    ids = ids.contiguous()
    stride = 16 * cdiv(n, 16)
    out = torch.empty(rows, n, stride, dtype=torch.float32, device=ids.device)
    if rows:
        embeddings = geometry.embeddings
        size, weight = _sizes_and_weights(geometry)
        tiles = cdiv(n, TILE)
        pairs = tiles * (tiles + 1) // 2
        near = torch.empty(rows, pairs, dtype=torch.int32, device=ids.device)
        radius, row_stride, reach = geometry.radius.float(), embeddings.stride(0), 1 + RADIUS_SLACK[torch.float32]
        places = (n, embeddings.shape[1], row_stride, stride, pairs, reach, 1 / geometry.unit(scaled))
        margins = (NEAR, _tie_margin(embeddings.shape[1]))
        arguments = (ids, embeddings, size, weight, radius, out, near, *places, *margins)
        cosine, power = geometry.metric is COSINE, float(geometry.power)
        full = embeddings.dtype == torch.float32
        width = max(16, next_power_of_2(embeddings.shape[1]))
        first = 0
        if not full and tiles >= PANEL_TILES:
            first = PANEL_TILES * (PANEL_TILES + 1) // 2
            columns = min(PANEL_COLUMNS, width)
            _panel_kernel[(rows,)](*arguments, cosine, power, fill, TILE, columns, num_warps=8, num_stages=PANEL_STAGES)
        columns = min(COLUMNS[embeddings.dtype], width)
        if pairs > first:
            stages = STAGES[embeddings.dtype]
            programs = min(pairs - first, max(1, PROGRAMS // rows))
            _tile_kernel[(rows * programs,)](
                *arguments, first, programs, cosine, power, fill, full, TILE, columns, num_warps=4, num_stages=stages
            )
        near_kernel[(rows * pairs,)](
            ids, embeddings, weight, radius, out, near, *places,
            cosine, power, TILE, 32, min(NEAR_COLUMNS, width), NEAR_FEW, num_warps=4,
        )  # fmt: skip
    return out[:, :, :n]


def _tie_margin(width: int) -> float:
    """How far ``|x - y|^2`` can be off, as a share of ``size_x + size_y``.

    Tensor cores cut digits off a sum instead of rounding it. Cuts add up, since all are towards zero. Measured on an
    H200 over random, clustered and positive rows of bf16: at most 1.6e-6 for 576 columns, 6.1e-6 for 2,048, 1.4e-5 for
    4,096, nearly always too large; TF32 products, of which three are added, stay below 8e-7.
    """
    return 5e-7 + 4e-9 * width


def _sizes_and_weights(geometry: TokenGeometry) -> tuple[Tensor, Tensor]:
    """Squared length of each token's row after weighting, and its weight: ``(V,)`` of float32 and of float64, computed
    once a geometry. Euclidean costs have no weights; what stands in their place is not read.
    """
    if geometry not in _factors:
        # In float64: an error of a weight would be the same for all costs of its token, and a GPU's rsqrt has one.
        squared = torch.cat([part.double().square().sum(-1) for part in geometry.embeddings.split(1 << 12)])
        if geometry.metric is COSINE:  # a row of zeros has no direction and stays as it is
            weight = torch.where(squared > 0, squared.rsqrt(), 0.0)
            _factors[geometry] = ((squared > 0).float(), weight)
        else:
            size = squared.float()
            _factors[geometry] = (size, size)
    size, weight = _factors[geometry]
    return size, weight


@triton.jit
def _panel_kernel(
    ids,
    embeddings,
    size,
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
    near_share,
    tie_margin,
    COSINE: tl.constexpr,
    POWER: tl.constexpr,
    FILL: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64)
    out += position * n * out_stride
    near_tiles += position * pairs
    i0 = tl.arange(0, 2 * TILE)
    i1 = 2 * TILE + tl.arange(0, TILE)
    token0 = tl.load(ids + position * n + i0, mask=i0 < n, other=-1)
    token1 = tl.load(ids + position * n + i1, mask=i1 < n, other=-1)
    rows0 = (embeddings + tl.maximum(token0, 0) * row_stride)[:, None]
    rows1 = (embeddings + tl.maximum(token1, 0) * row_stride)[:, None]
    dot00 = tl.zeros([2 * TILE, 2 * TILE], tl.float32)
    dot01 = tl.zeros([2 * TILE, TILE], tl.float32)
    dot11 = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        x0 = tl.load(rows0 + column, mask=(column < width) & (token0 >= 0)[:, None], other=0.0)
        x1 = tl.load(rows1 + column, mask=(column < width) & (token1 >= 0)[:, None], other=0.0)
        dot00 = tl.dot(x0, tl.trans(x0), dot00)
        dot01 = tl.dot(x0, tl.trans(x1), dot01)
        dot11 = tl.dot(x1, tl.trans(x1), dot11)
    first, second = (i0, token0), (i1, token1)
    factors = (size, weight, radius)
    limits = (n, out_stride, slack, factor, near_share, tie_margin)
    near00 = _finish(dot00, first, first, factors, limits, out, False, FILL, COSINE, POWER, False)
    near01 = _finish(dot01, first, second, factors, limits, out, True, FILL, COSINE, POWER, False)
    near11 = _finish(dot11, second, second, factors, limits, out, False, FILL, COSINE, POWER, False)
    for tile in tl.static_range(6):  # in the order of `tile_of`
        tl.store(near_tiles + tile, near00 if tile < 3 else (near01 if tile < 5 else near11))


@triton.jit(do_not_specialize=["pairs", "programs"])  # one pair, known as such, breaks the compiler
def _tile_kernel(
    ids,
    embeddings,
    size,
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
    near_share,
    tie_margin,
    first_pair,
    programs,
    COSINE: tl.constexpr,
    POWER: tl.constexpr,
    FILL: tl.constexpr,
    FULL: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    position = (tl.program_id(0) // programs).to(tl.int64)
    ids += position * n
    out += position * n * out_stride
    near_tiles += position * pairs
    for pair in range(first_pair + tl.program_id(0) % programs, pairs, programs):
        first, second = tile_of(pair)
        i = first * TILE + tl.arange(0, TILE)
        j = second * TILE + tl.arange(0, TILE)
        some = tl.load(ids + second * TILE) >= 0  # tokens come first, and the first tile is not after the second
        if FILL | some:
            token_i = tl.load(ids + i, mask=i < n, other=-1)
            token_j = tl.load(ids + j, mask=j < n, other=-1)
            x_rows = embeddings + tl.maximum(token_i, 0) * row_stride
            y_rows = embeddings + tl.maximum(token_j, 0) * row_stride
            products = tl.zeros([TILE, TILE], tl.float32)
            for start in range(0, tl.where(some, width, 0), COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                x = tl.load(x_rows[:, None] + column[None, :], mask=column[None, :] < width, other=0.0)
                y = tl.load(y_rows[:, None] + column[None, :], mask=column[None, :] < width, other=0.0)
                if FULL:
                    products = tl.dot(x, tl.trans(y), products, input_precision="tf32x3")
                else:
                    products = tl.dot(x, tl.trans(y), products)
            factors = (size, weight, radius)
            limits = (n, out_stride, slack, factor, near_share, tie_margin)
            mirror = True if FULL else first != second
            found = _finish(
                products, (i, token_i), (j, token_j), factors, limits, out, mirror, FILL, COSINE, POWER, FULL
            )
            tl.store(near_tiles + pair, found)
        else:
            _leave_out(i, j, n, out, out_stride)
            tl.store(near_tiles + pair, 0)


@triton.jit
def _finish(
    products,
    rows,
    columns,
    factors,
    limits,
    out,
    mirror,
    FILL: tl.constexpr,
    COSINE: tl.constexpr,
    POWER: tl.constexpr,
    FULL: tl.constexpr,
):
    """Costs of a tile from its products, written on both sides of the diagonal; 1 if it has near pairs.

    rows, columns: the entries of the tile and their tokens.
    """
    i, token_i = rows
    j, token_j = columns
    size, weight, radius = factors
    n, out_stride, slack, factor, near_share, tie_margin = limits
    any_near = tl.zeros([], tl.int32)
    if FILL | ((tl.max(token_i, axis=0) >= 0) & (tl.max(token_j, axis=0) >= 0)):
        real_i = token_i >= 0
        real_j = token_j >= 0
        size_i = tl.load(size + token_i, mask=real_i, other=0.0)
        size_j = tl.load(size + token_j, mask=real_j, other=0.0)
        radius_i = tl.load(radius + token_i, mask=real_i, other=-1.0)  # negative: an entry that nothing is near
        radius_j = tl.load(radius + token_j, mask=real_j, other=-1.0)
        sizes = size_i[:, None] + size_j[None, :]
        if COSINE:
            weight_i = tl.load(weight + token_i, mask=real_i, other=0.0).to(tl.float32)
            weight_j = tl.load(weight + token_j, mask=real_j, other=0.0).to(tl.float32)
            products *= weight_i[:, None] * weight_j[None, :]
        squared = tl.maximum(sizes - 2.0 * products, 0.0)
        others = (radius_i >= 0)[:, None] & (radius_j >= 0)[None, :] & (i[:, None] != j[None, :])
        reach = tl.maximum(radius_i[:, None], radius_j[None, :]) * slack
        limit = 2.0 * reach if COSINE else reach * reach
        near = others & ((squared < near_share * sizes) | (tl.abs(squared - limit) <= tie_margin * sizes))
        any_near = tl.max(tl.max(near.to(tl.int32), axis=1), axis=0)
        distance = squared * 0.5 if COSINE else tl.sqrt(squared)
        cost = tl.where(others & (distance <= reach), raised(distance * factor, POWER), float("inf"))
        cost = tl.where(near, -1.0, cost)
        cost = tl.where(i[:, None] == j[None, :], 0.0, cost)
        # The three products of a TF32 pair are added in another order on the other side of the diagonal: with these, a
        # tile on the diagonal is mirrored too. Else all of a tile is written.
        which = i[:, None] <= j[None, :] if FULL else i[:, None] < j[None, :] + i.shape[0]
        _store_both(out, i, j, cost, which, n, out_stride, mirror)
    else:
        _leave_out(i, j, n, out, out_stride)
    return any_near


@triton.jit
def _leave_out(i, j, n, out, out_stride):
    """A tile without tokens: of what is in it, solvers read the dummy, the last entry, which no token is near."""
    if tl.max(j, axis=0) >= n - 1:
        alone = tl.where(i == n - 1, 0.0, float("inf"))
        tl.store(out + i * out_stride + n - 1, alone, mask=i < n)
        tl.store(out + (n - 1) * out_stride + i, alone, mask=i < n)


@triton.jit
def _store_both(out, i, j, cost, which, n, out_stride, mirror):
    """Write a tile, and what it is on the other side of the diagonal."""
    inside = which & (i < n)[:, None] & (j < n)[None, :]
    tl.store(out + i[:, None] * out_stride + j[None, :], cost, mask=inside)
    if mirror:
        tl.store(out + j[:, None] * out_stride + i[None, :], tl.trans(cost), mask=tl.trans(inside))
