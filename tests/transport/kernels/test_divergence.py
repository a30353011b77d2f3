"""Sums over the vocabulary against the torch formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wpr.regularizers.f_divergences import FDivergence
from wpr.regularizers.registry import REGULARIZERS

pytestmark = pytest.mark.needs("triton")

NAMES = [
    "reverse-kl",
    "forward-kl",
    "jensen-shannon",
    "alpha",
    "total-variation",
    "chi-squared",
    "squared-hellinger",
]
"""Those that have a kernel."""


def test_all_of_them() -> None:
    from wpr.transport.kernels.divergence import KINDS

    assert [*NAMES, "kl-and-entropy"] == list(KINDS)


def pair(positions: int, vocabulary: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    reference = 3 * torch.randn(positions, vocabulary, generator=generator)
    policy = reference + 0.7 * torch.randn(positions, vocabulary, generator=generator)
    return policy.to(dtype).to(device), reference.to(dtype).to(device)


def slow_sums(divergence: FDivergence, policy: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    log_p, log_q = policy.double().log_softmax(-1), reference.double().log_softmax(-1)
    impossible = (log_p == -torch.inf) & (log_q == -torch.inf)
    both = divergence.terms(log_p, log_q), divergence.offset_terms(log_p, log_q)
    terms, offset = (x.masked_fill(impossible, 0).sum(-1) for x in both)
    return terms, offset


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("positions", "vocabulary"), [(1, 97), (3, 5000)])
def test_divergences(name: str, positions: int, vocabulary: int, device: str) -> None:
    from wpr.transport.kernels.divergence import divergence_sums

    policy, reference = pair(positions, vocabulary, torch.bfloat16, device)
    policy[0, 5:9] = -torch.inf  # a masked vocabulary
    if name not in ("forward-kl",):
        policy[0, 30] = -torch.inf  # impossible for the policy only
    reference[0, 5:9] = -torch.inf
    terms, offset = slow_sums(REGULARIZERS[name](), policy, reference)
    sums = divergence_sums(policy, reference, name)
    torch.testing.assert_close(sums.terms.double(), terms, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(sums.offset.double(), offset, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_between_equals(name: str, device: str) -> None:
    from wpr.transport.kernels.divergence import divergence_sums

    policy, _ = pair(2, 401, torch.float32, device)
    sums = divergence_sums(policy, policy, name)
    torch.testing.assert_close(sums.terms, torch.zeros_like(sums.terms), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_ratios_beyond_float32(name: str, device: str) -> None:
    """exp(d) overflows from 89 on, exp(-d) underflows only from 104 on: in between a product of both is no number."""
    from wpr.transport.kernels.divergence import divergence_sums

    policy, reference = (x.to(device) for x in torch.zeros(2, 3, 97))
    policy[0, 3], reference[1, 3], policy[2, 3], reference[2, 9] = 95, 95, 95, 95
    sums, (terms, offset) = divergence_sums(policy, reference, name), slow_sums(REGULARIZERS[name](), policy, reference)
    for ours, exact in ((sums.terms, terms), (sums.offset, offset)):
        beyond = exact.abs() > torch.finfo(torch.float32).max  # chi-squared, where the reference has 1e-41
        torch.testing.assert_close(ours.double(), torch.where(beyond, exact * torch.inf, exact), rtol=2e-5, atol=2e-6)


def test_kl_and_entropy(device: str) -> None:
    from wpr.transport.kernels.divergence import divergence_sums

    policy, reference = pair(3, 1271, torch.float32, device)
    policy[1, 100:] = -torch.inf
    sums = divergence_sums(policy, reference, "kl-and-entropy")
    log_p, log_q = policy.double().log_softmax(-1), reference.double().log_softmax(-1)
    p = log_p.exp()
    kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    torch.testing.assert_close(sums.terms.double(), kl, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums.offset.double(), entropy, rtol=1e-5, atol=1e-6)


def test_no_rows_and_an_unknown_kind(device: str) -> None:
    from wpr.transport.kernels.divergence import divergence_sums

    nothing = torch.empty(0, 97, device=device)
    assert divergence_sums(nothing, nothing, "reverse-kl").terms.shape == (0,)
    with pytest.raises(ValueError, match="kind='kl' is unknown; use one of reverse-kl"):
        divergence_sums(nothing, nothing, "kl")
