"""Semantic contrast of several regularizers at the same positions (`semantic_contrast` has the formula)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wpr.analysis.semantic_contrast import Trial, contrast, gaps
from wpr.findings import Cell, Figure, Finding, Mark, Series
from wpr.regularizers import Regularizer


def contrast_finding(
    regularizers: Mapping[str, Regularizer], trial: Trial, model: str, settings: Mapping[str, Any] | None = None
) -> tuple[Finding, list[dict[str, Any]]]:
    """The finding, and the gaps of every position behind it."""
    found, data = {}, []
    for name, regularizer in regularizers.items():
        near, far = gaps(regularizer, trial)
        found[name] = contrast(near, far)
        data += [
            {"regularizer": name, "position": position, "near": one, "far": other}
            for position, (one, other) in enumerate(zip(near.tolist(), far.tolist(), strict=True))
        ]
    rows: list[list[Cell]] = [[name, *values, len(trial.origin)] for name, values in found.items()]
    values, low, high = (list(column) for column in zip(*found.values(), strict=True))
    listed = "; ".join(f"{name} {value:.3f} ({a:.3f} to {b:.3f})" for name, (value, a, b) in found.items())
    text = [
        f"At {len(trial.origin)} positions where {model} is fairly sure of the next token, half of that token's "
        "probability is moved to its nearest neighbour in the embedding, and alternatively to an unrelated token of "
        "the same probability. The contrast is the penalty of the first over that of the second: 1 is blind to "
        "meaning, as every f-divergence is by construction, 0 lets neighbours change places for free.",
        f"With 95% intervals over positions: {listed}.",
    ]
    figure = Figure(
        "bars", "Semantic contrast", "regularizer", "contrast", [Series("contrast", list(found), values, low, high)],
        marks=[Mark(1.0, "blind to meaning")], name="contrast",
    )  # fmt: skip
    finding = Finding(
        name="contrast",
        title="Semantic contrast",
        text=text,
        columns=["regularizer", "contrast", "low", "high", "positions"],
        rows=rows,
        figures=[figure],
        settings={"model": model, **(settings or {})},
    )
    return finding, data
