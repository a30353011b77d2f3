"""Costs among the tokens of each support: gathered embedding rows multiplied on tensor cores; same result as
`TokenGeometry.cost`.

Notation for shapes: ``V`` vocabulary, ``d`` embedding size, ``P`` positions, ``n`` support entries.

One program computes a tile of one position's costs. It reads the rows of its tokens straight from the embedding matrix,
a few columns at a time, so that gathered rows never exist in memory. Tiles below the diagonal are mirrored, not
computed, and tiles without tokens are only filled.

    |x - y|^2  =  size_x + size_y - 2 weight_x weight_y <e_x, e_y>            euclidean: size = |e|^2, weight = 1
                                                                              cosine: size = 1, weight = 1 / |e|

The products of bf16 (or fp16) numbers are exact in float32, and are added in float32. float32 embeddings are multiplied
as three TF32 products, which keeps 21 bits. Where the difference loses its digits, ``|x - y|^2 < NEAR (size_x +
size_y)``, the pair is marked by a cost of -1, and a second kernel adds up the squared differences of such pairs. Real
supports have few, so nearly all of its programs have nothing to do; a kernel of its own leaves the first its registers.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from wpr.transport.geometry import RADIUS_SLACK, TokenGeometry
from wpr.transport.metrics import COSINE, EUCLIDEAN, NEAR

TILE = 128
"""Side of a tile: 128 x 128 sums are 64 registers a thread of 8 warps."""

COLUMNS = 64
"""Embedding columns multiplied in one step: 128 bytes of a bf16 row."""

STAGES = {torch.bfloat16: 3, torch.float16: 3, torch.float32: 2}
"""Steps of columns in flight, by the type of the embeddings: 32 KB of shared memory each, twice that for float32."""

_factors: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Sizes and weights of each geometry's tokens: 8 bytes a token."""


def supports(geometry: TokenGeometry) -> str | None:
    """Why the kernel cannot compute this geometry's costs, if so: a user's metric is a torch function."""
    if geometry.metric not in (EUCLIDEAN, COSINE):
        return f"the metric {geometry.metric.name} is a torch function"
    if geometry.embeddings.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the embeddings are {geometry.embeddings.dtype}"
    if geometry.embeddings.stride(1) != 1:
        return "the embedding matrix is stored column by column"
    return None


def cost(geometry: TokenGeometry, ids: Tensor, *, scaled: bool = True) -> Tensor:
    """Same as `TokenGeometry.cost`, in float32: ids ``(P, n)`` to costs ``(P, n, n)``.

    The rows of the result are padded to a multiple of 16 entries, so that solvers can read them 16 bytes at a time. Ids
    are not checked: they come from `kernels.support`.
    """
    return cost_and_neighbours(geometry, ids, scaled=scaled)[0]


