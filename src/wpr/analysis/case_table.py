"""Case studies as a finding: what two penalties say of every token of responses to one prompt (`case_study`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wpr.findings import Cell, Figure, Finding, Series, slug

COLUMNS = [
    "policy", "place", "token", "policy's probability", "reference's", "KL penalty", "Wasserstein penalty",
    "mass moved", "largest move", "its mass", "its cost",
]  # fmt: skip


def case_finding(
    studies: Mapping[str, Mapping[str, Any]], prompt: str, wasserstein: str, settings: Mapping[str, Any] | None = None
) -> Finding:
    """The finding on one study a policy, as `study_response` makes them. wasserstein: what its penalty is called."""
    rows: list[list[Cell]] = []
    figures, text = [], [f"Prompt: {prompt}"]
    for policy, study in studies.items():
        tokens = study["tokens"]
        text.append(f"{policy} answers: {study['response'].strip() or '(nothing)'}")
        text += _told(policy, tokens)
        for place, token in enumerate(tokens, 1):
            move = next((flow for flow in token["plan"] if flow["from"] != flow["to"]), None)
            moved = (
                [None, None, None] if move is None else [f"{move['from']} -> {move['to']}", move["mass"], move["cost"]]
            )
            rows.append(
                [
                    policy, place, token["text"], token["policy"], token["reference"], token["kl"], token["wpr"],
                    token["moved"], *moved,
                ]
            )  # fmt: skip
        places = [float(place) for place in range(1, len(tokens) + 1)]
        series = [
            Series(name, places, _normalised([token[key] for token in tokens]))
            for name, key in (("reverse KL", "kl"), (wasserstein, "wpr"))
        ]
        figures.append(
            Figure(
                "lines", f"{policy}: penalties token by token", "token", "penalty, of its range", series,
                name=f"tokens-{slug(policy)}",
                note="Each penalty from its smallest value in the response (0) to its largest (1).",
            )
        )  # fmt: skip
    return Finding(
        name="case-study",
        title="Case study of a prompt",
        text=text,
        columns=COLUMNS,
        rows=rows,
        figures=figures,
        settings={"prompt": prompt, "wasserstein": wasserstein, **(settings or {})},
    )


def _told(policy: str, tokens: list[Mapping[str, Any]]) -> list[str]:
    """The tokens that each penalty objects to most."""
    told = []
    for name, key in (("reverse KL", "kl"), ("the Wasserstein penalty", "wpr")):
        ranked = sorted((token for token in tokens if token[key] is not None), key=lambda token: -token[key])[:3]
        listed = ", ".join(f"{token['text']!r} ({token[key]:.3g})" for token in ranked)
        told.append(f"{policy}: {name} is largest at {listed}.")
    return told


def _normalised(values: list[float | None]) -> list[float]:
    """From 0 at the smallest to 1 at the largest; a gap where there is none."""
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    spread = (high - low) or 1.0
    return [float("nan") if value is None else (value - low) / spread for value in values]
