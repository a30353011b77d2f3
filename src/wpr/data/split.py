"""Rows shared out to the stages, by prompt or by comparison."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from wpr.data.corpus import Corpus, numbered_digests
from wpr.data.rows import DataError, Row
from wpr.data.settings import SplitSettings

STAGES = ("sft", "reward", "ppo")


@dataclass(frozen=True)
class Split:
    """The rows of each stage, and those that no stage trains on.

    left_out: training rows whose prompt is also a validation prompt; with ``by="prompt"`` no stage sees them.
    """

    sft: list[Row]
    reward: list[Row]
    ppo: list[Row]
    held_out: list[Row]
    by: str
    left_out: int = 0

    def report(self) -> dict[str, Any]:
        """Rows and prompts of each part, and how many prompts stand in more than one."""
        parts: dict[str, list[Row]] = {name: getattr(self, name) for name in (*STAGES, "held_out")}
        prompts = {name: {row.prompt_digest() for row in rows} for name, rows in parts.items()}
        places = Counter(prompt for part in prompts.values() for prompt in part)
        return {
            "by": self.by,
            "rows": {name: len(rows) for name, rows in parts.items()},
            "prompts": {name: len(found) for name, found in prompts.items()},
            "shared_prompts": sum(count > 1 for count in places.values()),
            "left_out": self.left_out,
        }


def split_corpus(corpus: Corpus, settings: SplitSettings, seed: int = 0) -> Split:
    """Share out the rows of a corpus.

    What is shared out, prompts or comparisons, is ordered by the SHA-256 of seed and content and cut at the shares:
    first ``held_out`` (unless the corpus has validation rows), then ``sft``, ``reward`` and ``ppo`` of what remains. So
    a part depends on the seed and on what the rows say, not on their order or their files.
    """
    salt = f"split {seed}"
    rows, left_out = corpus.rows, 0
    if settings.by == "prompt":
        taken = {row.prompt_digest() for row in corpus.validation}
        rows = [row for row in corpus.rows if row.prompt_digest() not in taken]
        left_out = len(corpus.rows) - len(rows)
    order = numbered_digests(rows, salt)
    units = [row.prompt_digest(salt) for row in rows] if settings.by == "prompt" else order
    # Within a part too, rows stand in an order of their own, so that files may be shuffled without any effect.
    ranked = sorted(range(len(rows)), key=lambda i: (units[i], order[i]))
    unique = sorted(set(units))

    held = 0 if corpus.validation else round(settings.held_out * len(unique))
    rest = len(unique) - held
    cuts = [0, held]
    share = 0.0
    for name in STAGES:
        share += getattr(settings, name)
        cuts.append(held + round(min(share, 1.0) * rest))
    part_of = {unit: part for part in range(4) for unit in unique[cuts[part] : cuts[part + 1]]}
    parts: list[list[Row]] = [[], [], [], []]
    held_out, sft, reward, ppo = parts
    for i in ranked:
        if units[i] in part_of:
            parts[part_of[units[i]]].append(rows[i])
    made = Split(sft, reward, ppo, corpus.validation or held_out, settings.by, left_out)
    _refuse_empty(made, settings, len(unique), bool(corpus.validation))
    return made


def _refuse_empty(split: Split, settings: SplitSettings, count: int, own_validation: bool) -> None:
    for name in (*STAGES, *(() if own_validation else ("held_out",))):
        share = getattr(settings, name)
        if share > 0 and not getattr(split, name):
            left_out = f" ({split.left_out} rows were left out: their prompts are in the validation files)"
            raise DataError(
                f"split.{name} is {share:g}, but of {count} {settings.by}s{left_out if split.left_out else ''} none "
                f"falls to it; use more rows (data.source, data.limit), raise split.{name}, or set it to 0"
            )
