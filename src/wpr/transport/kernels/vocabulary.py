"""Log-sum-exp and the k most likely tokens of each row of logits, in one full read.

Notation for shapes: ``P`` positions, ``V`` vocabulary, ``B = ceil(V / 64)`` blocks of 64 tokens, ``k`` tokens wanted,
``S`` sides: one matrix of logits, or policy and reference, which share every launch.

The read writes each block's maximum and its sum of exponentials. The k most likely tokens lie in the k blocks whose
maxima are the largest (of equal maxima the block of lower ids): any token outside them is beaten by k maxima. So only
those blocks, 64 k logits, are read again.

Both choices, of blocks and of tokens, need the k-th largest of a few thousand numbers. It is found bit by bit: floats
ordered like integers, and for each bit from the top a count of the numbers that reach it. That is exact, needs no
sorting, and bf16 has 16 bits only. Among equals the lower id wins, as in `transport.support.top_ids`.

A NaN makes its row's log-sum-exp NaN. The ids of such a row are valid ids and nothing more; callers refuse the row by
its log-sum-exp.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from wpr.transport.kernels import cdiv, next_power_of_2

BLOCK = 64
"""Tokens of a block. 64 makes the two things that the choice looks at, V / 64 maxima and 64 k logits, about equally
many for 256,000 tokens and k = 128; a block of bf16 is one cache line; and a block's members fit the bits of an int64.
"""

BLOCKS_OF_A_PROGRAM = 256
"""Blocks that one program of the full read takes: 32 KB of bf16, 128 logits a thread in flight."""

UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits that are zero in every float32 that came from the type."""


@dataclass(frozen=True)
class BlockStatistics:
    """What the full read keeps of logits ``(P, V)`` of each side.

    highest: ``(S, P, B)`` maximum of each block. total: ``(S, P, B)`` sum of ``exp(logit - highest)``, 0 in a block of
    -inf.
    differences: ``(P, B)`` sum of ``exp(x - highest) (x - y - (highest of x - highest of y))`` for logits x of the
    policy and y of the reference, a highest of -inf counting as 0; None where they were not asked for.
    """

    highest: Tensor
    total: Tensor
    differences: Tensor | None = None


_reads: ContextVar[dict[Any, BlockStatistics | None]] = ContextVar("reads")


@contextmanager
def read_once(policy_logits: Tensor, reference_logits: Tensor) -> Iterator[None]:
    """For the duration these logits ``(P, V)`` are read once, however often they are asked about; they must stay as
    they are.
    """
    token = _reads.set({_place(policy_logits, reference_logits): None})
    try:
        yield
    finally:
        _reads.reset(token)


def _place(*logits: Tensor) -> Any:
    """The same for the same numbers in memory, while they are held there."""
    return tuple((part.data_ptr(), part.shape, part.stride(), part.dtype) for part in logits)


def block_statistics(*logits: Tensor, differences: bool = False) -> BlockStatistics:
    """The full read of logits ``(P, V)`` in float32, float16 or bfloat16: of one model, or of two.

    differences: also those of policy and reference, for `reverse_kl`; both are then read by the same program.
    """
    reads = _reads.get({})
    if not reads or (place := _place(*logits)) not in reads:
        return _block_statistics(*logits, differences=differences)
    found = reads[place]
    if found is None:  # with differences, which whoever asks next may want
        found = reads[place] = _block_statistics(*logits, differences=True)
    return found


def _block_statistics(*logits: Tensor, differences: bool) -> BlockStatistics:
    rows, vocabulary = check_logits(*logits)
    blocks = cdiv(vocabulary, BLOCK)
    highest, total = (
        torch.empty(len(logits), rows, blocks, dtype=torch.float32, device=logits[0].device) for _ in range(2)
    )
    if differences:
        return _with_differences(logits, highest, total)
    at_once = min(BLOCKS_OF_A_PROGRAM, next_power_of_2(blocks))
    programs = cdiv(blocks, at_once)
    if rows:
        _statistics[(rows * programs, len(logits))](
            *_pointers_and_strides(logits),
            highest,
            total,
            rows,
            vocabulary,
            blocks,
            programs,
            at_once,
            BLOCK,
            num_warps=4,
        )
    return BlockStatistics(highest, total)


