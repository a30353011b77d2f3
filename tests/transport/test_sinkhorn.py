"""Solvers against float64 Newton oracles, POT, closed forms, and their own definition."""

from __future__ import annotations

import math

import numpy as np
import ot
import pytest
import torch

from tests.problems import batch, distribution, log, points_cost, with_gaps
from tests.reference import newton
from wpr.transport import gibbs, sinkhorn

METHODS = ("log", "absorbed")


def centred(f: np.ndarray, a: np.ndarray) -> np.ndarray:
    return f - a @ f


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strength", [5, 40, 120, 400])
def test_balanced_converges_to_newton_and_pot(method: str, strength: float) -> None:
    rng = np.random.default_rng(int(strength))
    a, b, cost = (
        distribution(rng, 24),
        distribution(rng, 24),
        points_cost(rng, 24),
    )  # largest cost 1, so lam * C reaches strength
    solution = sinkhorn.balanced(
        *batch(log(a), log(b), cost), lam=strength, iterations=200_000, tolerance=1e-11, method=method
    )
    assert solution.converged.all()
    assert solution.marginal_error.item() <= 1e-11
    f = solution.f[0].numpy()
    oracle, _, _ = newton.balanced(a, b, cost, strength)
    np.testing.assert_allclose(centred(f, a), centred(oracle, a), atol=1e-6)
    _, pot = ot.sinkhorn(a, b, cost, 1 / strength, method="sinkhorn_log", numItermax=200_000, stopThr=1e-12, log=True)
    pot_f = pot["log_u"] / strength
    np.testing.assert_allclose(centred(f, a), centred(pot_f, a), atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("lam", "rho", "gaps"), [(5, 1, 0.0), (10, 4, 0.5), (50, 2, 0.8), (400, 0.5, 0.0), (100, 0.1, 0.95)]
)
def test_unbalanced_converges_to_newton(method: str, lam: float, rho: float, gaps: float) -> None:
    rng = np.random.default_rng(int(lam))
    a, b, cost = distribution(rng, 24, 2.5), distribution(rng, 24, 2.5), points_cost(rng, 24)
    cost = with_gaps(rng, cost, gaps)
    solution = sinkhorn.unbalanced(
        *batch(log(a), log(b), cost), lam=lam, rho=rho, iterations=20_000, tolerance=1e-13, method=method
    )
    f, g, value = newton.unbalanced(a, b, cost, lam, rho)
    np.testing.assert_allclose(solution.f[0].numpy(), f, atol=1e-6)
    np.testing.assert_allclose(solution.g[0].numpy(), g, atol=1e-6)
    assert solution.marginal_error.item() < 1e-9
    ours = newton.unbalanced_value(solution.f[0].numpy(), solution.g[0].numpy(), a, b, cost, lam, rho)
    assert ours == pytest.approx(value, abs=1e-12)


def test_unbalanced_agrees_with_pot() -> None:
    rng = np.random.default_rng(3)
    a, b, cost = distribution(rng, 20), distribution(rng, 20), points_cost(rng, 20)
    lam, rho = 20.0, 0.7
    solution = sinkhorn.unbalanced(*batch(log(a), log(b), cost), lam=lam, rho=rho, iterations=5000, tolerance=1e-13)
    plan = a[:, None] * b * np.exp(lam * (solution.f[0].numpy()[:, None] + solution.g[0].numpy() - cost))
    pot = ot.unbalanced.sinkhorn_unbalanced(a, b, cost, 1 / lam, rho, reg_type="kl", numItermax=100_000, stopThr=1e-14)
    np.testing.assert_allclose(plan, pot, atol=1e-8)


@pytest.mark.parametrize("rho", [0.5, 4.0, math.inf])
def test_self_transport_is_the_symmetric_solution(rho: float) -> None:
    rng = np.random.default_rng(5)
    a, cost = distribution(rng, 20, 2.5), points_cost(rng, 20)
    lam = 15.0
    solution = sinkhorn.self_transport(*batch(log(a), cost), lam=lam, rho=rho, iterations=500, tolerance=1e-14)
    s = solution.f[0].numpy()
    if math.isinf(rho):
        np.testing.assert_allclose(a * (np.exp(lam * (s[:, None] + s - cost)) @ a), a, atol=1e-12)
    else:
        f, g, _ = newton.unbalanced(a, a, cost, lam, rho)
        np.testing.assert_allclose(s, f, atol=1e-9)
        np.testing.assert_allclose(s, g, atol=1e-9)
    assert solution.iterations.item() < 60


