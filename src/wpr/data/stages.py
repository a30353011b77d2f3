"""Token rows for each stage: SFT, the reward model, PPO; with a report of what was too long."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from wpr.data.encoder import Encoder
from wpr.data.rows import DataError, Row
from wpr.data.settings import RESERVED


@dataclass(frozen=True)
class LengthReport:
    """What became of a stage's rows.

    rows: given.
    kept: in the stage's dataset.
    long_prompts, long_completions: over the limits (a row may be both); dropped or truncated as the settings say.
    prompt_tokens, completion_tokens: quantiles (50, 90, 99, max) of all that were tokenized, before dropping.
    no_completion: without the completion that the stage needs.
    repeated: prompts (PPO) or prompts with their completion (SFT) that were there already.
    ties: pairs of equal completions, which teach a reward model nothing.
    end_inside: a completion has the end token in its middle, since its text spells it out; left out, or a model would
        learn to go on after the end.
    """

    rows: int
    kept: int
    long_prompts: int = 0
    long_completions: int = 0
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    completion_tokens: dict[str, int] = field(default_factory=dict)
    no_completion: int = 0
    repeated: int = 0
    ties: int = 0
    end_inside: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON files."""
        return asdict(self)


def sft_rows(rows: Sequence[Row], encoder: Encoder) -> tuple[list[dict[str, Any]], LengthReport]:
    """Rows of ``input_ids``, ``completion_mask`` and ``labels`` for TRL's ``SFTTrainer``: loss on completions only.

    The labels say the same as the mask; with them, the loss does not hang on ``completion_only_loss``.
    """
    stage = _Stage(encoder, "a completion to learn")
    seen: set[tuple[bytes, str]] = set()
    rows = [one for row in rows for one in (row, *(replace(row, demonstrated=text) for text in row.more))]

    def texts(row: Row) -> list[str] | None:
        text = row.chosen if row.demonstrated is None else row.demonstrated
        return None if text is None else [text]

    def is_repeated(row: Row, found: Sequence[str]) -> bool:
        key = (row.prompt_digest(), found[0])
        if key in seen:
            return True
        seen.add(key)
        return False

    made = []
    for _, prompt, (completion,) in stage.encode(rows, texts, is_repeated):
        mask = [0] * len(prompt) + [1] * len(completion)
        labels = [-100] * len(prompt) + completion
        made.append({"input_ids": prompt + completion, "completion_mask": mask, "labels": labels})
    return made, stage.report(len(rows), len(made))