def cost_and_neighbours(geometry: TokenGeometry, ids: Tensor, *, scaled: bool = True) -> tuple[Tensor, Tensor]:
    """The same, and which entries have a neighbour: an entry other than themselves at finite cost ``(P, n)``."""
    obstacle = supports(geometry)
    if obstacle:
        raise ValueError(f"the cost kernel cannot run because {obstacle}; use TokenGeometry.cost")
    rows, n = ids.shape
    stride = 16 * triton.cdiv(n, 16)
    out = torch.empty(rows, n, stride, dtype=torch.float32, device=ids.device)
    neighbours = torch.zeros(rows, n, dtype=torch.int8, device=ids.device)
    if rows:
        embeddings = geometry.embeddings
        size, weight = _sizes_and_weights(geometry)
        tile = min(TILE, max(16, triton.next_power_of_2(n)))
        tiles = triton.cdiv(n, tile)
        columns = min(COLUMNS, max(16, triton.next_power_of_2(embeddings.shape[1])))
        programs = rows * (tiles * (tiles + 1) // 2)
        near = torch.empty(programs, dtype=torch.int32, device=ids.device)
        token = ids.clamp_min(0)
        # Per entry, so that the kernel finds them side by side; a radius of -1 says that an entry is no token.
        sizes = size[token], weight[token], torch.where(ids < 0, -1.0, geometry.radius.float()[token])
        numbers = n, embeddings.shape[1], embeddings.stride(0), stride, tiles
        factors = 1 + RADIUS_SLACK[torch.float32], 1 / geometry.scale if scaled else 1.0
        _cost_kernel[(programs,)](
            ids,
            embeddings,
            *sizes,
            out,
            neighbours,
            near,
            *numbers,
            *factors,
            NEAR,
            geometry.metric is COSINE,
            embeddings.dtype == torch.float32,
            tile,
            columns,
            num_warps=8 if tile == 128 else 4,
            num_stages=STAGES[embeddings.dtype],
        )
        _near_kernel[(programs,)](
            ids,
            embeddings,
            *sizes,
            out,
            neighbours,
            near,
            *numbers,
            *factors,
            geometry.metric is COSINE,
            tile,
            columns,
            num_warps=8 if tile == 128 else 4,
        )
    return out[:, :, :n], neighbours != 0


def _sizes_and_weights(geometry: TokenGeometry) -> tuple[Tensor, Tensor]:
    """Squared length of each token's row after weighting, and its weight: two ``(V,)``, computed once a geometry."""
    if geometry not in _factors:
        parts = [part.float().square().sum(-1) for part in geometry.embeddings.split(1 << 14)]
        squared = torch.cat(parts)
        if geometry.metric is COSINE:  # a row of zeros has no direction and stays as it is
            weight = torch.where(squared > 0, squared.rsqrt(), 0.0)
            _factors[geometry] = ((squared > 0).float(), weight)
        else:
            _factors[geometry] = (squared, torch.ones_like(squared))
    size, weight = _factors[geometry]
    return size, weight


@triton.jit
def _cost_kernel(
    ids,
    embeddings,
    size,
    weight,
    radius,
    out,
    neighbours,
    near_tiles,
    n,
    width,
    row_stride,
    out_stride,
    tiles,
    slack,
    factor,
    near_share,
    COSINE: tl.constexpr,
    FULL: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    position, first, second = _tile(tiles)
    ids += position * n
    i = first * TILE + tl.arange(0, TILE)
    j = second * TILE + tl.arange(0, TILE)
    token_i = tl.load(ids + i, mask=i < n, other=-1)
    token_j = tl.load(ids + j, mask=j < n, other=-1)
    row_i = tl.where(token_i < 0, 0, token_i)
    row_j = tl.where(token_j < 0, 0, token_j)
    x_rows = embeddings + row_i * row_stride
    y_rows = embeddings + row_j * row_stride

    cost = tl.full([TILE, TILE], float("inf"), tl.float32)
    any_near = 0
    if (tl.max(token_i, axis=0) >= 0) & (tl.max(token_j, axis=0) >= 0):
        products = tl.zeros([TILE, TILE], tl.float32)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            x = tl.load(x_rows[:, None] + column[None, :], mask=column[None, :] < width, other=0.0)
            y = tl.load(y_rows[:, None] + column[None, :], mask=column[None, :] < width, other=0.0)
            if FULL:
                products = tl.dot(x, tl.trans(y), products, input_precision="tf32x3")
            else:
                products = tl.dot(x, tl.trans(y), products)
        at_i, at_j = position * n + i, position * n + j
        size_i = tl.load(size + at_i, mask=i < n, other=0.0)
        size_j = tl.load(size + at_j, mask=j < n, other=0.0)
        weight_i = tl.load(weight + at_i, mask=i < n, other=0.0)
        weight_j = tl.load(weight + at_j, mask=j < n, other=0.0)
        radius_i = tl.load(radius + at_i, mask=i < n, other=-1.0)
        radius_j = tl.load(radius + at_j, mask=j < n, other=-1.0)
        sizes = size_i[:, None] + size_j[None, :]
        squared = tl.maximum(sizes - 2.0 * products * (weight_i[:, None] * weight_j[None, :]), 0.0)
        others = (radius_i >= 0)[:, None] & (radius_j >= 0)[None, :] & (i[:, None] != j[None, :])
        near = others & (squared < near_share * sizes)
        any_near = tl.max(tl.max(near.to(tl.int32), axis=1), axis=0)
        distance = squared * 0.5 if COSINE else tl.sqrt(squared)
        reach = tl.maximum(radius_i[:, None], radius_j[None, :]) * slack
        cost = tl.where(others & (distance <= reach), distance * factor, float("inf"))
        cost = tl.where(near, -1.0, cost)
        _note_neighbours(neighbours + position * n, i, j, (cost >= 0) & (cost < float("inf")))
    tl.store(near_tiles + tl.program_id(0), any_near)
    cost = tl.where(i[:, None] == j[None, :], 0.0, cost)
    everything = (i >= 0)[:, None] & (j >= 0)[None, :]
    _store_both(out + position * n * out_stride, i, j, cost, everything, n, out_stride, first != second)


@triton.jit
def _near_kernel(
    ids,
    embeddings,
    size,
    weight,
    radius,
    out,
    neighbours,
    near_tiles,
    n,
    width,
    row_stride,
    out_stride,
    tiles,
    slack,
    factor,
    COSINE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if tl.load(near_tiles + tl.program_id(0)) != 0:
        position, first, second = _tile(tiles)
        ids += position * n
        out += position * n * out_stride
        i = first * TILE + tl.arange(0, TILE)
        j = second * TILE + tl.arange(0, TILE)
        inside = (i < n)[:, None] & (j < n)[None, :]
        cost = tl.load(out + i[:, None] * out_stride + j[None, :], mask=inside, other=0.0)
        near = cost < 0
        row_j = tl.maximum(tl.load(ids + j, mask=j < n, other=0), 0)
        y_rows = embeddings + row_j * row_stride
        weight_j = tl.load(weight + position * n + j, mask=j < n, other=0.0)
        radius_j = tl.load(radius + position * n + j, mask=j < n, other=-1.0)
        near_rows = tl.max(near.to(tl.int32), axis=1)
        left = tl.sum(near_rows, axis=0)
        while left > 0:
            row = tl.argmax(near_rows, axis=0)
            is_row = tl.arange(0, TILE) == row
            wanted = tl.max((near & is_row[:, None]).to(tl.int32), axis=0) != 0
            own = tl.load(ids + first * TILE + row)
            own_weight = tl.load(weight + position * n + first * TILE + row)
            sums = tl.zeros([TILE], tl.float32)
            for start in range(0, width, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                x = tl.load(embeddings + own * row_stride + column, mask=column < width, other=0.0).to(tl.float32)
                mask = wanted[:, None] & (column[None, :] < width)
                y = tl.load(y_rows[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
                difference = tl.where(mask, (x * own_weight)[None, :] - y * weight_j[:, None], 0.0)
                sums += tl.sum(difference * difference, axis=1)
            distance = sums * 0.5 if COSINE else tl.sqrt(sums)
            reach = tl.maximum(tl.load(radius + position * n + first * TILE + row), radius_j) * slack
            exact = tl.where(distance <= reach, distance * factor, float("inf"))
            cost = tl.where(near & is_row[:, None], exact[None, :], cost)
            near_rows = tl.where(is_row, 0, near_rows)
            left -= 1
        _note_neighbours(neighbours + position * n, i, j, near & (cost < float("inf")))
        _store_both(out, i, j, cost, near, n, out_stride, first != second)


@triton.jit
def _tile(tiles):
    """This program's position, and the row and column of its tile in the upper triangle."""
    pairs = tiles * (tiles + 1) // 2
    position = (tl.program_id(0) // pairs).to(tl.int64)
    first = 0
    second = tl.program_id(0) % pairs
    while second >= tiles - first:
        second -= tiles - first
        first += 1
    return position, first, second + first


@triton.jit
def _note_neighbours(neighbours, i, j, found):
    """Several programs may find neighbours of one entry; all write the same."""
    of_i = tl.max(found.to(tl.int32), axis=1)
    of_j = tl.max(found.to(tl.int32), axis=0)
    tl.store(neighbours + i, of_i.to(tl.int8), mask=of_i != 0)
    tl.store(neighbours + j, of_j.to(tl.int8), mask=of_j != 0)


@triton.jit
def _store_both(out, i, j, cost, which, n, out_stride, mirror):
    """Write a tile, and what it is on the other side of the diagonal."""
    inside = which & (i < n)[:, None] & (j < n)[None, :]
    tl.store(out + i[:, None] * out_stride + j[None, :], cost, mask=inside)
    if mirror:
        tl.store(out + j[:, None] * out_stride + i[None, :], tl.trans(cost), mask=tl.trans(inside))