@pytest.mark.parametrize("floor", [0.0, 1e-16])
def test_balanced_is_the_papers_loop(floor: float) -> None:
    """T iterations of Algorithm 1, written in the scaling domain."""
    rng = np.random.default_rng(7)
    a, b, cost = distribution(rng, 12), distribution(rng, 12), points_cost(rng, 12)
    lam, kernel = 10.0, np.exp(-10.0 * cost)
    v = np.ones(12)
    for t in range(1, 8):
        u = a / (kernel @ v + floor)
        v = b / (kernel.T @ u + floor)
        solution = sinkhorn.balanced(*batch(log(a), log(b), cost), lam=lam, iterations=t, floor=floor)
        np.testing.assert_allclose(solution.f[0].numpy(), np.log(u + floor) / lam, atol=1e-13)
        assert solution.marginal_error.item() == pytest.approx(np.abs(u * (kernel @ v) - a).sum(), abs=1e-12)


def test_balanced_without_neighbours_has_a_closed_form() -> None:
    """phi_T = (T log(a/b) + log b) / lam: why the paper's setting is a rescaled KL on embeddings whose tokens are far
    apart.
    """
    rng = np.random.default_rng(8)
    a, b = distribution(rng, 30), distribution(rng, 30)
    cost = np.where(np.eye(30) > 0, 0, np.inf)
    for t in (1, 10, 50):
        solution = sinkhorn.balanced(*batch(log(a), log(b), cost), lam=100, iterations=t)
        np.testing.assert_allclose(solution.f[0].numpy(), (t * np.log(a / b) + np.log(b)) / 100, atol=1e-13)
        assert solution.f[0].std() > 0


