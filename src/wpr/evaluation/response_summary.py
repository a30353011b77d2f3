"""What files of responses have in them, at a glance: how long responses are, whether they end, how varied they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wpr.evaluation.diversity import diversity
from wpr.findings import Cell, Figure, Finding, Series
from wpr.runs.responses import ResponseFile


def summarise(files: Sequence[ResponseFile]) -> Finding:
    """A table with one row per file. Intervals are 1.96 standard errors of the mean over prompts."""
    rows = [_row(file) for file in files]
    cut = [f"{row[0]} ({1 - row[5]:.0%})" for row in rows if isinstance(row[5], float) and row[5] < 0.9]
    text = [
        f"Files: {len(files)}. tokens: mean length, with the end token; stopped: share that the model ended itself; "
        "empty: responses without a word; distinct: different n-grams over all n-grams, to be compared between files "
        "on the same prompts."
    ]
    if cut:
        text.append(
            f"Cut at the longest length allowed, more than one response in ten: {', '.join(cut)}; raise "
            "--max-new-tokens before judging them."
        )
    means = [_mean([row.length for row in file.rows if row.length is not None]) for file in files]
    lengths = Series(
        "tokens",
        [file.name for file in files],
        [mean for mean, _ in means],
        [mean - 1.96 * error for mean, error in means],
        [mean + 1.96 * error for mean, error in means],
    )
    return Finding(
        name="generate",
        title="Generated responses",
        text=text,
        columns=["responses", "model", "temperature", "prompts", "tokens", "stopped", "empty", "distinct_1",
                 "distinct_2", "self_bleu"],
        rows=rows,
        figures=[Figure("bars", "Length of responses", "responses", "tokens", [lengths])],
        settings={file.name: dict(file.header) for file in files},
    )  # fmt: skip


def _row(file: ResponseFile) -> list[Cell]:
    texts = [row.response for row in file.rows]
    stopped = [row.finished for row in file.rows if row.finished is not None]
    varied = diversity(texts)
    temperatures = {row.temperature for row in file.rows}
    return [
        file.name,
        str(file.header.get("model", "")),
        temperatures.pop() if len(temperatures) == 1 else None,
        len(file.rows),
        _mean([row.length for row in file.rows if row.length is not None])[0],
        sum(stopped) / len(stopped) if stopped else None,
        sum(not text.strip() for text in texts) / len(texts),
        varied["distinct_1"],
        varied["distinct_2"],
        varied.get("self_bleu"),
    ]


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error; nan for none."""
    if not values:
        return math.nan, math.nan
    mean = sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return mean, math.sqrt(spread / len(values))
