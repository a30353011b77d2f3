"""Costs from the kernel against the geometry in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.problems import clustered_embeddings
from wpr.transport.geometry import RADIUS_SLACK, TokenGeometry
from wpr.transport.support import NO_TOKEN

pytestmark = pytest.mark.needs("triton")


def supports(positions: int, n: int, vocabulary: int, device: str, seed: int = 0) -> Tensor:
    """Ids in increasing order with padding after them, the dummy last."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((positions, n), NO_TOKEN)
    for row in ids:
        used = int(torch.randint(1, n, (), generator=generator))
        row[:used] = torch.randperm(vocabulary, generator=generator)[:used].sort().values
    return ids.to(device)


def check(
    weight: Tensor, ids: Tensor, metric: str, neighbours: int | None, rtol: float = 2e-6, atol: float | None = None
) -> Tensor:
    from wpr.transport.kernels.cost import cost

    geometry = TokenGeometry.from_embeddings(weight, metric, neighbours, progress=False)
    exact = TokenGeometry.from_embeddings(weight.double(), metric, neighbours, scale=geometry.scale, progress=False)
    ours = cost(geometry, ids)
    assert torch.equal(ours, ours.mT)
    # What solvers read is the same without the rest.
    read = ids >= 0
    read[:, -1] = True
    pairs = read.unsqueeze(-1) & read.unsqueeze(-2)
    assert torch.equal(cost(geometry, ids, fill=False)[pairs], ours[pairs])
    if atol is None:
        torch.testing.assert_close(ours.double(), exact.cost(ids), rtol=rtol, atol=0)
    else:  # rows of length one, rounded to float32: it is the distance that has an absolute error
        torch.testing.assert_close(ours.double().sqrt(), exact.cost(ids).sqrt(), rtol=rtol, atol=atol)
    return ours


@pytest.mark.parametrize(("width", "n", "positions"), [(7, 4, 3), (33, 12, 3), (64, 68, 2), (20, 130, 2), (33, 258, 1)])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_rows(width: int, n: int, positions: int, metric: str, dtype: torch.dtype, device: str) -> None:
    weight = clustered_embeddings(words=100, size=width).to(dtype).to(device)
    ours = check(weight, supports(positions, n, 300, device), metric, 40, rtol=2e-5)
    assert not ours.isnan().any()


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_near_duplicates_keep_their_digits(metric: str, device: str) -> None:
    """Tokens at relative distances from 1e-1 to 1e-6 of each other, and exact copies."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(1, 48, generator=generator)
    shrink = torch.logspace(-1, -6, 60).unsqueeze(-1)
    weight = torch.cat(
        [base + shrink * torch.randn(60, 48, generator=generator), torch.randn(60, 48, generator=generator)]
    )
    weight[70:75] = weight[60:65]
    ids = supports(2, 100, 120, device)
    ours = check(weight.to(device), ids, metric, None, atol=2e-7 if metric == "cosine" else None)
    assert (ours[ours > 0] < 1e-4).any()


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_radius_decides_as_in_float64(metric: str, dtype: torch.dtype, device: str) -> None:
    """Wide rows, all about equally far from each other, and radii that miss a distance by less than float32 rounds."""
    width = 2100 if device == "cuda" else 200  # the interpreter takes a minute for 1,000 columns of bf16
    weight = torch.randn(200, width, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    geometry = TokenGeometry.from_embeddings(weight, metric, 20, progress=False)
    exact = replace(geometry, embeddings=weight.double())
    everyone = torch.arange(200, device=device).unsqueeze(0)
    free = replace(exact, radius=torch.full_like(geometry.radius, torch.inf))
    distances = free.cost(everyone, scaled=False)[0].kthvalue(50, dim=-1).values
    miss = 1 + 2e-7 * (torch.arange(200, device=device) % 5 - 2)
    radius = (distances / (1 + RADIUS_SLACK[torch.float32]) * miss).float()
    ids = supports(2, 150, 200, device)
    geometry, exact = replace(geometry, radius=radius), replace(exact, radius=radius)
    from wpr.transport.kernels.cost import cost

    ours, theirs = cost(geometry, ids), exact.cost(ids)
    assert torch.equal(ours, ours.mT)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=0)


def test_rows_of_zeros_have_no_direction(device: str) -> None:
    weight = clustered_embeddings(words=20)
    weight[5] = 0
    check(weight.to(device), torch.tensor([[3, 4, 5, 6, NO_TOKEN]], device=device), "cosine", None, rtol=2e-5)


def test_no_rows_and_nothing_but_the_dummy(device: str) -> None:
    weight = clustered_embeddings().to(device)
    check(weight, torch.full((2, 6), NO_TOKEN, device=device), "euclidean", 5)
    check(weight, torch.empty(0, 6, dtype=torch.int64, device=device), "euclidean", 5)


def test_a_users_metric_is_refused(device: str) -> None:
    from wpr.transport.kernels.cost import cost

    geometry = TokenGeometry.from_embeddings(clustered_embeddings().to(device), torch.cdist, 5, progress=False)
    with pytest.raises(ValueError, match="is a torch function; use TokenGeometry.cost"):
        cost(geometry, torch.tensor([[1, 2]], device=device))