def _with_differences(logits: tuple[Tensor, ...], highest: Tensor, total: Tensor) -> BlockStatistics:
    rows, vocabulary = logits[0].shape
    blocks = highest.shape[-1]
    differences = torch.empty(rows, blocks, dtype=torch.float32, device=logits[0].device)
    at_once = min(BLOCKS_OF_A_PROGRAM // 2, next_power_of_2(blocks))  # of both models at a time
    programs = cdiv(blocks, at_once)
    if rows:
        _statistics_of_both[(rows * programs,)](
            *_pointers_and_strides(logits), highest, total, differences, rows, vocabulary, blocks, programs, at_once,
            BLOCK, num_warps=4,
        )  # fmt: skip
    return BlockStatistics(highest, total, differences)


def reverse_kl(statistics: BlockStatistics, log_policy: Tensor, log_reference: Tensor) -> Tensor:
    """``KL(policy | reference)`` of each row ``(P,)``, from `block_statistics` with differences and both log-sum-exps
    ``(P,)``: the logits are not read again.

        KL = sum_v p_v d_v - p_v + q_v,    d = (x - y) - (log-sum-exp of x - log-sum-exp of y)

    The last two sum to zero but for rounding, and take back what the rounding of the log-sum-exps does to the first.
    """
    assert statistics.differences is not None
    rows, blocks = statistics.differences.shape
    out = torch.empty(rows, dtype=torch.float32, device=log_policy.device)
    if rows:
        size = next_power_of_2(blocks)
        _reverse_kl[(rows,)](
            statistics.highest, statistics.total, statistics.differences, log_policy, log_reference, out, rows, blocks,
            size, num_warps=_warps(size),
        )  # fmt: skip
    return out


def log_totals(statistics: BlockStatistics) -> Tensor:
    """Log-sum-exp of each row ``(S, P)``, in float32; not finite where the row is no distribution."""
    sides, rows, blocks = statistics.highest.shape
    out = torch.empty(sides, rows, dtype=torch.float32, device=statistics.highest.device)
    if rows:
        size = next_power_of_2(blocks)
        _log_total[(sides * rows,)](statistics.highest, statistics.total, out, blocks, size, num_warps=_warps(size))
    return out


def top_ids(*logits: Tensor, k: int, statistics: BlockStatistics | None = None) -> Tensor:
    """Ids of the ``k`` largest logits of each row ``(P, V)`` of each side, in increasing order; among equals the lower
    id wins: ``(S, P, k)``.
    """
    rows, vocabulary = check_logits(*logits)
    if not 1 <= k <= vocabulary:
        raise ValueError(f"k={k} is outside 1..{vocabulary} for a vocabulary of {vocabulary} tokens")
    statistics = block_statistics(*logits) if statistics is None else statistics
    sides, _, blocks = statistics.highest.shape
    wanted = min(k, blocks)
    places = torch.empty(sides, rows, wanted, dtype=torch.int32, device=logits[0].device)
    ids = torch.empty(sides, rows, k, dtype=torch.int64, device=logits[0].device)
    if rows:
        unused = UNUSED_BITS[logits[0].dtype]
        size = next_power_of_2(blocks)
        _choose_blocks[(sides * rows,)](
            statistics.highest, places, blocks, wanted, unused, size, num_warps=_warps(size)
        )
        size = next_power_of_2(wanted)
        _choose_tokens[(rows, sides)](
            *_pointers_and_strides(logits), places, ids, rows, vocabulary, wanted, k, unused, size, BLOCK,
            num_warps=_warps(size * BLOCK),
        )  # fmt: skip
    return ids


def _pointers_and_strides(logits: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, int, int]:
    return logits[0], logits[-1], logits[0].stride(0), logits[-1].stride(0)


def side_by_side(logits: Tensor) -> Tensor:
    """The logits with each row's side by side in memory, as the kernels need them; a copy if they are not."""
    return logits if logits.ndim != 2 or logits.stride(1) == 1 else logits.contiguous()


def check_logits(*logits: Tensor) -> tuple[int, int]:
    """Refuse what the kernels cannot read; return positions and vocabulary."""
    for each in logits:
        if each.ndim != 2 or each.dtype not in UNUSED_BITS:
            raise ValueError(
                f"logits of shape {tuple(each.shape)} and type {each.dtype}; the kernels read (positions, vocabulary) "
                f"in float32, float16 or bfloat16: use the functions of wpr.transport.support for others"
            )
        if each.shape[1] > 1 and each.stride(1) != 1:
            raise ValueError(
                f"logits with strides {each.stride()}; the logits of a row must lie side by side: pass them "
                ".contiguous()"
            )
    if len({(each.shape, each.dtype) for each in logits}) != 1:
        shown = " and ".join(f"{tuple(each.shape)} {each.dtype}" for each in logits)
        raise ValueError(f"logits {shown}; both sides of one launch must be of one shape and type")
    return logits[0].shape[0], logits[0].shape[1]


def _warps(elements: int) -> int:
    """Threads enough for about 32 elements each."""
    return min(16, max(4, elements // 1024))


@triton.jit
def side_of(first, second, first_stride, second_stride):
    """The logits and row stride of the side that this program works on."""
    if tl.program_id(1) == 0:
        logits = first
        stride = first_stride
    else:
        logits = second
        stride = second_stride
    return logits, stride


@triton.jit(do_not_specialize=["rows"])
def _statistics(
    first,
    second,
    first_stride,
    second_stride,
    highest,
    total,
    rows,
    vocabulary,
    blocks,
    programs,
    AT_ONCE: tl.constexpr,
    B: tl.constexpr,
):
    logits, stride = side_of(first, second, first_stride, second_stride)
    program = tl.program_id(0)
    row = (program // programs).to(tl.int64)
    block = (program % programs) * AT_ONCE + tl.arange(0, AT_ONCE)
    token = block[:, None] * B + tl.arange(0, B)[None, :]
    x = tl.load(logits + row * stride + token, mask=token < vocabulary, other=-float("inf")).to(tl.float32)
    top = tl.max(x, axis=1)
    shift = tl.where(top == -float("inf"), 0.0, top)
    sums = tl.sum(tl.exp(x - shift[:, None]), axis=1)
    at = (tl.program_id(1) * rows + row) * blocks + block
    tl.store(highest + at, top, mask=block < blocks)
    tl.store(total + at, sums, mask=block < blocks)


@triton.jit(do_not_specialize=["rows"])
def _statistics_of_both(
    policy,
    reference,
    policy_stride,
    reference_stride,
    highest,
    total,
    differences,
    rows,
    vocabulary,
    blocks,
    programs,
    AT_ONCE: tl.constexpr,
    B: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // programs).to(tl.int64)
    block = (program % programs) * AT_ONCE + tl.arange(0, AT_ONCE)
    token = block[:, None] * B + tl.arange(0, B)[None, :]
    inside = token < vocabulary
    x = tl.load(policy + row * policy_stride + token, mask=inside, other=-float("inf")).to(tl.float32)
    y = tl.load(reference + row * reference_stride + token, mask=inside, other=-float("inf")).to(tl.float32)
    top_x = tl.max(x, axis=1)
    top_y = tl.max(y, axis=1)
    shift_x = tl.where(top_x == -float("inf"), 0.0, top_x)
    shift_y = tl.where(top_y == -float("inf"), 0.0, top_y)
    p = tl.exp(x - shift_x[:, None])
    d = tl.where(p == 0, 0.0, (x - y) - (shift_x - shift_y)[:, None])
    at = row * blocks + block
    there = block < blocks
    tl.store(highest + at, top_x, mask=there)
    tl.store(total + at, tl.sum(p, axis=1), mask=there)
    tl.store(differences + at, tl.sum(p * d, axis=1), mask=there)
    at += rows.to(tl.int64) * blocks
    tl.store(highest + at, top_y, mask=there)
    tl.store(total + at, tl.sum(tl.exp(y - shift_y[:, None]), axis=1), mask=there)


@triton.jit(do_not_specialize=["rows", "log_policy", "log_reference"])
def _reverse_kl(highest, total, differences, log_policy, log_reference, out, rows, blocks, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, SIZE)
    inside = block < blocks
    at = row * blocks + block
    other = at + rows.to(tl.int64) * blocks
    log_p = tl.load(log_policy + row)
    log_q = tl.load(log_reference + row)
    top_x = tl.load(highest + at, mask=inside, other=-float("inf"))
    top_y = tl.load(highest + other, mask=inside, other=-float("inf"))
    shift_x = tl.where(top_x == -float("inf"), 0.0, top_x)
    shift_y = tl.where(top_y == -float("inf"), 0.0, top_y)
    sums = tl.load(total + at, mask=inside, other=0.0)
    p = tl.where(sums == 0, 0.0, tl.exp(shift_x - log_p))
    d = tl.load(differences + at, mask=inside, other=0.0) + sums * ((shift_x - shift_y) - (log_p - log_q))
    q = tl.load(total + other, mask=inside, other=0.0) * tl.exp(shift_y - log_q)
    terms = tl.where(p == 0, 0.0, p * (d - sums)) + tl.where(top_y == -float("inf"), 0.0, q)
    tl.store(out + row, tl.sum(terms, axis=0))


@triton.jit
def _log_total(highest, total, out, blocks, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, SIZE)
    inside = block < blocks
    top = tl.load(highest + row * blocks + block, mask=inside, other=-float("inf"))
    sums = tl.load(total + row * blocks + block, mask=inside, other=0.0)
    tl.store(out + row, log_of_sums(top, sums))


@triton.jit
def log_of_sums(top, sums):
    """``log sum_b sums_b exp(top_b)``; -inf if nothing is there, NaN if any part is."""
    shift = tl.max(top, axis=0)
    shift = tl.where(shift == -float("inf"), 0.0, shift)
    return tl.log(tl.sum(sums * tl.exp(top - shift), axis=0)) + shift


@triton.jit
def _choose_blocks(highest, places, blocks, wanted, UNUSED: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, SIZE)
    top = tl.load(highest + row * blocks + block, mask=block < blocks, other=0.0)
    key = tl.where(block < blocks, _ordered(top, UNUSED), -2147483648)
    least = _kth_largest(key, wanted, 32 - UNUSED)
    above = key > least
    equal = (key == least).to(tl.int32)
    places_left = wanted - tl.sum(above.to(tl.int32))
    taken = above | ((equal != 0) & (tl.cumsum(equal, 0) <= places_left))
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(places + row * wanted + place, block, mask=taken)


@triton.jit(do_not_specialize=["rows"])
def _choose_tokens(
    first,
    second,
    first_stride,
    second_stride,
    places,
    ids,
    rows,
    vocabulary,
    wanted,
    k,
    UNUSED: tl.constexpr,
    SIZE: tl.constexpr,
    B: tl.constexpr,
):
    logits, stride = side_of(first, second, first_stride, second_stride)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * rows + row
    slot = tl.arange(0, SIZE)
    block = tl.load(places + at * wanted + slot, mask=slot < wanted, other=0)
    token = block[:, None] * B + tl.arange(0, B)[None, :]
    inside = (token < vocabulary) & (slot < wanted)[:, None]
    x = tl.load(logits + row * stride + token, mask=inside, other=0.0).to(tl.float32)
    key = tl.where(inside, _ordered(x, UNUSED), -2147483648)
    least = _kth_largest(key, k, 32 - UNUSED)
    above = key > least
    equal = (key == least).to(tl.int32)
    places_left = k - tl.sum(above.to(tl.int32))
    taken = above | ((equal != 0) & (_count_up_to(equal) <= places_left))
    place = _count_up_to(taken.to(tl.int32)) - 1
    tl.store(ids + at * k + place, token.to(tl.int64), mask=taken)


@triton.jit
def _ordered(x, UNUSED: tl.constexpr):
    """float32 as integers of the same order; -0 and 0 are one number."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED


@triton.jit
def _kth_largest(key, k, BITS: tl.constexpr):
    """The k-th largest of integers with ``BITS`` bits, sign included."""
    least = tl.where(tl.sum((key >= 0).to(tl.int32)) >= k, 0, -(2 ** (BITS - 2)) * 2)
    for step in range(BITS - 1):
        trial = least + (1 << (BITS - 2 - step))
        least = tl.where(tl.sum((key >= trial).to(tl.int32)) >= k, trial, least)
    return least


@triton.jit
def _count_up_to(flag):
    """How many flags of a matrix are set up to and including each place, row by row."""
    of_row = tl.sum(flag, axis=1)
    return tl.cumsum(flag, 1) + (tl.cumsum(of_row, 0) - of_row)[:, None]
