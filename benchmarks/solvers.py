"""Our solvers beside POT, geomloss and OTT: float32 problems of n = 258 points, on this machine's CPU, at equal
accuracy.

All solve the same balanced entropic problems: points in the unit cube, random masses, ``lam * C`` up to the stated
strength. Our own solver runs T = 10 and T = 50 iterations; the error of its potentials against the float64 solution is
the accuracy to match. POT and OTT run the same iteration and need the same T. geomloss anneals and averages, so it gets
the fewest iterations that reach our error, 200 at most. A solver that misses our error by more than 5% says so. Times
are medians over repeated runs after a warm-up (and compilation), solvers taking turns.

    python -m benchmarks.solvers [--problems 256] [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import ot
import torch
from geomloss import ot as geomloss_ot
from ott.geometry.geometry import Geometry
from ott.problems.linear.linear_problem import LinearProblem
from ott.solvers.linear.sinkhorn import Sinkhorn
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tests.reference import newton
from wpr.transport import sinkhorn

N = 258
CHECKED = 8
Solver = Callable[[int], Tensor]
"""Iterations to potentials of the first marginal ``(P, n)``."""


def problems(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Masses a, b ``(P, n)`` and costs ``(P, n, n)`` with largest entry 1, in float64."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(count, N, 3, generator=generator, dtype=torch.float64)
    cost = torch.cdist(points, points)
    cost = cost / cost.amax((-2, -1), keepdim=True)
    a, b = torch.randn(2, count, N, generator=generator, dtype=torch.float64).softmax(-1)
    return a, b, (cost + cost.mT) / 2


def solvers(a: Tensor, b: Tensor, cost: Tensor, lam: float) -> dict[str, Solver]:
    """Every solver on the same float32 data, in its own fastest documented form."""
    log_a, log_b = a.log(), b.log()
    ja, jb, jc = (jnp.asarray(x.numpy()) for x in (a, b, cost))

    def ott(lse_mode: bool) -> Solver:
        compiled: dict[int, Callable[..., jax.Array]] = {}

        def run(iterations: int) -> Tensor:
            if iterations not in compiled:
                solver = Sinkhorn(
                    lse_mode=lse_mode,
                    threshold=-1.0,  # never stop early
                    inner_iterations=iterations,
                    min_iterations=iterations,
                    max_iterations=iterations,
                )

                def one(c: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
                    return solver(LinearProblem(Geometry(cost_matrix=c, epsilon=1 / lam), a=x, b=y)).f

                compiled[iterations] = jax.jit(jax.vmap(one))
            return torch.from_numpy(np.array(compiled[iterations](jc, ja, jb)))

        return run

    def pot(method: str) -> Solver:
        # POT checks convergence itself; tol=0 keeps it running.
        def run(iterations: int) -> Tensor:
            result = ot.solve_batch(cost, 1 / lam, a, b, max_iter=iterations, tol=0.0, method=method, grad="detach")
            return result.potentials[0] / lam if method == "log_sinkhorn" else result.potentials[0].log() / lam

        return run

    return {
        "wpr": lambda t: sinkhorn.balanced(log_a, log_b, cost, lam=lam, iterations=t).f,
        "wpr, log domain": lambda t: sinkhorn.balanced(log_a, log_b, cost, lam=lam, iterations=t, method="log").f,
        "POT batch, scaling": pot("sinkhorn"),
        "POT batch, log": pot("log_sinkhorn"),
        "OTT, scaling": ott(lse_mode=False),
        "OTT, log": ott(lse_mode=True),
        "geomloss": lambda t: (
            geomloss_ot.solve_batch(cost, reg=1 / lam, a=a, b=b, max_iter=t).potential_a + log_a / lam
        ),
    }


def error(f: Tensor, exact: Tensor, a: Tensor) -> float:
    """Largest error of any potential, after removing each problem's constant; relative to the largest potential."""
    f = f.double()
    centred = f - (a * f).sum(-1, keepdim=True)
    worst = (centred - exact).abs().max() / exact.abs().max()
    return float(worst) if torch.isfinite(worst) else float("inf")


def fewest_iterations(accuracy: Callable[[int], float], target: float, limit: int = 200) -> int:
    """The fewest iterations, within 10%, whose error is at most the target; the limit if none is."""
    low, high = 4, 8
    while accuracy(high) > target:
        if high >= limit:
            return limit
        low, high = high, min(2 * high, limit)
    while high - low > max(1, high // 10):
        middle = (low + high) // 2
        low, high = (low, middle) if accuracy(middle) <= target else (middle, high)
    return high


def compare(count: int, strength: float, iterations: int, repeats: int) -> Table:
    a, b, cost = problems(count)
    contenders = solvers(a.float(), b.float(), cost.float(), strength)
    # Accuracy is read off the first problems, whose exact solution Newton's method finds in float64.
    few = a[:CHECKED], b[:CHECKED], cost[:CHECKED]
    solved = [newton.balanced(*problem, strength)[0] for problem in zip(*(x.numpy() for x in few), strict=True)]
    exact = torch.as_tensor(np.stack(solved))
    exact = exact - (few[0] * exact).sum(-1, keepdim=True)
    checked = solvers(*(x.float() for x in few), strength)
    target = 1.05 * error(checked["wpr"](iterations), exact, few[0])
    needed = dict.fromkeys(contenders, iterations)
    needed["geomloss"] = fewest_iterations(lambda t: error(checked["geomloss"](t), exact, few[0]), target)
    errors = {name: error(solve(needed[name]), exact, few[0]) for name, solve in checked.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(repeats + 1):
        for name, solve in contenders.items():
            if round_ > 1 and seconds[name][0] > 5:
                continue  # slow enough to time once
            start = time.perf_counter()
            solve(needed[name])
            if round_:  # the first round warms up and compiles
                seconds[name].append(time.perf_counter() - start)
    table = Table(
        "solver", "iterations", "error", "seconds", "times wpr", title=f"lam * C up to {strength:g}, T = {iterations}"
    )
    ours = statistics.median(seconds["wpr"])
    for name in contenders:
        median = statistics.median(seconds[name])
        missed = "" if errors[name] <= target else "  (misses it)"
        table.add_row(name, str(needed[name]), f"{errors[name]:.1e}{missed}", f"{median:.3f}", f"{median / ours:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--strength", type=float, nargs="+", default=[20, 100], help="largest lam * C")
    arguments = parser.parse_args()
    console = Console(width=120)
    console.print(
        f"{arguments.problems} problems of {N} points, float32, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, jax {jax.__version__}"
    )
    for strength in arguments.strength:
        for iterations in (10, 50):
            console.print(compare(arguments.problems, strength, iterations, arguments.repeats))


if __name__ == "__main__":
    main()
