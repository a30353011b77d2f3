"""How often the interval of a win rate holds the true rate: simulated experiments, and the table of docs/evaluation.md.

python -m tests.evaluation.coverage
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wpr.evaluation.win_rate import win_rate


def coverage(
    prompts: int,
    rate: float,
    ties: float,
    responses: int = 1,
    alike: float = 0.0,
    repeats: int = 4000,
    seed: int = 0,
    sizes: Sequence[int] | None = None,
) -> tuple[float, float]:
    """Share of 95% intervals that hold the true rate, and their mean width.

    rate: of wins among comparisons without a tie. ties: share of ties.
    responses: of each prompt, or ``sizes``, one number a prompt. alike: correlation of a prompt's comparisons.
    """
    generator = np.random.default_rng(seed)
    sizes = [responses] * prompts if sizes is None else sizes
    groups = [prompt for prompt, size in enumerate(sizes) for _ in range(size)]
    if alike == 0:
        chance = np.full((repeats, prompts), rate)
    elif alike == 1:
        chance = (generator.random((repeats, prompts)) < rate).astype(float)
    else:
        strength = (1 - alike) / alike
        chance = generator.beta(rate * strength, (1 - rate) * strength, (repeats, prompts))
    shape = (repeats, len(groups))
    ours = np.where(generator.random(shape) < ties, 0.5, generator.random(shape) < chance[:, groups])
    truth = ties / 2 + (1 - ties) * rate
    found = [win_rate(row, [0.5] * len(groups), groups) for row in ours.tolist()]
    inside = [each.low <= truth <= each.high for each in found]
    return float(np.mean(inside)), float(np.mean([each.high - each.low for each in found]))


def main() -> None:
    rates = (0.5, 0.7, 0.9, 0.97, 0.99)
    print("prompts  responses  alike  ties   " + "  ".join(f"rate {rate:<7}" for rate in rates))
    for prompts in (16, 64, 256):
        for responses, alike in ((1, 0.0), (4, 0.3), (4, 1.0)):
            for ties in (0.0, 0.3, 0.8):
                cells = [coverage(prompts, rate, ties, responses, alike) for rate in rates]
                shown = "  ".join(f"{100 * share:4.1f} ({width:.3f})" for share, width in cells)
                print(f"{prompts:7}  {responses:9}  {alike:5}  {ties:4}   {shown}", flush=True)
    sizes = [1] * 48 + [8] * 16
    for rate in rates:
        share, width = coverage(64, rate, 0.0, alike=0.3, sizes=sizes)
        print(f"64 prompts, 48 of them with 1 response and 16 with 8, rate {rate}: {100 * share:4.1f} ({width:.3f})")


if __name__ == "__main__":
    main()
