"""The shared support of two next-token distributions, put together on the device; same result as `transport.support`.

Notation for shapes: ``P`` positions, ``V`` vocabulary, ``B`` blocks of 64 tokens, ``n = 2 * k2 + 2`` support entries.

Merging. Both top lists arrive in increasing order, so an entry's place in the merged list is a count: of the entries of
its own list before it, of those of the other list that are smaller and not duplicates, and the sampled token. All
counts are sums over a k2 x k2 table of comparisons, which never leaves the chip. Duplicates go to the policy's list.

Leftover mass. It is the log-sum-exp of the tokens outside the support, never one minus the inside. Most blocks hold no
token of the support: their sums are known from the full read. Each block that does is read again without its members.
Members are marked as bits, one int64 a block. The block is read by the entry whose bit is its lowest.

Nothing waits for the host. A row that is no distribution shows in its `log_total`, which the caller checks when it
likes.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped,import-not-found"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from wpr.transport.kernels import cdiv, next_power_of_2
from wpr.transport.kernels.vocabulary import (
    BLOCK,
    BlockStatistics,
    block_statistics,
    check_logits,
    reverse_kl,
    side_by_side,
    side_of,
    top_ids,
)
from wpr.transport.support import NO_TOKEN, Support, refuse_rows_without_total

LARGEST_K2 = 1024
"""A table of k2 x k2 comparisons is at most 2^20 entries, Triton's limit of one tensor."""

_BYTES_AT_ONCE = 256 << 20
"""Of block statistics and marks: positions are reduced in slices of about this size."""


def truncate(policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor, k2: int) -> Support:
    """Same as `transport.support.truncate`, in float32; the two logits may be of different types. Token ids are not
    checked, see `reduce_logits`.
    """
    reduced = reduce_logits(policy_logits, reference_logits, tokens, k2)
    refuse_rows_without_total(reduced.log_policy, "policy")
    refuse_rows_without_total(reduced.log_reference, "reference")
    return reduced.support


@dataclass(frozen=True)
class ReducedLogits:
    """The support of each position, and per position ``(P,)`` the log-sum-exp of both rows and, if asked for, the
    reverse KL of the whole distributions.
    """

    support: Support
    log_policy: Tensor
    log_reference: Tensor
    reverse_kl: Tensor | None


