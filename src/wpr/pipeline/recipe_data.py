"""A recipe's data, read once: rows for each stage, and the report of what was read, left out and dealt."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wpr.config.recipe import Recipe
from wpr.data import (
    Corpus,
    DataSettings,
    Encoder,
    LengthReport,
    Row,
    Split,
    load_corpus,
    ppo_rows,
    reward_rows,
    sft_rows,
    split_corpus,
)

logger = logging.getLogger(__name__)

MAKE: dict[str, Callable[..., tuple[list[dict[str, Any]], LengthReport]]] = {
    "sft": sft_rows,
    "reward": reward_rows,
    "ppo": ppo_rows,
}


NOTHING = LengthReport(0, 0)


@dataclass(frozen=True)
class StageRows:
    """What a stage trains on and is measured on, what the length filter did to both, and what made the tokens."""

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    lengths: LengthReport
    held_out_lengths: LengthReport
    encoder: Encoder


class RecipeData:
    """The corpus of a recipe and its split."""

    def __init__(self, recipe: Recipe) -> None:
        self.settings: DataSettings = recipe.data
        self.corpus: Corpus = load_corpus(recipe.data, recipe.seed)
        self.evaluation = recipe.evaluation
        self.seed = recipe.seed
        self.split: Split = split_corpus(self.corpus, recipe.split, recipe.seed)
        if self.corpus.skipped:
            logger.warning(
                "%d malformed rows were left out (data.bad_rows=skip); the first: %s",
                len(self.corpus.skipped),
                self.corpus.skipped[0],
            )

    def rows(self, stage: str, tokenizer: Any) -> StageRows:
        """Token rows of a stage; `wpr.data` refuses a stage that is left with none."""
        encoder = Encoder(tokenizer, self.settings)
        repeats = {"repeats": True} if stage == "ppo" and self.settings.fidelity == "released" else {}
        train, lengths = MAKE[stage](getattr(self.split, stage), encoder, **repeats)
        rows = self._held_out(stage)
        held_out, held_out_lengths = MAKE[stage](rows, encoder) if rows else ([], NOTHING)
        logger.info("%s: %d rows, %d kept", stage, lengths.rows, lengths.kept)
        return StageRows(train, held_out, lengths, held_out_lengths, encoder)

    def _held_out(self, stage: str) -> list[Row]:
        """Held-out rows to measure a stage on: as many as the recipe says, drawn by the seed, in their order."""
        rows = self.split.held_out
        wanted = self.evaluation.rows
        if stage == "ppo":
            # One per prompt, of which the stage takes the first that it wants: validation files are in an order.
            return random.Random(self.seed).sample(rows, len(rows)) if self.corpus.validation else rows
        if len(rows) <= wanted:
            return rows
        return [rows[index] for index in sorted(random.Random(self.seed).sample(range(len(rows)), wanted))]

    def report(self) -> dict[str, Any]:
        """For the manifest: files, rows, split."""
        return {
            "fingerprint": self.corpus.fingerprint,
            "files": self.corpus.files,
            "rows": len(self.corpus.rows),
            "skipped": len(self.corpus.skipped),
            "first_skipped": self.corpus.skipped[:5],
            "split": self.split.report(),
        }