def reward_rows(rows: Sequence[Row], encoder: Encoder) -> tuple[list[dict[str, Any]], LengthReport]:
    """Rows of ``chosen_ids`` and ``rejected_ids`` for TRL's ``RewardTrainer``: prompt and completion each."""
    stage = _Stage(encoder, "a chosen and a rejected completion")

    def texts(row: Row) -> list[str] | None:
        return None if row.chosen is None or row.rejected is None else [row.chosen, row.rejected]

    made = []
    for _, prompt, (chosen, rejected) in stage.encode(rows, texts):
        if chosen == rejected:
            stage.ties += 1
        else:
            made.append({"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected})
    return made, stage.report(len(rows), len(made))


def ppo_rows(rows: Sequence[Row], encoder: Encoder, repeats: bool = False) -> tuple[list[dict[str, Any]], LengthReport]:
    """Rows of ``input_ids`` (the prompt's), ``prompt`` as rewards see it, and the other columns; one row per prompt,
    unless ``repeats`` may stay.
    """
    stage = _Stage(encoder, "a prompt")
    seen: set[bytes] = set()

    def is_repeated(row: Row, found: Sequence[str]) -> bool:
        digest = row.prompt_digest()
        if digest in seen and not repeats:
            return True
        seen.add(digest)
        return False

    made = []
    for row, prompt, _ in stage.encode(rows, lambda row: [], is_repeated):
        columns = {name: value for name, value in row.columns.items() if name not in RESERVED}
        made.append({"input_ids": prompt, "prompt": encoder.prompt_value(row), **columns})
    return made, stage.report(len(rows), len(made))


class _Stage:
    """Tokenizes, applies the limits, and counts."""

    def __init__(self, encoder: Encoder, needed: str) -> None:
        self.encoder = encoder
        self.needed = needed
        self.prompt_lengths: list[int] = []
        self.completion_lengths: list[int] = []
        self.long_prompts = self.long_completions = self.no_completion = self.repeated = self.ties = self.end_inside = 0

    def encode(
        self,
        rows: Sequence[Row],
        texts: Callable[[Row], list[str] | None],
        is_repeated: Callable[[Row, Sequence[str]], bool] = lambda row, found: False,
    ) -> list[tuple[Row, list[int], list[list[int]]]]:
        """Row, prompt ids and completion ids of the rows that are kept."""
        limits = self.encoder.settings
        kept = []
        for row in rows:
            found = texts(row)
            if found is None:
                self.no_completion += 1
                continue
            if is_repeated(row, found):
                self.repeated += 1
                continue
            prompt, completions = self.encoder.encode(row, found)
            if any(self.encoder.end_id in ids[:-1] for ids in completions):
                self.end_inside += 1
                continue
            longest = max(map(len, completions), default=0)
            self.prompt_lengths.append(len(prompt))
            self.completion_lengths += map(len, completions)
            long_prompt, long_completion = (
                len(prompt) > limits.max_prompt_tokens,
                longest > limits.max_completion_tokens,
            )
            self.long_prompts += long_prompt
            self.long_completions += long_completion
            if (long_prompt or long_completion) and limits.too_long == "drop":
                continue
            kept.append((row, self._cut(prompt), [ids[: limits.max_completion_tokens] for ids in completions]))
        return kept

    def _cut(self, prompt: list[int]) -> list[int]:
        """The prompt's last tokens; a beginning-of-sequence token stays, since models are not used to go without."""
        most = self.encoder.settings.max_prompt_tokens
        if len(prompt) <= most:
            return prompt
        start = prompt[:1] if prompt[0] == self.encoder.tokenizer.bos_token_id and most > 1 else []
        return start + prompt[len(prompt) - most + len(start) :]

    def report(self, given: int, kept: int) -> LengthReport:
        made = LengthReport(
            given,
            kept,
            self.long_prompts,
            self.long_completions,
            _quantiles(self.prompt_lengths),
            _quantiles(self.completion_lengths),
            self.no_completion,
            self.repeated,
            self.ties,
            self.end_inside,
        )
        if given and not kept:
            self._refuse_nothing(made)
        return made

    def _refuse_nothing(self, made: LengthReport) -> None:
        if made.no_completion == made.rows:
            raise DataError(
                f"none of the {made.rows} rows has {self.needed}; use a data.format that brings it, or give this stage "
                "a share of 0"
            )
        limits = self.encoder.settings
        raise DataError(
            f"none of the {made.rows} rows is left: {made.long_prompts} prompts are longer than "
            f"data.max_prompt_tokens={limits.max_prompt_tokens} (the longest has {made.prompt_tokens.get('max', 0)}), "
            f"{made.long_completions} have completions longer than "
            f"data.max_completion_tokens={limits.max_completion_tokens} (the longest has "
            f"{made.completion_tokens.get('max', 0)}), {made.no_completion} lack {self.needed}, {made.ties} compare "
            f"equal completions, {made.end_inside} spell out the end token; raise the limits, or set "
            "data.too_long: truncate"
        )


def _quantiles(lengths: list[int]) -> dict[str, int]:
    """Nearest ranks: the smallest length that so many percent of all do not exceed."""
    if not lengths:
        return {}
    ordered = sorted(lengths)
    found = {str(percent): ordered[math.ceil(percent / 100 * len(ordered)) - 1] for percent in (50, 90, 99)}
    return {**found, "max": ordered[-1]}