def reduce_logits(
    policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor, k2: int, with_kl: bool = False
) -> ReducedLogits:
    """All that is kept of logits, in one full read of them. Rows without a finite log-sum-exp are not refused here, and
    their support means nothing.

    policy_logits, reference_logits: ``(P, V)`` in float32, float16 or bfloat16. tokens: ``(P,)``; an id outside 0..V-1
    is taken for the nearest within, and is not refused here either.
    """
    policy_logits, reference_logits = side_by_side(policy_logits), side_by_side(reference_logits)
    rows, vocabulary = check_logits(policy_logits)
    if k2 > LARGEST_K2:
        raise ValueError(
            f"k2={k2} exceeds {LARGEST_K2}, the most that the kernels merge; use wpr.transport.support.truncate"
        )
    mixed = policy_logits.dtype != reference_logits.dtype
    # Of two types, both become float32, a few rows at a time.
    step = max(1, _BYTES_AT_ONCE // (8 * vocabulary if mixed else 24 * cdiv(vocabulary, BLOCK)))
    out: ReducedLogits | None = None
    for start in range(0, max(rows, 1), step):
        part = slice(start, min(start + step, rows))
        both = (policy_logits, reference_logits) if step >= rows else (policy_logits[part], reference_logits[part])
        if mixed:
            both = both[0].float(), both[1].float()
        statistics = block_statistics(*both, differences=with_kl)
        if out is None:  # now that the device has work
            out, masses, totals = _empty(rows, 2 * k2 + 2, policy_logits.device, with_kl)
        tops = top_ids(*both, k=k2, statistics=statistics)
        marks = _merge(tops, tokens[part], vocabulary, out.support.ids[part], out.support.sampled[part])
        _masses(both, statistics, out.support.ids[part], marks, masses[:, part], totals[:, part])
        if out.reverse_kl is not None:
            out.reverse_kl[part] = reverse_kl(statistics, totals[0, part], totals[1, part])
    assert out is not None
    return out


def _empty(rows: int, n: int, device: torch.device, with_kl: bool) -> tuple[ReducedLogits, Tensor, Tensor]:
    """Where the results go, and the masses ``(2, P, n)`` and totals ``(2, P)`` of both sides as one."""
    ids = torch.empty(rows, n, dtype=torch.int64, device=device)
    masses = torch.empty(2, rows, n, dtype=torch.float32, device=device)
    totals = torch.empty(2, rows, dtype=torch.float32, device=device)
    sampled = torch.empty(rows, dtype=torch.int64, device=device)
    divergence = torch.empty(rows, dtype=torch.float32, device=device) if with_kl else None
    support = Support(ids, masses[0], masses[1], sampled)
    return ReducedLogits(support, totals[0], totals[1], divergence), masses, totals


def log_masses(logits: Tensor, ids: Tensor, name: str = "the", first: int = 0) -> Tensor:
    """Same as `transport.support.log_masses`, in float32: the log masses at distinct increasing ``ids`` ``(P, m)``,
    and of all other tokens together in a last column ``(P, m + 1)``.
    """
    rows, vocabulary = check_logits(logits)
    statistics = block_statistics(logits)
    padded = torch.nn.functional.pad(ids, (0, 1), value=NO_TOKEN)
    masses = torch.empty(1, *padded.shape, dtype=torch.float32, device=logits.device)
    total = torch.empty(1, rows, dtype=torch.float32, device=logits.device)
    marks = torch.zeros(rows, cdiv(vocabulary, BLOCK), dtype=torch.int64, device=logits.device)
    token = ids.clamp_min(0)
    bits = torch.where(ids == NO_TOKEN, 0, torch.ones_like(ids) << (token % BLOCK))
    marks.scatter_add_(1, token // BLOCK, bits)  # distinct ids have distinct bits: the sum is the union
    _masses((logits,), statistics, padded, marks, masses, total)
    refuse_rows_without_total(total[0], name, first)
    return masses[0]


def _merge(tops: Tensor, tokens: Tensor, vocabulary: int, ids: Tensor, sampled: Tensor) -> Tensor:
    """Write the merged ids of tops ``(2, P, k2)`` and the place of the sampled token; return the marks ``(P, B)``."""
    _, rows, k2 = tops.shape
    blocks = cdiv(vocabulary, BLOCK)
    marks = torch.zeros(rows, blocks, dtype=torch.int64, device=ids.device)
    if rows:
        size = next_power_of_2(k2)
        _merge_kernel[(rows,)](
            *(tops[0], tops[1], tokens.contiguous(), ids, sampled, marks, k2, vocabulary, blocks),
            *(size, next_power_of_2(2 * k2 + 2), BLOCK),
            num_warps=2,
        )
    return marks


def _masses(
    logits: tuple[Tensor, ...],
    statistics: BlockStatistics,
    ids: Tensor,
    marks: Tensor,
    masses: Tensor,
    totals: Tensor,
) -> None:
    """Write log masses ``(S, P, n)`` at ids ``(P, n)``, the last of them the leftover, and log totals ``(S, P)``."""
    rows, vocabulary = logits[0].shape
    n = ids.shape[1]
    if rows:
        blocks = marks.shape[1]
        _masses_kernel[(rows, len(logits))](
            *(logits[0], logits[-1], logits[0].stride(0), logits[-1].stride(0)),
            *(statistics.highest, statistics.total, ids, marks, masses, totals),
            *(rows, masses.stride(0), totals.stride(0), vocabulary, blocks, n),
            *(next_power_of_2(blocks), next_power_of_2(n), min(64, next_power_of_2(n)), BLOCK),
            num_warps=4 if blocks <= 2048 else 8,
        )


@triton.jit(do_not_specialize=["reference", "tokens", "sampled"])
def _merge_kernel(
    policy,
    reference,
    tokens,
    ids,
    sampled,
    marks,
    k2,
    vocabulary,
    blocks,
    SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
    B: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = 2 * k2 + 2
    place = tl.arange(0, SIZE)
    inside = place < k2
    # What is beyond a list is larger than every token, and different in the two lists.
    own = tl.load(policy + row * k2 + place, mask=inside, other=2147483646).to(tl.int32)
    other = tl.load(reference + row * k2 + place, mask=inside, other=2147483647).to(tl.int32)
    token = tl.minimum(tl.maximum(tl.load(tokens + row), 0), vocabulary - 1).to(tl.int32)
    double = tl.max((own[:, None] == other[None, :]).to(tl.int32), axis=0) != 0
    new = inside & (double == 0)
    token_known = tl.max((own == token).to(tl.int32), axis=0) + tl.max((other == token).to(tl.int32), axis=0)
    token_new = (token_known == 0).to(tl.int32)
    smaller = other[None, :] < own[:, None]
    own_place = place + tl.sum((smaller & new[None, :]).to(tl.int32), axis=1) + token_new * (token < own).to(tl.int32)
    new_before = tl.cumsum(new.to(tl.int32), 0) - new.to(tl.int32)
    larger = (own[:, None] < other[None, :]).to(tl.int32)
    other_place = new_before + tl.sum(larger, axis=0) + token_new * (token < other).to(tl.int32)
    token_place = tl.sum((inside & (own < token)).to(tl.int32), axis=0) + tl.sum(
        (new & (other < token)).to(tl.int32), axis=0
    )
    used = k2 + tl.sum(new.to(tl.int32), axis=0) + token_new

    base = ids + row * n
    tl.store(base + own_place, own.to(tl.int64), mask=inside)
    tl.store(base + other_place, other.to(tl.int64), mask=new)
    tl.store(base + token_place, token.to(tl.int64))  # if it is known, this is its place already
    entry = tl.arange(0, ENTRIES)
    nothing = tl.full([ENTRIES], -1, tl.int64)
    tl.store(base + entry, nothing, mask=(entry >= used) & (entry < n))
    tl.store(sampled + row, token_place.to(tl.int64))

    # Distinct tokens have distinct bits, so that adding them is setting them.
    one = tl.full([SIZE], 1, tl.int64)
    marks += row * blocks
    tl.atomic_add(marks + own // B, one << (own % B).to(tl.int64), mask=inside)
    tl.atomic_add(marks + other // B, one << (other % B).to(tl.int64), mask=new)
    tl.atomic_add(marks + token // B, token_new.to(tl.int64) << (token % B).to(tl.int64))


@triton.jit(do_not_specialize=["masses", "log_total", "rows", "masses_stride", "total_stride"])
def _masses_kernel(
    first,
    second,
    first_stride,
    second_stride,
    highest,
    total,
    ids,
    marks,
    masses,
    log_total,
    rows,
    masses_stride,
    total_stride,
    vocabulary,
    blocks,
    n,
    BLOCKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    B: tl.constexpr,
):
    logits, stride = side_of(first, second, first_stride, second_stride)
    side = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    ids += row * n
    marks += row * blocks
    highest += (side * rows + row) * blocks
    total += (side * rows + row) * blocks

    top, rest = _outside(logits, highest, total, ids, marks, vocabulary, blocks, n, BLOCKS, AT_ONCE, B)
    rest_shift = tl.where(top == -float("inf"), 0.0, top)

    # Everything relative to the largest of all, so that logits of any size leave masses with all their digits.
    entry = tl.arange(0, ENTRIES)
    token = tl.load(ids + entry, mask=entry < n, other=-1)
    x = tl.load(logits + token, mask=token >= 0, other=-float("inf")).to(tl.float32)
    top = tl.maximum(top, tl.max(x, axis=0))
    shift = tl.where(top == -float("inf"), 0.0, top)
    x = tl.where(entry == n - 1, tl.log(rest) + (rest_shift - shift), x - shift)
    log_sum = tl.log(tl.sum(tl.exp(x), axis=0))
    tl.store(masses + side * masses_stride + row * n + entry, x - log_sum, mask=entry < n)
    tl.store(log_total + side * total_stride + row, log_sum + shift)


@triton.jit
def _outside(
    logits,
    highest,
    total,
    ids,
    marks,
    vocabulary,
    blocks,
    n,
    BLOCKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    B: tl.constexpr,
):
    """The largest logit outside the support, and the sum of all their exponentials relative to it."""
    # Blocks without a member: their sums are known.
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    untouched = inside & (tl.load(marks + block, mask=inside, other=0) == 0)
    tops = tl.load(highest + block, mask=untouched, other=-float("inf"))
    sums = tl.load(total + block, mask=untouched, other=0.0)
    top = tl.max(tops, axis=0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    rest = tl.sum(sums * tl.exp(tops - shift), axis=0)

    # The others, without their members; running maximum and sum.
    for start in range(0, n - 1, AT_ONCE):
        entry = start + tl.arange(0, AT_ONCE)
        token = tl.load(ids + entry, mask=entry < n - 1, other=-1)
        member = token >= 0
        place = tl.where(member, token, 0)
        mark = tl.load(marks + place // B, mask=member, other=0)
        reads = member & ((mark & -mark) == (tl.full([AT_ONCE], 1, tl.int64) << (place % B)))
        within = tl.arange(0, B)
        others = ((mark[:, None] >> within[None, :].to(tl.int64)) & 1) == 0
        neighbour = (place // B * B)[:, None] + within[None, :]
        mask = reads[:, None] & others & (neighbour < vocabulary)
        x = tl.load(logits + neighbour, mask=mask, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(tl.max(x, axis=1), axis=0))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        rest = rest * tl.exp(top - shift) + tl.sum(tl.sum(tl.exp(x - shift), axis=1), axis=0)
        top = new_top
    return top, rest
