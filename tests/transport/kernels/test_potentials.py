"""The solvers' kernel against the torch solvers in float64, iteration by iteration."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.problems import batch, distribution, log, points_cost, with_gaps
from wpr.transport import sinkhorn as slow
from wpr.transport.problem import Problem

pytestmark = pytest.mark.needs("triton")


def problems(
    count: int, n: int, *, strength: float = 1.0, gaps: float = 0.4, spread: float = 3.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Log masses and costs in float64; the last entry is a dummy without neighbours, some before it are padding."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(count):
        cost = with_gaps(rng, strength * points_cost(rng, n), gaps)
        np.fill_diagonal(cost, 0)
        a, b = distribution(rng, n, spread), distribution(rng, n, spread)
        padding = int(rng.integers(0, max(1, n // 3)))
        lonely = slice(n - 1 - padding, n)
        cost[lonely, :], cost[:, lonely] = np.inf, np.inf
        np.fill_diagonal(cost, 0)
        for mass in (a, b):
            mass[n - 1 - padding : n - 1] = 0
            mass /= mass.sum()
        parts.append(batch(log(a), log(b), cost))
    a, b, cost = (torch.cat(x) for x in zip(*parts, strict=True))
    return a, b, cost


def check(ours: Any, exact: Any, tolerance: float = 3e-6) -> None:
    """Potentials within ``tolerance`` of the largest, and the same account of how they came about."""
    size = float(max(exact.f.abs().max(), exact.g.abs().max(), 1))
    for name in ("f", "g"):
        torch.testing.assert_close(
            getattr(ours, name).double().cpu(), getattr(exact, name), rtol=0, atol=tolerance * size
        )
    assert (ours.iterations.cpu() - exact.iterations).abs().max() <= 1  # rounding may tip the last one
    assert torch.equal(ours.converged.cpu(), exact.converged)
    torch.testing.assert_close(ours.marginal_error.double().cpu(), exact.marginal_error, rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(ours.change.double().cpu(), exact.change, rtol=1e-3, atol=2e-5 * size)


def run(name: str, arguments: tuple[Tensor, ...], device: str, **settings: Any) -> tuple[Any, Any]:
    from wpr.transport.kernels import potentials as fast

    ours = getattr(fast, name)(*(x.float().to(device) for x in arguments), **settings)
    # The kernel and the reference see the same numbers: those rounded to float32.
    return ours, getattr(slow, name)(*(x.float().double() for x in arguments), **settings)


@pytest.fixture(params=["lists", "matrix"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Lists if they fit at all, or always the matrix."""
    from wpr.transport.kernels import neighbour_lists

    monkeypatch.setattr(neighbour_lists, "CAPACITY", 20.0 if request.param == "lists" else 0.0)
    return str(request.param)


@pytest.mark.parametrize(("n", "floor"), [(4, 0.0), (12, 1e-16), (18, 0.0), (34, 1e-16), (68, 0.0), (258, 1e-16)])
@pytest.mark.usefixtures("way")
def test_balanced(n: int, floor: float, device: str) -> None:
    check(*run("balanced", problems(1 if n > 100 else 2, n), device, lam=20.0, iterations=4, floor=floor))


@pytest.mark.parametrize("n", [4, 12, 18, 34, 68, 258])
@pytest.mark.usefixtures("way")
def test_unbalanced(n: int, device: str) -> None:
    check(*run("unbalanced", problems(1 if n > 100 else 2, n), device, lam=5.0, rho=2.0, iterations=4))


@pytest.mark.parametrize("rho", [1.0, math.inf])
@pytest.mark.usefixtures("way")
def test_self_transport(rho: float, device: str) -> None:
    a, _, cost = problems(3, 34)
    check(*run("self_transport", (a, cost), device, lam=5.0, rho=rho, iterations=6))


@pytest.mark.parametrize("strength", [1.0, 30.0, 4000.0])
@pytest.mark.usefixtures("way")
def test_any_cost(strength: float, device: str) -> None:
    """``lam C`` up to 4,000, masses down to exp(-30): potentials of hundreds."""
    arguments = problems(2, 34, strength=strength, spread=8.0)
    check(*run("balanced", arguments, device, lam=1.0, iterations=10))
    check(*run("unbalanced", arguments, device, lam=1.0, rho=8.0, iterations=10))


