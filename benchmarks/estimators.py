"""Where the two estimators of each f-divergence lead: distance to the optimum of E[r] - beta * D on a bandit of 40
tokens.

python -m benchmarks.estimators
"""

from __future__ import annotations

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tests.regularizers.test_optimum import (
    F_DIVERGENCES,
    ascend,
    bandit,
    distance,
    f_divergence_optimum,
    penalties_by_call,
    rate_of,
)
from wpr import make_regularizer


def cosine(name: str, rewards: np.ndarray, reference: np.ndarray) -> float:
    """Between the gradients of the two estimators, halfway between the reference and a random policy."""
    q = torch.as_tensor(np.log(reference)).unsqueeze(0)
    policy = (q + 0.5 * torch.as_tensor(rewards)).requires_grad_()
    gradients = []
    for estimator in ("gradient", "paper"):
        loss = make_regularizer(name, estimator=estimator).loss(policy, q)  # type: ignore[attr-defined]
        gradients.append(torch.autograd.grad(loss.sum(), policy)[0].flatten())
    return float(torch.nn.functional.cosine_similarity(gradients[0], gradients[1], dim=0))


def main() -> None:
    rewards, reference = bandit()
    table = Table("divergence", "beta", "reference", "f'(u)", "f(u)/u (paper)", "cosine of the two gradients")
    for name, (beta, rate, steps) in F_DIVERGENCES.items():
        optimum = f_divergence_optimum(name, rewards, reference, beta)
        reached = [
            ascend(penalties, rewards, reference, beta, rate_of(name, rate, steps), steps)
            for penalties in (
                penalties_by_call(make_regularizer(name, estimator=estimator), reference)
                for estimator in ("gradient", "paper")
            )
        ]
        cells = [
            f"{distance(p, optimum):.1e}" if i == 1 else f"{distance(p, optimum):.3f}"
            for i, p in enumerate([reference, *reached])
        ]
        table.add_row(name, f"{beta:g}", *cells, f"{cosine(name, rewards, reference):+.3f}")
    Console(width=120).print("total variation distance to the optimum that a convex solver finds, of the:", table)


if __name__ == "__main__":
    main()
