"""Iterations that unbalanced Sinkhorn needs on real next-token distributions: plain, translation-invariant,
over-relaxed.

The problems are supports of SmolLM2's own predictions against a sharpened, noisy copy of them (policy and reference of
a run that has moved). Float64, so that only the method counts. Figures are the mean and the largest number of
iterations until no potential changes by more than the tolerance.

    python -m benchmarks.acceleration
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import registry_models
from benchmarks.semantic_contrast import cached_geometry
from wpr.transport import sinkhorn
from wpr.transport.gibbs import GibbsKernel
from wpr.transport.support import Support, truncate

TEXT = (
    "The capital of France is Paris, and the river that flows through it is the Seine. A good way to learn "
    "programming is to "
    "write small programs every day and to read the code of others. Doctors recommend drinking water and sleeping "
    "eight hours."
)
TOLERANCES = (1e-2, 1e-4, 1e-8)


def plain(
    log_a: Tensor, log_b: Tensor, kernel: GibbsKernel, lam: float, rho: float, limit: int, omega: float, invariant: bool
) -> list[Tensor]:
    """Iterations ``(P,)`` to each tolerance for a fixed omega; ``invariant`` adds the best constant after each half
    step.
    """
    log_a, log_b, padding = sinkhorn.prepare_masses(log_a, log_b)
    tau = rho / (rho + 1 / lam)
    to_f, to_g = kernel.operator(), kernel.operator()
    f, g = torch.zeros_like(log_a), torch.zeros_like(log_b)
    needed = [torch.full((len(log_a),), limit) for _ in TOLERANCES]

    def shift(f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        best = rho / 2 * ((log_a - f / rho).logsumexp(-1, True) - (log_b - g / rho).logsumexp(-1, True))
        return (f + best, g - best) if invariant else (f, g)

    for iteration in range(1, limit + 1):
        old_f, old_g = f, g
        target = (to_f(log_b + lam * g) * (-tau / lam)).masked_fill(padding, 0)
        f, g = shift(f + omega * (target - f), g)
        target = (to_g(log_a + lam * f) * (-tau / lam)).masked_fill(padding, 0)
        f, g = shift(f, g + omega * (target - g))
        change = torch.maximum((f - old_f).abs().amax(-1), (g - old_g).abs().amax(-1))
        for tolerance, count in zip(TOLERANCES, needed, strict=True):
            count[(change <= tolerance) & (count == limit)] = iteration
        if change.max() <= TOLERANCES[-1]:
            break
    return needed


def ours(support: Support, cost: Tensor, lam: float, rho: float, limit: int) -> list[Tensor]:
    masses = support.log_policy, support.log_reference
    return [
        sinkhorn.unbalanced(*masses, cost, lam=lam, rho=rho, iterations=limit, tolerance=tolerance).iterations
        for tolerance in TOLERANCES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=registry_models.FOLDER)
    parser.add_argument("--limit", type=int, default=600)
    arguments = parser.parse_args()
    model, tokenizer = registry_models.load(arguments.model)
    geometry = cached_geometry(model, arguments.model)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        reference = model(ids).logits[0, :-1].double()
    policy = reference / 0.7 + 0.8 * torch.randn(reference.shape, generator=torch.Generator().manual_seed(0))
    support = truncate(policy, reference, ids[0, 1:], 128)
    cost = geometry.cost(support.ids).double()
    table = Table("lam", "rho", "tau^2", "method", *(f"to {tolerance:g}" for tolerance in TOLERANCES))
    for lam, rho in ((5.0, 1.0), (10.0, 2.0), (5.0, 8.0), (10.0, 8.0)):
        tau = rho / (rho + 1 / lam)
        kernel = GibbsKernel(cost, lam)
        omega = sinkhorn.optimal_relaxation(tau)
        masses = support.log_policy, support.log_reference
        results = {
            "plain": plain(*masses, kernel, lam, rho, arguments.limit, 1.0, invariant=False),
            "translation-invariant": plain(*masses, kernel, lam, rho, arguments.limit, 1.0, invariant=True),
            f"over-relaxed by {omega:.2f}": plain(*masses, kernel, lam, rho, arguments.limit, omega, invariant=False),
            "ours (ramp and safeguard)": ours(support, cost, lam, rho, arguments.limit),
        }
        for name, needed in results.items():
            cells = [f"{count.double().mean():.0f} / {count.max()}" for count in needed]
            table.add_row(f"{lam:g}", f"{rho:g}", f"{tau**2:.3f}", name, *cells)
        table.add_section()
    console = Console(width=120)
    console.print(
        f"{len(ids[0]) - 1} positions; {arguments.limit} means not reached within {arguments.limit} iterations"
    )
    console.print(table)


if __name__ == "__main__":
    main()