def test_infeasible_balanced_problem_drifts() -> None:
    """Two pieces of unequal mass: no plan exists, and the potential grows by the same amount every iteration."""
    cost = np.where(np.kron(np.eye(2), np.ones((3, 3))) > 0, 1.0, np.inf) * (1 - np.eye(6))
    cost[np.isnan(cost)] = 0
    a, b = np.array([0.3, 0.2, 0.2, 0.1, 0.1, 0.1]), np.array([0.1, 0.1, 0.1, 0.3, 0.2, 0.2])
    f = [sinkhorn.balanced(*batch(log(a), log(b), cost), lam=10, iterations=t).f[0, 0].item() for t in (100, 200, 300)]
    assert f[1] - f[0] == pytest.approx(100 * math.log(0.7 / 0.3) / 10, rel=1e-6)
    assert f[2] - f[1] == pytest.approx(f[1] - f[0], rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strength", [1, 30, 90, 400, 4000])
@pytest.mark.parametrize("kind", ["balanced", "unbalanced", "self"])
def test_float32_agrees_with_float64_for_every_cost(method: str, strength: float, kind: str) -> None:
    """The stated accuracy: potentials to 1e-5 of their scale after equally many iterations, whatever lam * C."""
    rng = np.random.default_rng(int(strength))
    a = np.stack([distribution(rng, 33, 4.0) for _ in range(5)])
    b = np.stack([distribution(rng, 33, 4.0) for _ in range(5)])
    cost = np.stack([with_gaps(rng, points_cost(rng, 33), gaps) for gaps in (0, 0.3, 0.6, 0.9, 1)])
    results = []
    for dtype, chosen in ((torch.float32, method), (torch.float64, "log")):
        log_a, log_b, c = (torch.as_tensor(x, dtype=dtype) for x in (log(a), log(b), cost))
        if kind == "balanced":
            solution = sinkhorn.balanced(log_a, log_b, c, lam=strength, iterations=50, method=chosen)
        elif kind == "unbalanced":
            solution = sinkhorn.unbalanced(
                log_a, log_b, c, lam=strength, rho=20 / strength, iterations=50, method=chosen
            )
        else:
            solution = sinkhorn.self_transport(log_a, c, lam=strength, rho=20 / strength, iterations=50, method=chosen)
        results.append(solution.f.double() * strength)
    scale = results[1].abs().amax().clamp_min(1)
    assert ((results[0] - results[1]).abs().amax() / scale).item() < 1e-5


def test_scaling_domain_would_fail_where_absorbed_does_not() -> None:
    """The reason for absorption: exp(-lam C) underflows in float32 past lam * C of about 90 and a plain scaling loop
    returns garbage.
    """
    rng = np.random.default_rng(1)
    a, b, cost = distribution(rng, 20), distribution(rng, 20), points_cost(rng, 20) + (1 - np.eye(20))
    log_a, log_b, c = batch(log(a), log(b), cost, dtype=torch.float32)
    kernel = torch.exp(-400 * c[0])
    u = torch.tensor(a, dtype=torch.float32) / (kernel @ torch.ones(20))
    assert (kernel - torch.eye(20)).abs().max() == 0  # the scaling domain sees no neighbours at all
    absorbed = sinkhorn.balanced(log_a, log_b, c, lam=400, iterations=2000).f[0]
    exact = sinkhorn.balanced(*batch(log(a), log(b), cost), lam=400, iterations=2000, method="log").f[0]
    assert (absorbed - exact).abs().max() < 1e-5 * exact.abs().max()
    assert (u.log() / 400 - exact).abs().max() > 0.1


def test_problems_do_not_see_each_other() -> None:
    """Per-problem stopping: the same result alone, in a batch, and next to a hard problem."""
    rng = np.random.default_rng(11)
    a, b = (np.stack([distribution(rng, 16, s) for s in (0.1, 1, 8)]) for _ in range(2))
    cost = np.stack([far * points_cost(rng, 16) for far in (0.1, 1, 5)])
    args = [torch.as_tensor(x) for x in (log(a), log(b), cost)]
    together = sinkhorn.unbalanced(*args, lam=10, rho=3, iterations=300, tolerance=1e-6)
    assert len(set(together.iterations.tolist())) > 1
    for i in range(3):
        alone = sinkhorn.unbalanced(*(x[i : i + 1] for x in args), lam=10, rho=3, iterations=300, tolerance=1e-6)
        assert alone.iterations.item() == together.iterations[i].item()
        torch.testing.assert_close(alone.f[0], together.f[i], atol=1e-12, rtol=0)
        assert alone.converged.all()


def test_chunks_do_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(12)
    a, b = (torch.as_tensor(np.stack([log(distribution(rng, 9)) for _ in range(11)])) for _ in range(2))
    cost = torch.as_tensor(np.stack([points_cost(rng, 9) for _ in range(11)]))
    whole = sinkhorn.balanced(a, b, cost, lam=5, iterations=20)
    monkeypatch.setattr(sinkhorn, "CHUNK_BYTES", 9 * 9 * 8 * 2)
    parts = sinkhorn.balanced(a, b, cost, lam=5, iterations=20)
    torch.testing.assert_close(parts.f, whole.f, atol=1e-13, rtol=0)
    assert parts.iterations.shape == (11,)


def test_zero_masses_and_padding() -> None:
    """A mass of zero in one distribution gives finite potentials; an entry without mass in both changes nothing and has
    potential 0.
    """
    rng = np.random.default_rng(13)
    a, b, cost = distribution(rng, 10), distribution(rng, 10), with_gaps(rng, points_cost(rng, 10), 0.5)
    a[3], b[4] = 0, 0
    a, b = a / a.sum(), b / b.sum()
    padded_cost = np.full((12, 12), np.inf)
    padded_cost[:10, :10] = cost
    np.fill_diagonal(padded_cost, 0)
    plain = sinkhorn.unbalanced(*batch(log(a), log(b), cost), lam=10, rho=2, iterations=2000, tolerance=1e-12)
    padded = sinkhorn.unbalanced(
        *batch(log(np.append(a, [0, 0])), log(np.append(b, [0, 0])), padded_cost),
        lam=10,
        rho=2,
        iterations=2000,
        tolerance=1e-12,
    )
    assert plain.f.isfinite().all()
    assert plain.g.isfinite().all()
    torch.testing.assert_close(padded.f[:, :10], plain.f, atol=1e-10, rtol=1e-10)
    assert (padded.f[:, 10:] == 0).all()
    tiny = np.maximum(a, 1e-60) / np.maximum(a, 1e-60).sum(), np.maximum(b, 1e-60) / np.maximum(b, 1e-60).sum()
    f, _, _ = newton.unbalanced(*tiny, cost, 10, 2)
    kept = np.exp(-plain.f[0].numpy()[a > 0] / 2)
    np.testing.assert_allclose(kept, np.exp(-f[a > 0] / 2), atol=1e-9)


def test_over_relaxation_is_worth_its_place() -> None:
    """Iterations to 1e-8 against the plain alternation that the formula states."""
    rng = np.random.default_rng(14)
    a, b, cost = distribution(rng, 40, 3), distribution(rng, 40, 3), with_gaps(rng, 2 * points_cost(rng, 40, 8), 0.5)
    log_a, log_b, c = batch(log(a), log(b), cost)
    lam, rho = 10.0, 4.0
    tau = rho / (rho + 1 / lam)
    operator = gibbs.LogDomain(-lam * c)
    f, g, plain = torch.zeros_like(log_a), torch.zeros_like(log_a), 0
    while True:
        new = -(tau / lam) * operator(log_b + lam * g)
        change, f, plain = (new - f).abs().max(), new, plain + 1
        g = -(tau / lam) * operator(log_a + lam * f)
        if change <= 1e-8:
            break
    ours = sinkhorn.unbalanced(log_a, log_b, c, lam=lam, rho=rho, iterations=1000, tolerance=1e-8)
    torch.testing.assert_close(ours.f, f, atol=1e-6, rtol=0)
    assert ours.iterations.item() * 3 < plain


def test_hard_unbalanced_problems_converge_all() -> None:
    """A fixed over-relaxation can cycle; the safeguard must not let any problem run away."""
    rng = np.random.default_rng(15)
    a, b = (torch.as_tensor(np.stack([log(distribution(rng, 30, 6)) for _ in range(40)])) for _ in range(2))
    cost = torch.as_tensor(np.stack([with_gaps(rng, 3 * points_cost(rng, 30), 0.7) for _ in range(40)]))
    for lam, rho in ((10, 4), (10, 8), (20, 4), (5, 20), (100, 1)):
        solution = sinkhorn.unbalanced(a, b, cost, lam=lam, rho=rho, iterations=3000, tolerance=1e-9)
        assert solution.converged.all(), (lam, rho, solution.iterations.max().item(), solution.change.max().item())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lam": 0}, "lam=0"),
        ({"lam": math.inf}, "lam=inf"),
        ({"iterations": 0}, "iterations=0"),
        ({"cost": torch.zeros(1, 4, 5)}, r"\(1, 4, 5\)"),
        ({"cost": torch.zeros(1, 4, 4, dtype=torch.float64)}, "float64"),
        ({"method": "scaling"}, "scaling"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"cost": torch.zeros(1, 4, 4), "lam": 1.0, "iterations": 3} | change
    masses = torch.full((1, 4), -math.log(4))
    with pytest.raises(ValueError, match=message):
        sinkhorn.balanced(masses, masses, arguments.pop("cost"), **arguments)  # type: ignore[arg-type]


def test_rho_must_be_positive() -> None:
    masses = torch.full((1, 4), -math.log(4))
    with pytest.raises(ValueError, match="rho=-1"):
        sinkhorn.unbalanced(masses, masses, torch.zeros(1, 4, 4), lam=1, rho=-1, iterations=3)


@pytest.mark.parametrize(("lam", "rho"), [(5, 1000), (5, 10_000), (100, 100)])
def test_over_relaxation_cannot_run_away(lam: float, rho: float) -> None:
    """Where convergence takes thousands of iterations, potentials still stay within the bound of a contraction."""
    rng = np.random.default_rng(16)
    a, b = (torch.as_tensor(np.stack([log(distribution(rng, 30, 4)) for _ in range(20)])) for _ in range(2))
    cost = torch.as_tensor(np.stack([with_gaps(rng, 3 * points_cost(rng, 30), 0.7) for _ in range(20)]))
    tau = rho / (rho + 1 / lam)
    bound = (-torch.minimum(a.min(), b.min()).item() / lam) / (1 - tau)
    for iterations in (50, 300, 2000):
        solution = sinkhorn.unbalanced(a, b, cost, lam=lam, rho=rho, iterations=iterations)
        assert solution.f.abs().max().item() < 10 * bound
    with pytest.raises(ValueError, match="exceeds"):
        sinkhorn.unbalanced(a, b, cost, lam=lam, rho=1e8, iterations=3)
