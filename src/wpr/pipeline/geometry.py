"""`wpr geometry`: token geometries of models by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from wpr.pipeline.errors import OptionError, UserError
from wpr.pipeline.models import load_causal, load_tokenizer
from wpr.pipeline.recipe import ModelSettings
from wpr.transport.geometry import Scale, TokenGeometry, input_embeddings
from wpr.transport.metrics import METRICS

NEIGHBOURS = 512
"""The paper's k1."""


def build_geometry(model: str, path: Path, metric: str, neighbours: int | None, scale: str) -> str:
    """Measure a model's vocabulary and write the file; words for what was found.

    neighbours: 0 keeps all pairs; None: the paper's number, or all others where the vocabulary is smaller.
    """
    unit = parse_scale(scale)
    if metric not in METRICS:
        raise OptionError(f"--metric {metric} must be {' or '.join(METRICS)}")
    weight = _embeddings(model)
    if neighbours is not None and not 0 <= neighbours < len(weight):
        raise OptionError(
            f"--neighbours {neighbours} is outside 0 to {len(weight) - 1} for {model}'s vocabulary of {len(weight)} "
            "tokens; 0 keeps all pairs"
        )
    kept = min(NEIGHBOURS, len(weight) - 1) if neighbours is None else neighbours or None
    geometry = TokenGeometry.from_embeddings(weight, metric, kept, unit)
    try:
        geometry.save(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another file with --output") from error
    return f"{geometry.describe()}\nwritten to {path}"


def show_geometry(model: str, path: Path | None, words: list[str]) -> str:
    """Words for a model's geometry, measured now or read from ``path``, with the nearest tokens of ``words``."""
    weight = _embeddings(model)
    if path is None:
        geometry = TokenGeometry.from_embeddings(weight, neighbours=min(NEIGHBOURS, len(weight) - 1))
    else:
        geometry = TokenGeometry.load(path, weight)
    lines = [geometry.describe()]
    tokenizer = load_tokenizer(model) if words else None
    for word in words:
        lines.append(_neighbours(geometry, tokenizer, word))
    return "\n".join(lines)


def parse_scale(text: str) -> Scale:
    """``median-nn``, ``none``, or a number."""
    if text in ("none", "median-nn"):
        return None if text == "none" else "median-nn"
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"--scale {text!r} must be median-nn, none or a number") from None


def _embeddings(model: str) -> Any:
    """A model's embeddings, on a GPU if there is one."""
    return input_embeddings(load_causal(ModelSettings(model))).to("cuda" if torch.cuda.is_available() else "cpu")


def _neighbours(geometry: TokenGeometry, tokenizer: Any, word: str) -> str:
    ids = tokenizer(" " + word, add_special_tokens=False)["input_ids"]
    tokens, costs = geometry.nearest_tokens(ids[0])
    shown = ", ".join(
        f"{tokenizer.decode([token])!r} {cost:.2f}" for token, cost in zip(tokens.tolist(), costs.tolist(), strict=True)
    )
    part = "" if len(ids) == 1 else f" (of {len(ids)} tokens; the first is {tokenizer.decode([ids[0]])!r})"
    return f"{word}{part}: {shown}"
