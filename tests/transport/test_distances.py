"""Costs against the formula in float64, near-duplicates included."""

from __future__ import annotations

import pytest
import torch

from wpr.transport.distances import COSINE, EUCLIDEAN, gram_squared_distances, resolve_metric, squared_distances


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(41, 17), (3, 13, 64), (2, 5, 7, 3)])
def test_costs_match_the_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    exact = x.double()
    difference = exact.unsqueeze(-2) - exact.unsqueeze(-3)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(
        EUCLIDEAN.pairwise(x, x).double(), difference.norm(dim=-1), atol=tolerance, rtol=tolerance
    )
    unit = exact / exact.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(COSINE.pairwise(x, x).double(), 1 - unit @ unit.mT, atol=tolerance, rtol=tolerance)


def test_small_distances_keep_their_digits() -> None:
    """Rows of length 100 that are 1e-3 apart: the matrix product alone is off by more than the distance itself."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(1, 64, generator=generator) * 12.5
    x = base + 1e-4 * torch.randn(20, 64, generator=generator)
    exact = (x.double().unsqueeze(1) - x.double()).norm(dim=-1)
    rough, near = gram_squared_distances(x, x)
    assert near.all()
    off_diagonal = ~torch.eye(20, dtype=torch.bool)
    assert ((rough.sqrt() - exact).abs() / exact)[off_diagonal].max() > 1
    assert ((squared_distances(x, x).sqrt() - exact).abs() / exact)[off_diagonal].max() < 1e-5


def test_only_wanted_pairs_are_repaired() -> None:
    x = torch.ones(4, 8) * 10
    wanted = torch.zeros(4, 4, dtype=torch.bool)
    wanted[0, 1] = True
    assert squared_distances(x, x, wanted)[0, 1] == 0


def test_zero_row_has_no_direction() -> None:
    x = torch.cat([torch.zeros(1, 5), torch.randn(3, 5)])
    cost = COSINE.pairwise(x, x)
    assert cost.isfinite().all()
    torch.testing.assert_close(cost[0, 1:], torch.full((3,), 0.5))


def test_users_function() -> None:
    def manhattan(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x, y, p=1)

    metric = resolve_metric(manhattan)
    x = torch.randn(6, 3)
    assert metric.name.endswith("manhattan")
    torch.testing.assert_close(metric.pairwise(x, x), (x.unsqueeze(1) - x).abs().sum(-1))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, y: torch.zeros(2, 2), "shape"),
        (lambda x, y: -torch.ones(*x.shape[:-1], y.shape[-2]), "-1.0"),
        (lambda x, y: torch.full((*x.shape[:-1], y.shape[-2]), torch.nan), "nan"),
        (lambda x, y: torch.full((*x.shape[:-1], y.shape[-2]), torch.inf), "inf"),
    ],
)
def test_users_function_is_checked(function: object, message: str) -> None:
    x = torch.randn(5, 3)
    with pytest.raises(ValueError, match=message):
        resolve_metric(function).pairwise(x, x)  # type: ignore[arg-type]


def test_unknown_metric_is_named() -> None:
    with pytest.raises(ValueError, match="'manhattan' is unknown; use one of euclidean, cosine"):
        resolve_metric("manhattan")
