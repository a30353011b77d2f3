"""Win rate against sampling temperature: a policy's responses against another model's, at each temperature.

At every temperature both models answered the same prompts; whose response has the higher score wins (ties count half).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wpr.evaluation.win_rate import win_rate
from wpr.findings import Cell, Figure, Finding, Mark, Series

COLUMNS = [
    "model", "temperature", "win rate", "low", "high", "p", "prompts", "mean score", "mean score of {against}",
]  # fmt: skip

Scores = Mapping[tuple[str, float], Mapping[str, float]]
"""Scores by model and temperature, and there by prompt."""


def temperature_finding(
    scores: Scores, against: str, judged_by: str, settings: Mapping[str, Any] | None = None
) -> Finding:
    """The finding on every model's win rate over ``against`` at the temperatures that both answered at."""
    models = list(dict.fromkeys(model for model, _ in scores if model != against))
    rows: list[list[Cell]] = []
    series = []
    for model in models:
        points = []
        for temperature in sorted({at for name, at in scores if name == model}):
            ours, theirs = scores[model, temperature], scores.get((against, temperature), {})
            shared = [prompt for prompt in ours if prompt in theirs]
            if not shared:
                continue
            first, second = ([side[prompt] for prompt in shared] for side in (ours, theirs))
            found = win_rate(first, second, groups=shared)
            points.append((temperature, found))
            means = [sum(values) / len(values) for values in (first, second)]
            rows.append([model, temperature, found.rate, found.low, found.high, found.p_value, len(shared), *means])
        if points:
            series.append(
                Series(
                    model, [at for at, _ in points], [found.rate for _, found in points],
                    [found.low for _, found in points], [found.high for _, found in points],
                )
            )  # fmt: skip
    if not series:
        known = ", ".join(f"{model} at {at:g}" for model, at in scores)
        raise ValueError(
            f"no model answered the same prompts as {against} at the same temperature (there are {known}); run `wpr "
            "generate RUN -t 0.2 -t 0.5 -t 0.8 -t 1`"
        )
    return Finding(
        name="temperature",
        title=f"Win rate over {against} by temperature",
        text=_told(series, against, judged_by),
        columns=[column.format(against=against) for column in COLUMNS],
        rows=rows,
        figures=[
            Figure(
                "lines", f"Win rate over {against} by sampling temperature", "temperature", "win rate", series,
                marks=[Mark(0.5, "no difference")], name="win-rate",
            )
        ],
        settings={"against": against, "judged by": judged_by, **(settings or {})},
    )  # fmt: skip


def _told(series: list[Series], against: str, judged_by: str) -> list[str]:
    told = [
        f"Responses to the same held-out prompts at the same temperature, judged by {judged_by}, against {against}."
    ]
    for one in series:
        above = [f"{x:g}" for x, low in zip(one.x, one.low or [], strict=True) if low > 0.5 and not isinstance(x, str)]
        below = [
            f"{x:g}" for x, high in zip(one.x, one.high or [], strict=True) if high < 0.5 and not isinstance(x, str)
        ]
        said = []
        if above:
            said.append(f"wins at temperature {', '.join(above)}")
        if below:
            said.append(f"loses at {', '.join(below)}")
        verdict = " and ".join(said) if said else "cannot be told apart from it at any temperature"
        told.append(f"{one.name} {verdict} (of {', '.join(f'{x}' for x in one.x)}).")
    if judged_by.startswith("the run's reward"):
        told.append("That is the score which training pushed up: a high rate shows that training worked, not more.")
    return told
