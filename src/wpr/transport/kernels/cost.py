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
size_y)``, the tile's program takes such pairs row by row and adds up squared differences instead.
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
        _cost_kernel[(rows * (tiles * (tiles + 1) // 2),)](
            ids,
            embeddings,
            size,
            weight,
            geometry.radius.float(),
            out,
            neighbours,
            n,
            embeddings.shape[1],
            embeddings.stride(0),
            stride,
            tiles,
            1 + RADIUS_SLACK[torch.float32],
            1 / geometry.scale if scaled else 1.0,
            NEAR,
            geometry.metric is COSINE,
            embeddings.dtype == torch.float32,
            tile,
            columns,
            num_warps=8 if tile == 128 else 4,
            num_stages=STAGES[embeddings.dtype],
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
    pairs = tiles * (tiles + 1) // 2
    position = (tl.program_id(0) // pairs).to(tl.int64)
    # The pair's number to its tiles, first <= second, by rows of the upper triangle.
    first = 0
    second = tl.program_id(0) % pairs
    while second >= tiles - first:
        second -= tiles - first
        first += 1
    second += first

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
        size_i, weight_i = tl.load(size + row_i), tl.load(weight + row_i)
        size_j, weight_j = tl.load(size + row_j), tl.load(weight + row_j)
        sizes = size_i[:, None] + size_j[None, :]
        squared = sizes - 2.0 * products * (weight_i[:, None] * weight_j[None, :])
        squared = tl.maximum(squared, 0.0)
        tokens = (token_i >= 0)[:, None] & (token_j >= 0)[None, :]

        # Pairs that lost their digits: row by row, from the differences.
        near = tokens & (i[:, None] != j[None, :]) & (squared < near_share * sizes)
        near_rows = tl.max(near.to(tl.int32), axis=1)
        left = tl.sum(near_rows, axis=0)
        while left > 0:
            row = tl.argmax(near_rows, axis=0)
            is_row = tl.arange(0, TILE) == row
            wanted = tl.max((near & is_row[:, None]).to(tl.int32), axis=0) != 0
            own_row = embeddings + tl.sum(tl.where(is_row, row_i, 0), axis=0) * row_stride
            own_weight = tl.sum(tl.where(is_row, weight_i, 0.0), axis=0)
            sums = tl.zeros([TILE], tl.float32)
            for start in range(0, width, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                x = tl.load(own_row + column, mask=column < width, other=0.0).to(tl.float32)
                inside = wanted[:, None] & (column[None, :] < width)
                y = tl.load(y_rows[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
                difference = tl.where(inside, (x * own_weight)[None, :] - y * weight_j[:, None], 0.0)
                sums += tl.sum(difference * difference, axis=1)
            squared = tl.where(near & is_row[:, None], sums[None, :], squared)
            near_rows = tl.where(is_row, 0, near_rows)
            left -= 1

        distance = squared * 0.5 if COSINE else tl.sqrt(squared)
        reach = tl.maximum(tl.load(radius + row_i)[:, None], tl.load(radius + row_j)[None, :]) * slack
        together = tokens & (distance <= reach)
        cost = tl.where(together, distance * factor, float("inf"))
        # Several programs may find neighbours of one entry; all write the same.
        found = (together & (i[:, None] != j[None, :])).to(tl.int8)
        tl.store(neighbours + position * n + i, tl.max(found, axis=1), mask=tl.max(found, axis=1) != 0)
        tl.store(neighbours + position * n + j, tl.max(found, axis=0), mask=tl.max(found, axis=0) != 0)
    cost = tl.where(i[:, None] == j[None, :], 0.0, cost)

    out += position * n * out_stride
    inside = (i < n)[:, None] & (j < n)[None, :]
    tl.store(out + i[:, None] * out_stride + j[None, :], cost, mask=inside)
    if first != second:
        inside = (j < n)[:, None] & (i < n)[None, :]
        tl.store(out + j[:, None] * out_stride + i[None, :], tl.trans(cost), mask=inside)
