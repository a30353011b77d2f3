"""Top-k2 truncation of two next-token distributions to one shared support, position by position.

Notation for shapes: ``P`` positions, ``V`` vocabulary, ``n = 2 * k2 + 2`` support entries.

The support of a position holds the ``k2`` most likely tokens of the policy, the ``k2`` most likely of the reference,
the sampled token, and one dummy that carries what is left of each distribution. Duplicates are merged, so that fewer
than ``n`` entries may be in use; the others are padding: no mass in either distribution. Both distributions are read at
all entries. Nothing depends on the other positions of the batch.

Everything stays in log space. The leftover mass is the log-sum-exp of the tokens *outside* the support, not one minus
the mass inside: when the support covers all but 1e-12 of a distribution, that 1e-12 is right to the last digit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_TOKEN = -1
"""The id of the dummy and of padding: entries that are not tokens and have no neighbours."""

_ELEMENTS_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits converted to working precision in one go: on a CPU few enough to stay in the cache."""


@dataclass(frozen=True)
class Support:
    """Two distributions on one small support.

    ids: ``(P, n)`` token ids in increasing order, then ``NO_TOKEN`` for padding; the last entry is the dummy.
    log_policy, log_reference: ``(P, n)`` log masses, each row summing to one; ``-inf`` on padding.
    sampled: ``(P,)`` index of the sampled token within its row.
    """

    ids: Tensor
    log_policy: Tensor
    log_reference: Tensor
    sampled: Tensor

    def __getitem__(self, rows: slice | Tensor) -> Support:
        """The support of some of the positions."""
        return Support(self.ids[rows], self.log_policy[rows], self.log_reference[rows], self.sampled[rows])

    @staticmethod
    def join(parts: Sequence[Support]) -> Support:
        """The supports of several groups of positions, one after the other."""
        if len(parts) == 1:
            return parts[0]
        names = ("ids", "log_policy", "log_reference", "sampled")
        return Support(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    @property
    def size(self) -> Tensor:
        """Entries in use, the dummy included: ``(P,)``."""
        return (self.ids != NO_TOKEN).sum(-1) + 1

    @property
    def log_of_sampled(self) -> Tensor:
        """Log-probability of the sampled tokens under the policy: ``(P,)``."""
        return self.log_policy.gather(-1, self.sampled.unsqueeze(-1)).squeeze(-1)


def truncate(policy_logits: Tensor, reference_logits: Tensor, tokens: Tensor, k2: int) -> Support:
    """Reduce logits ``(P, V)`` of both models and the sampled tokens ``(P,)`` to a shared `Support`.

    Works in float32, or in float64 if either input is float64. ``-inf`` logits (masked vocabularies) are masses of
    zero. A row without a finite log-sum-exp (a NaN, a +inf, or nothing but -inf) is refused, naming the positions.
    """
    dtype = working_dtype(policy_logits, reference_logits)
    parts = []
    for part in row_slices(policy_logits):
        parts.append(
            _truncate_rows(
                policy_logits[part].to(dtype), reference_logits[part].to(dtype), tokens[part], k2, part.start
            )
        )
    return Support.join(parts)


def row_slices(logits: Tensor) -> Iterator[slice]:
    """Slices of rows whose logits are converted to working precision together; one empty slice if there are no rows."""
    rows, vocabulary = logits.shape
    step = max(1, _ELEMENTS_AT_ONCE.get(logits.device.type, _ELEMENTS_AT_ONCE["cuda"]) // max(1, vocabulary))
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(start + step, rows))


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _truncate_rows(policy: Tensor, reference: Tensor, tokens: Tensor, k2: int, first: int) -> Support:
    ids = torch.cat([top_ids(policy, k2), top_ids(reference, k2), tokens.unsqueeze(-1)], dim=-1)
    ids = _merge_duplicates(ids, policy.shape[-1])
    return Support(
        ids=torch.nn.functional.pad(ids, (0, 1), value=NO_TOKEN),
        log_policy=log_masses(policy, ids, "policy", first),
        log_reference=log_masses(reference, ids, "reference", first),
        sampled=(ids == tokens.unsqueeze(-1)).to(torch.uint8).argmax(-1),
    )


def top_ids(logits: Tensor, k: int) -> Tensor:
    """Ids of the ``k`` largest logits of each row ``(P, V)``, in no particular order; among equals the lower id wins:
    ``(P, k)``.

    ``torch.topk`` leaves open which of several equal values it returns, and equal values at the boundary are the rule
    with bf16 logits. All entries above the k-th value are certain; the rest of the ``k`` places goes to the entries
    equal to it, lowest ids first.
    """
    values, ids = logits.topk(k, dim=-1)
    boundary = values[:, -1:]
    certain = values > boundary
    open_places = k - certain.sum(-1)
    equal = logits == boundary
    unclear = equal.sum(-1) > open_places
    if not unclear.any():
        return ids
    rows, columns = (equal & unclear.unsqueeze(-1)).nonzero().unbind(-1)  # in order of row, then of id
    first_of_row = torch.searchsorted(rows, rows)
    rank = torch.arange(len(rows), device=rows.device) - first_of_row
    chosen = rank < open_places[rows]
    place = certain.sum(-1)[rows[chosen]] + rank[chosen]  # topk sorts, so the certain entries come first
    ids[rows[chosen], place] = columns[chosen]
    return ids


def _merge_duplicates(ids: Tensor, vocabulary: int) -> Tensor:
    """Each row's distinct ids in increasing order, padded at the end with ``NO_TOKEN``: ``(P, m)`` to ``(P, m)``."""
    ids = ids.sort(dim=-1).values
    ids[:, 1:][ids[:, 1:] == ids[:, :-1].clone()] = vocabulary
    ids = ids.sort(dim=-1).values
    return torch.where(ids == vocabulary, NO_TOKEN, ids)


def log_masses(logits: Tensor, ids: Tensor, name: str = "the", first: int = 0) -> Tensor:
    """Log masses at ``ids`` ``(P, m)``, and of all other tokens together in a last column: ``(P, m + 1)``."""
    padding = ids == NO_TOKEN
    inside = logits.gather(-1, ids.clamp_min(0)).masked_fill_(padding, -torch.inf)
    # Padding repeats a token of the row, so that excluding it again changes nothing.
    outside = logits.scatter(-1, torch.where(padding, ids[:, :1], ids), -torch.inf)
    leftover = outside.logsumexp(-1, keepdim=True)
    nothing = leftover.detach() == -torch.inf
    if leftover.requires_grad and nothing.any():
        # The derivative of a log-sum-exp over nothing but -inf is 0/0: where a vocabulary mask leaves no token outside,
        # the leftover mass is a constant.
        leftover = outside.masked_fill(nothing, 0).logsumexp(-1, keepdim=True).masked_fill(nothing, -torch.inf)
    both = torch.cat([inside, leftover], dim=-1)
    total = both.logsumexp(-1, keepdim=True)
    refuse_rows_without_total(total.squeeze(-1), name, first)
    return both - total


def refuse_rows_without_total(log_total: Tensor, name: str, first: int = 0) -> None:
    """Raise if a row's log-sum-exp ``(P,)`` is not finite, which says that its logits hold NaN or +inf, or no finite
    value at all.
    """
    bad = (~log_total.isfinite()).nonzero().squeeze(-1)
    if len(bad):
        shown = ", ".join(str(first + int(row)) for row in bad[:8]) + (", ..." if len(bad) > 8 else "")
        raise ValueError(
            f"{name} logits are not a distribution at {len(bad)} position(s): {shown} (log-sum-exp "
            f"{log_total[bad[0]].item()}); "
            "logits must be finite or -inf, with at least one finite value a row: look for an overflow in the model "
            "at these positions"
        )
