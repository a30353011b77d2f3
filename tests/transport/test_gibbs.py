"""The absorbed operator against the log-domain one, along the kind of path that solvers take."""

from __future__ import annotations

import pytest
import torch

from wpr.transport.gibbs import GibbsKernel, resolve_method


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.1, 10.0, 100.0, 1000.0])
def test_absorbed_equals_log_domain(size: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(3, 41, 4, generator=generator, dtype=dtype)
    cost = torch.cdist(points, points)
    cost = (cost + cost.mT) / 2
    cost[:, :5, 20:] = cost[:, 20:, :5] = torch.inf
    cost.diagonal(dim1=-2, dim2=-1).zero_()
    fast, slow = GibbsKernel(cost, size, "absorbed").operator(), GibbsKernel(cost, size, "log").operator()
    x = torch.zeros(3, 41, dtype=dtype)
    x[:, 7] = -torch.inf
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    massive = x > -torch.inf
    for step in (1, 5, 20, 100, 400, 3, 1):
        x = x + step * torch.randn(3, 41, generator=generator, dtype=dtype)
        scale = x[massive].abs().max() + size
        assert ((fast(x) - slow(x))[massive].abs().max() / scale).item() < tolerance


def test_entry_that_reaches_nothing() -> None:
    """No mass within reach: minus infinity, not NaN, in both forms, also after absorbing."""
    cost = torch.full((1, 3, 3), torch.inf)
    cost.diagonal(dim1=-2, dim2=-1).zero_()
    for method in ("log", "absorbed"):
        operator = GibbsKernel(cost, 1.0, method).operator()
        for size in (1.0, 1e4):
            out = operator(torch.tensor([[-torch.inf, size, -size]]))
            assert out[0, 0] == -torch.inf
            assert out[0, 1:].tolist() == pytest.approx([size, -size], rel=1e-6)


def test_method_names() -> None:
    assert resolve_method("auto") == "absorbed"
    assert resolve_method("log") == "log"
    with pytest.raises(ValueError, match="scaling"):
        resolve_method("scaling")
