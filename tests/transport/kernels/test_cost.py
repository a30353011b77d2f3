"""Costs from the kernel against the geometry in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.problems import clustered_embeddings
from wpr.transport.geometry import RADIUS_SLACK, TokenGeometry
from wpr.transport.support import NO_TOKEN

pytestmark = pytest.mark.needs("triton")


def supports(tokens: tuple[int, ...], n: int, vocabulary: int, device: str) -> Tensor:
    """So many ids for each position, in increasing order with padding after them, the dummy last."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.full((len(tokens), n), NO_TOKEN)
    for row, used in zip(ids, tokens, strict=True):
        row[:used] = torch.randperm(vocabulary, generator=generator)[:used].sort().values
    return ids.to(device)


def check(
    weight: Tensor,
    ids: Tensor,
    metric: str,
    neighbours: int | None,
    rtol: float = 2e-6,
    atol: float | None = None,
    **options: Any,
) -> Tensor:
    from wpr.transport.kernels.cost import cost

    options |= {"metric": metric, "neighbours": neighbours, "progress": False}
    geometry = TokenGeometry.from_embeddings(weight, **options)
    exact = TokenGeometry.from_embeddings(weight.double(), scale=geometry.scale, **options)
    torch.testing.assert_close(geometry.radius.double(), exact.radius, rtol=1e-6, atol=0)
    exact = replace(exact, radius=geometry.radius)  # with the slack of float32, which may let one more pair in
    ours = cost(geometry, ids)
    assert torch.equal(ours, ours.mT)
    # What solvers read is the same without the rest.
    read = ids >= 0
    read[:, -1] = True
    pairs = read.unsqueeze(-1) & read.unsqueeze(-2)
    assert torch.equal(cost(geometry, ids, fill=False)[pairs], ours[pairs])
    if atol is None:  # but what float64 makes of two equal rows
        torch.testing.assert_close(ours.double(), exact.cost(ids), rtol=rtol, atol=1e-12)
    else:  # rows of length one, rounded to float32: it is the distance that has an absolute error
        torch.testing.assert_close(ours.double().sqrt(), exact.cost(ids).sqrt(), rtol=rtol, atol=atol)
    return ours


@pytest.mark.parametrize(
    ("width", "n", "tokens"),
    [(7, 4, (3, 1)), (33, 12, (11, 4)), (64, 68, (67, 20)), (20, 130, (129, 30)), (33, 258, (200,))],
)
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_rows(width: int, n: int, tokens: tuple[int, ...], metric: str, dtype: torch.dtype, device: str) -> None:
    """One to five tiles, the last of them with tokens or without. A fifth of the tokens have near ones, which is what
    takes the interpreter's time.
    """
    near, alone = clustered_embeddings(words=20, size=width), clustered_embeddings(240, 1, size=width, seed=1)
    weight = torch.cat([near, alone]).to(dtype).to(device)
    ours = check(weight, supports(tokens, n, 300, device), metric, 40, rtol=2e-5)
    assert not ours.isnan().any()


@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")  # of the interpreter
@pytest.mark.parametrize("power", [0.5, 1.7, 2.0])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_powers(power: float, metric: str, dtype: torch.dtype, device: str) -> None:
    """Pairs from tensor cores and near pairs, in more tiles than a panel has."""
    weight = clustered_embeddings(words=50, size=16).to(dtype).to(device)
    weight[7] = weight[6]
    ids = torch.cat([torch.arange(140, device=device), torch.tensor([NO_TOKEN], device=device)]).unsqueeze(0)
    ours = check(weight, ids, metric, 40, rtol=2e-5, power=power)
    assert not ours.isnan().any()
    assert ours[0, 6, 7] < 1e-12  # a multiplication and a subtraction may be rounded as one


@pytest.mark.parametrize("n", [68, 258])  # of bf16: tiles, or a panel and tiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_right_by_themselves(
    n: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `near_pairs`, which would compute again, pair by pair, all that wrong products make look near."""
    from wpr.transport.kernels import cost as kernel

    class NearPairs:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **settings: None

    monkeypatch.setattr(kernel, "near_kernel", NearPairs())
    weight = torch.cat([clustered_embeddings(words=20, size=33), clustered_embeddings(240, 1, size=33, seed=1)])
    weight = weight.to(dtype).to(device)
    geometry = TokenGeometry.from_embeddings(weight, neighbours=40, progress=False)
    ids = supports((n - 1,), n, 300, device)
    ours, exact = kernel.cost(geometry, ids).double(), replace(geometry, embeddings=weight.double()).cost(ids)
    near = ours == -1
    assert 0 < near.sum() < 0.01 * near.numel()
    torch.testing.assert_close(ours[~near], exact[~near], rtol=2e-5, atol=0)


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
    ids = supports((99, 34), 100, 120, device)
    ours = check(weight.to(device), ids, metric, None, atol=2e-7 if metric == "cosine" else None)
    assert (ours[ours > 0] < 1e-4).any()


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_radius_decides_as_in_float64(metric: str, dtype: torch.dtype, device: str) -> None:
    """Wide rows, all about equally far from each other, and radii that miss a distance by less than float32 rounds."""
    width = 2100 if device == "cuda" else 200
    weight = torch.randn(200, width, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    geometry = TokenGeometry.from_embeddings(weight, metric, 20, progress=False)
    exact = replace(geometry, embeddings=weight.double())
    everyone = torch.arange(200, device=device).unsqueeze(0)
    free = replace(exact, radius=torch.full_like(geometry.radius, torch.inf))
    distances = free.cost(everyone, scaled=False)[0].kthvalue(50, dim=-1).values
    miss = 1 + 2e-7 * (torch.arange(200, device=device) % 5 - 2)
    radius = (distances / (1 + RADIUS_SLACK[torch.float32]) * miss).float()
    ids = supports((149, 24), 150, 200, device)
    geometry, exact = replace(geometry, radius=radius), replace(exact, radius=radius)
    from wpr.transport.kernels.cost import cost

    ours, theirs = cost(geometry, ids), exact.cost(ids)
    assert torch.equal(ours, ours.mT)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("neighbours", [20, None])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_tokens_without_an_embedding(metric: str, neighbours: int | None, device: str) -> None:
    """Near pairs among them too: one of them is a copy of a token that has one."""
    weight = clustered_embeddings().to(device)
    weight[[1, 5]] = weight[[2, 30]]
    weight[17] = 0
    mapped = torch.ones(60, dtype=torch.bool, device=device)
    mapped[[0, 1, 5, 17, 59]] = False
    ids = torch.cat([torch.arange(60, device=device), torch.tensor([NO_TOKEN], device=device)]).unsqueeze(0)
    ours = check(weight, ids, metric, neighbours, rtol=2e-5, mapped=mapped)[0]
    assert not ours.isnan().any()
    assert ours[:60][~mapped].isinf().sum() == 5 * 60


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
