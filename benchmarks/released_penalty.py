"""The released algorithm's way to the penalty, written anew: the baseline of `benchmarks.kernels`.

One sparse V x V kernel matrix holds exp(-lam C) of each token's k1 nearest others, mirrored. A micro-batch shares one
support: all tokens that are among the k2 likeliest of any position under either model, the sampled tokens, and a dummy.
Softmax over the whole vocabulary, float32, scaling domain, T iterations of sparse products for all positions together.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = 1e-16


def random_kernel(vocabulary: int, neighbours: int, device: torch.device) -> Tensor:
    """A sparse kernel of the right size and shape: ``neighbours`` random partners a token, mirrored, ones on the
    diagonal. The time of sparse products depends on how many entries there are, hardly on which.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    rows = torch.arange(vocabulary, device=device).repeat_interleave(neighbours)
    columns = torch.randint(vocabulary, (vocabulary * neighbours,), generator=generator, device=device)
    diagonal = torch.arange(vocabulary, device=device)
    indices = torch.stack([torch.cat([rows, columns, diagonal]), torch.cat([columns, rows, diagonal])])
    values = torch.rand(indices.shape[1], generator=generator, device=device) * 0.01
    values[-vocabulary:] = 1
    return torch.sparse_coo_tensor(indices, values, (vocabulary, vocabulary)).coalesce()


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
    inside = kernel.index_select(0, shared).index_select(1, shared).coalesce()
    size = len(shared)
    dummy = torch.tensor([[size], [size]], device=tokens.device)
    inside = torch.sparse_coo_tensor(
        torch.cat([inside.indices(), dummy], 1),
        torch.cat([inside.values(), inside.values().new_ones(1)]),
        (size + 1,) * 2,
    ).to_sparse_csr()
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