@pytest.mark.parametrize(("lam", "rho"), [(5.0, 1.0), (10.0, 8.0)])
def test_stopping_is_per_problem(lam: float, rho: float, device: str) -> None:
    """Each stops when it is done, and does not depend on the others."""
    from wpr.transport.kernels import potentials as fast

    arguments = problems(2, 34, spread=4.0)
    ours, exact = run("unbalanced", arguments, device, lam=lam, rho=rho, iterations=100, tolerance=1e-4)
    check(ours, exact, 1e-5)  # many iterations near tau = 1 add up float32 rounding
    assert ours.converged.all()
    alone = fast.unbalanced(
        *(x[1:2].float().to(device) for x in arguments), lam=lam, rho=rho, iterations=100, tolerance=1e-4
    )
    assert torch.equal(alone.f[0], ours.f[1])


def test_balanced_stops_by_its_marginals(device: str) -> None:
    arguments = problems(3, 18, gaps=0.0, spread=1.0)
    arguments = tuple(x[:, :10] if x.ndim == 2 else x[:, :10, :10] for x in arguments)
    a, b = (x.log_softmax(-1) for x in arguments[:2])
    ours, exact = run("balanced", (a, b, arguments[2]), device, lam=4.0, iterations=200, tolerance=1e-3)
    check(ours, exact, 5e-6)
    assert ours.converged.all()
    assert (ours.iterations < 200).all()


@pytest.mark.parametrize("n", [34, 130])
def test_debiased(n: int, device: str) -> None:
    """Both self-transports, and the cross problem from their potentials."""
    from wpr.transport.gibbs import GibbsKernel
    from wpr.transport.kernels import potentials as fast

    a, b, cost = (x.float() for x in problems(1 if n > 100 else 2, n))
    lam, rho, tolerance = 5.0, 8.0, 1e-4
    ours = fast.debiased(*(x.to(device) for x in (a, b, cost)), lam=lam, rho=rho, iterations=60, tolerance=tolerance)
    log_a, log_b, _ = slow.prepare_masses(a.double(), b.double())
    kernel = GibbsKernel(cost.double(), lam)
    problem = Problem(log_a, log_b, cost.double(), lam, rho)
    sides = [replace(problem, log_a=x, log_b=x) for x in (log_a, log_b)]
    own = [slow.solve_self(side, kernel, 60, tolerance / 100).f for side in sides]
    exact = slow.solve_unbalanced(problem, kernel, 60, tolerance, (own[0], own[1]))
    check(ours.cross, exact, 1e-5)
    size = float(own[0].abs().max())
    torch.testing.assert_close(ours.own_a.double().cpu(), own[0], rtol=0, atol=3e-6 * size)
    torch.testing.assert_close(ours.own_b.double().cpu(), own[1], rtol=0, atol=3e-6 * size)


def test_the_same_distribution_twice(device: str) -> None:
    """Then the self-potentials are the solution, and the cross problem has nothing to do."""
    from wpr.transport.kernels import potentials as fast

    a, _, cost = (x.float().to(device) for x in problems(2, 34))
    out = fast.debiased(a, a, cost, lam=5.0, rho=8.0, iterations=60, tolerance=1e-4)
    torch.testing.assert_close(out.cross.f, out.own_a, rtol=0, atol=1e-5)
    assert (out.cross.iterations == 1).all()


@pytest.mark.usefixtures("way")
def test_zeros_and_points(device: str) -> None:
    """All mass on one entry; mass in one distribution only; nothing connected; one problem of everything equal."""
    a, b, cost = problems(4, 12)
    a[0], b[0] = -torch.inf, -torch.inf
    a[0, 3], b[0, 7] = 0, 0
    a[1, :4] = -torch.inf
    cost[2] = torch.inf
    cost[2].diagonal().zero_()
    a[3], b[3], cost[3] = -math.log(12), -math.log(12), 0
    for name, settings in (("balanced", {"floor": 1e-16}), ("unbalanced", {"rho": 2.0})):
        ours, exact = run(name, (a, b, cost), device, lam=5.0, iterations=8, **settings)
        check(ours, exact, 5e-6)
        assert ours.f.isfinite().all()


def test_no_problems_and_refusals(device: str) -> None:
    from wpr.transport.kernels import potentials as fast

    settings = {"lam": 5.0, "rho": 1.0, "iterations": 5}
    nothing = torch.empty(0, 6, device=device)
    assert fast.unbalanced(nothing, nothing, torch.empty(0, 6, 6, device=device), **settings).f.shape == (0, 6)
    masses = torch.zeros(1, 6, device=device)
    with pytest.raises(ValueError, match=r"costs \(1, 5, 5\)"):
        fast.unbalanced(masses, masses, torch.zeros(1, 5, 5, device=device), **settings)
    with pytest.raises(ValueError, match="costs torch.float64"):
        fast.unbalanced(masses, masses, torch.zeros(1, 6, 6, device=device, dtype=torch.float64), **settings)
