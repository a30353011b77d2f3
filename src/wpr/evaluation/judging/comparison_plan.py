"""Which prompts are compared, how often, and whose response stands first.

The paper's protocol: 50 prompts drawn at random, five times, the order of the two responses random. Here a draw takes
each prompt once at most, prompts may come again in other draws, and of each draw's comparisons half (chosen by the
seed) have the first model's response in place A: a judge that only looks at the place then scores one half in every
draw, not just on average.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from wpr.evaluation.judging.questions import JudgingSettingsError


@dataclass(frozen=True)
class Comparison:
    """One question: a prompt, in a draw; ours_first: whether the first model's response stands in place A."""

    draw: int
    prompt_id: str
    ours_first: bool

    @property
    def id(self) -> str:
        """Its name, each once."""
        return f"{self.draw}/{self.prompt_id}/{'ours' if self.ours_first else 'theirs'}-first"


@dataclass(frozen=True)
class ComparisonPlan:
    """How comparisons are chosen.

    prompts: of each draw; None for all there are, in one draw. draws: how often. both_orders: ask each comparison both
    ways round. seed: the same one chooses the same prompts and orders.
    """

    prompts: int | None = 50
    draws: int = 5
    both_orders: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prompts is not None and self.prompts < 1:
            raise JudgingSettingsError(f"{self.prompts} prompts a draw must be at least 1")
        if self.draws < 1:
            raise JudgingSettingsError(f"{self.draws} draws must be at least 1")

    def comparisons(self, prompt_ids: Sequence[str]) -> list[Comparison]:
        """The comparisons, draw by draw. The order in which prompts are given does not matter."""
        pool = sorted(prompt_ids)
        size = len(pool) if self.prompts is None else self.prompts
        if size > len(pool):
            raise JudgingSettingsError(
                f"a draw of {size} prompts is more than the {len(pool)} that both files answer; set the prompts of a "
                "draw to that or fewer (--prompts), or compare all of them once (--all)"
            )
        chosen = []
        for draw in range(1 if self.prompts is None else self.draws):
            generator = random.Random(f"{self.seed}/{draw}")
            ids = generator.sample(pool, size)
            # Of an odd number the one left over goes to either side in turn.
            ours_first = set(generator.sample(ids, (size + (draw + self.seed) % 2) // 2))
            for prompt_id in ids:
                first = prompt_id in ours_first
                chosen.append(Comparison(draw, prompt_id, first))
                if self.both_orders:
                    chosen.append(Comparison(draw, prompt_id, not first))
        return chosen
