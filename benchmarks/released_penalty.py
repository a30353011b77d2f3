"""The released algorithm's way to the penalty, implemented here: the baseline of `benchmarks.kernels`.

One sparse V x V kernel matrix holds exp(-lam C) of each token's k1 nearest others, mirrored. A micro-batch shares one
support: all tokens that are among the k2 most likely of any position under either model, the sampled tokens, and a
dummy. Softmax over the whole vocabulary, float32, scaling domain, T iterations of sparse products for all positions
together.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = 1e-16


def random_kernel(groups: Tensor, neighbours: int) -> Tensor:
    """A sparse kernel of the right size and shape: ``neighbours`` partners a token, mirrored, ones on the diagonal.
    Partners are drawn from a token's own group ``(V,)``, as real neighbours are.
    """
    device, vocabulary = groups.device, len(groups)
    generator = torch.Generator(device=device).manual_seed(0)
    by_group = groups.argsort()
    sizes = groups.bincount()
    first = sizes.cumsum(0) - sizes
    rows = torch.arange(vocabulary, device=device).repeat_interleave(neighbours)
    place = torch.rand(len(rows), generator=generator, device=device)
    own = groups[rows]
    columns = by_group[first[own] + (place * sizes[own]).long().clamp_max_(sizes[own] - 1)]
    del place, own
    diagonal = torch.arange(vocabulary, device=device)
    indices = torch.stack([torch.cat([rows, columns, diagonal]), torch.cat([columns, rows, diagonal])])
    del rows, columns
    values = torch.rand(indices.shape[1], generator=generator, device=device) * 0.01
    values[-vocabulary:] = 1
    return torch.sparse_coo_tensor(indices, values, (vocabulary, vocabulary)).coalesce().to_sparse_csr()


@torch.no_grad()
def released_penalty(
    kernel: Tensor,
    policy_logits: Tensor,
    reference_logits: Tensor,
    tokens: Tensor,
    k2: int,
    lam: float,
    iterations: int,
) -> Tensor:
    """``(1/lam) log u`` of the sampled tokens ``(P,)``."""
    p, q = policy_logits.float().softmax(-1), reference_logits.float().softmax(-1)
    shared = torch.cat([p.topk(k2).indices.flatten(), q.topk(k2).indices.flatten(), tokens]).unique()
    inside = _submatrix(kernel, shared)
    a, b = (_with_leftover(x[:, shared]).T.contiguous() for x in (p, q))
    del p, q
    v = torch.ones_like(b)
    for _ in range(iterations):
        u = a / (inside @ v + FLOOR)
        v = b / (inside @ u + FLOOR)
    place = torch.searchsorted(shared, tokens)
    return (u.gather(0, place.unsqueeze(0)).squeeze(0) + FLOOR).log() / lam


def _with_leftover(masses: Tensor) -> Tensor:
    return torch.cat([masses, (1 - masses.sum(-1, keepdim=True)).clamp_min(0)], dim=-1)


def _submatrix(kernel: Tensor, shared: Tensor) -> Tensor:
    """Rows and columns ``shared`` of a CSR matrix, and one more row and column for the dummy."""
    size = len(shared)
    begin, end = kernel.crow_indices()[shared], kernel.crow_indices()[shared + 1]
    row = torch.arange(size, device=shared.device).repeat_interleave(end - begin)
    first = (end - begin).cumsum(0) - (end - begin)
    place = torch.arange(len(row), device=shared.device) - first[row] + begin[row]
    known = torch.full((kernel.shape[0],), -1, device=shared.device).scatter_(
        0, shared, torch.arange(size, device=shared.device)
    )
    column = known[kernel.col_indices()[place]]
    kept = column >= 0
    row, column, value = row[kept], column[kept], kernel.values()[place[kept]]
    counts = torch.zeros(size + 2, dtype=torch.long, device=shared.device)
    counts[1:-1] = row.bincount(minlength=size)
    counts[-1] = 1
    dummy = torch.tensor([size], device=shared.device)
    return torch.sparse_csr_tensor(
        counts.cumsum(0), torch.cat([column, dummy]), torch.cat([value, value.new_ones(1)]), (size + 1, size + 1)
    )
