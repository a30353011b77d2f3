"""How often intervals of a judged win rate hold the true rate, under the paper's five draws: the table of
docs/judging.md.

python -m tests.evaluation.judging.coverage
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from wpr.evaluation.judging.comparison_plan import ComparisonPlan
from wpr.evaluation.judging.win_rate_statistics import bootstrap, over_draws
from wpr.evaluation.win_rate import win_rate


@dataclass(frozen=True)
class Coverage:
    """Share of 95% intervals that hold the true rate: that of `win_rate` with prompts as groups, the bootstrap over
    prompts, and the mean of the draws -+ Student's t times their standard error.
    """

    interval: float
    bootstrap: float
    draws: float


def coverage(
    pool: int, rate: float, ties: float = 0.0, protocol: ComparisonPlan | None = None, bias: float = 0.0,
    repeats: int = 1000, seed: int = 0, resamples: int = 1000,
) -> Coverage:  # fmt: skip
    """Simulated evaluations: each has prompts of its own.

    rate: of wins among prompts without a tie; ties: share of ties. bias: share of prompts at which the judge takes
    place A whatever stands there; the true rate is then nearer to one half.
    """
    generator = np.random.default_rng(seed)
    truth = bias / 2 + (1 - bias) * (ties / 2 + (1 - ties) * rate)
    names = [f"{prompt:06}" for prompt in range(pool)]
    held = np.zeros(3)
    for repeat in range(repeats):
        drawn = generator.random((3, pool))
        merit = dict(zip(names, np.where(drawn[0] < ties, 0.5, drawn[1] < rate).tolist(), strict=True))
        by_place = dict(zip(names, (drawn[2] < bias).tolist(), strict=True))
        base = protocol or ComparisonPlan()
        comparisons = ComparisonPlan(base.prompts, base.draws, base.both_orders, seed=repeat).comparisons(names)
        outcomes = [float(one.ours_first) if by_place[one.prompt_id] else merit[one.prompt_id] for one in comparisons]
        prompts = [one.prompt_id for one in comparisons]
        found = win_rate(outcomes, [0.5] * len(outcomes), prompts)
        again = bootstrap(outcomes, prompts, resamples=resamples, seed=repeat)
        rates, error = over_draws(outcomes, [one.draw for one in comparisons])
        half = 0.0 if math.isnan(error) else float(student.ppf(0.975, len(rates) - 1)) * error
        centre = sum(rates) / len(rates)
        held += [
            found.low <= truth <= found.high,
            again[0] <= truth <= again[1],
            centre - half - 1e-12 <= truth <= centre + half + 1e-12,
        ]
    return Coverage(*(held / repeats).tolist())


def main() -> None:
    print("| prompts in the files | ties | rate | interval | bootstrap | over draws (t, 4 degrees) |")
    print("|---|---|---|---|---|---|")
    for pool in (50, 100, 250, 1000, 4000):
        for ties in (0.0, 0.3):
            for rate in (0.5, 0.7, 0.9):
                found = coverage(pool, rate, ties, repeats=2000)
                shares = " | ".join(f"{100 * share:.1f}" for share in vars(found).values())
                print(f"| {pool} | {ties} | {rate} | {shares} |", flush=True)
    for name, protocol in (("both orders, 5 draws of 50", ComparisonPlan(both_orders=True)),
                           ("all prompts, both orders", ComparisonPlan(None, 1, both_orders=True))):  # fmt: skip
        found = coverage(250, 0.7, 0.1, protocol, bias=0.3, repeats=2000)
        print(name, "of 250, 10% ties, a judge that goes by the place at 30% of prompts:", found, flush=True)


if __name__ == "__main__":
    main()
