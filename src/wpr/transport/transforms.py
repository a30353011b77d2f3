"""What is done to embeddings before distances are taken: a list of steps, fitted once to a vocabulary.

Notation for shapes: ``V`` vocabulary, ``d`` embedding size.

    centre            x - m            m: mean embedding of the vocabulary
    centre-frequency  x - m            m: mean weighted by how often the reference emits each token
    unit              x / |x|
    remove-K          x - B B' x       B: the K leading directions, eigenvectors of the second moments ``mean x x'``
    whiten-P          A x              A: second moments to the power -P/2, on their eigenvectors; 0 leaves x, 1 makes
                                       all directions equally large
    shuffle-SEED      x_i = x_p(i)     p: a permutation of the tokens, drawn by the seed

Steps are written one after the other, ``centre/unit``, and each is fitted to what the steps before it made. The common
direction of a model's embeddings and their lengths say how often a token occurs rather than what it means; centred unit
vectors have neither (docs/numerics.md). Euclidean distances of unit vectors are chords, between 0 and 2. A shuffled
geometry has the same distances between other tokens: the control for meaning, since nothing else of it has changed.

The transformed matrix is a copy, in the type of the original.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from wpr.transport.distances import unit_rows
from wpr.transport.precision import full_precision

NONE = "none"
ROWS_AT_ONCE = 1 << 14
"""Rows that are converted to working precision together."""

STEPS = {
    "centre": "subtract the mean embedding",
    "centre-frequency": "subtract the mean embedding, weighted by how often the reference emits each token",
    "unit": "divide by the length",
    "remove-K": "remove the K leading directions",
    "whiten-P": "divide directions by their size to the power P, between 0 and 1",
    "shuffle-SEED": "deal the embeddings to other tokens, by a permutation drawn from SEED",
}


@dataclass(frozen=True)
class Transform:
    """Fitted steps.

    text: as written. tensors: what was fitted, by ``NUMBER.NAME`` with the number of the step: ``mean`` ``(d,)`` or
    ``matrix`` ``(d, d)``; of a shuffle ``order`` ``(V,)``, whose embedding each token gets.
    """

    text: str
    tensors: Mapping[str, Tensor]

    @property
    def is_identity(self) -> bool:
        return self.text == NONE

    def __call__(self, weight: Tensor) -> Tensor:
        """The transformed embeddings ``(V, d)``; the matrix itself where nothing is to be done."""
        if self.is_identity:
            return weight
        out = torch.empty_like(weight)
        # Every other step does the same to all rows, so that they may be shuffled first.
        order = self._order(weight)
        row_wise = [number for number, (name, _) in enumerate(steps_of(self.text)) if name != "shuffle"]
        with full_precision(weight.device):
            for start in range(0, len(weight), ROWS_AT_ONCE):
                part = slice(start, start + ROWS_AT_ONCE)
                rows = _working(weight[part] if order is None else weight[order[part]])
                for number in row_wise:
                    rows = self._step(number, rows)
                out[part] = rows
        return out

    def _order(self, weight: Tensor) -> Tensor | None:
        """All shuffles as one: ``(V,)``, whose embedding each token gets; None without any."""
        orders = [tensor for name, tensor in self.tensors.items() if name.endswith(".order")]
        if not orders:
            return None
        whole = torch.arange(len(weight), device=weight.device)
        for order in orders:
            if len(order) != len(weight):
                raise ValueError(
                    f"transform={self.text!r} shuffles {len(order)} of {len(weight)} tokens: those of another model "
                    "that have an embedding; shuffle a model's own embeddings"
                )
            whole = whole[order.to(weight.device)]
        return whole

    def _step(self, number: int, rows: Tensor) -> Tensor:
        if (order := self.tensors.get(f"{number}.order")) is not None:
            return rows[order.to(rows.device)]
        if (mean := self.tensors.get(f"{number}.mean")) is not None:
            return rows - mean.to(rows)
        if (matrix := self.tensors.get(f"{number}.matrix")) is not None:
            return rows @ matrix.to(rows)
        return unit_rows(rows)


IDENTITY = Transform(NONE, {})


def fit(text: str, weight: Tensor, token_weights: Tensor | None = None) -> Transform:
    """Fit the steps of ``text`` to embeddings ``(V, d)``. token_weights: ``(V,)`` frequencies, for
    ``centre-frequency``.
    """
    fitted: dict[str, Tensor] = {}
    steps = steps_of(text)
    rows = _working(weight) if steps else weight
    for number, (name, value) in enumerate(steps):
        part = _FITS[name](rows, value, token_weights)
        fitted |= {f"{number}.{key}": tensor for key, tensor in part.items()}
        rows = Transform(text, fitted)._step(number, rows)
    return Transform(text if steps else NONE, fitted)


def steps_of(text: str) -> list[tuple[str, float]]:
    """Names and numbers of the steps; refuses what is none, naming the nearest."""
    if text == NONE:
        return []
    found = []
    for step in text.split("/"):
        name, _, number = step.rpartition("-")
        counted = number.isdecimal() and (name == "shuffle" or (name == "remove" and int(number) > 0))
        if step in ("centre", "centre-frequency", "unit"):
            found.append((step, 0.0))
        elif counted or (name == "whiten" and _fraction(number) is not None):
            found.append((name, float(number)))
        else:
            close = difflib.get_close_matches(step, STEPS, 1)
            hint = f"did you mean {close[0]}?" if close else f"use steps as {', '.join(STEPS)}"
            raise ValueError(f"transform={text!r} has the step {step!r}, which is none; {hint} (or write none)")
    return found


def _fraction(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= 1 else None


def _working(weight: Tensor) -> Tensor:
    return weight if weight.dtype == torch.float64 else weight.float()


def _mean(rows: Tensor, value: float, token_weights: Tensor | None) -> dict[str, Tensor]:
    return {"mean": rows.double().mean(0).to(rows.dtype)}


def _weighted_mean(rows: Tensor, value: float, token_weights: Tensor | None) -> dict[str, Tensor]:
    if token_weights is None:
        raise ValueError(
            "transform step centre-frequency needs token_weights: how often the reference emits each token, see "
            "token_frequencies"
        )
    if token_weights.shape != rows.shape[:1] or not (token_weights >= 0).all() or not token_weights.sum() > 0:
        raise ValueError(
            f"token_weights of shape {tuple(token_weights.shape)} for {len(rows)} tokens; pass one weight per token, "
            "none negative, not all 0"
        )
    weights = token_weights.to(rows.device).double()
    return {"mean": (weights @ rows.double() / weights.sum()).to(rows.dtype)}


def _nothing(rows: Tensor, value: float, token_weights: Tensor | None) -> dict[str, Tensor]:
    return {}


def _directions(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of the second moments, rising, and their vectors as columns: ``(d,)`` and ``(d, d)``, float64."""
    moments = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device)
    for part in rows.split(ROWS_AT_ONCE):
        moments += part.double().mT @ part.double()
    values, vectors = torch.linalg.eigh(moments / len(rows))
    return values, vectors


def _removal(rows: Tensor, count: float, token_weights: Tensor | None) -> dict[str, Tensor]:
    if count >= rows.shape[1]:
        raise ValueError(f"transform step remove-{count:g} leaves nothing of {rows.shape[1]} directions; remove fewer")
    leading = _directions(rows)[1][:, -int(count) :]
    identity = torch.eye(rows.shape[1], dtype=torch.float64, device=rows.device)
    return {"matrix": (identity - leading @ leading.mT).to(rows.dtype)}


def _whitening(rows: Tensor, power: float, token_weights: Tensor | None) -> dict[str, Tensor]:
    values, vectors = _directions(rows)
    # Directions that are hardly used are not blown up: what is there is rounding.
    values = values.clamp_min(1e-6 * values[-1])
    return {"matrix": (vectors * values.pow(-power / 2)).matmul(vectors.mT).to(rows.dtype)}


def _shuffle(rows: Tensor, seed: float, token_weights: Tensor | None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(int(seed))  # on the CPU: the same order on every device
    return {"order": torch.randperm(len(rows), generator=generator)}


_FITS: dict[str, Callable[[Tensor, float, Tensor | None], dict[str, Tensor]]] = {
    "centre": _mean,
    "centre-frequency": _weighted_mean,
    "unit": _nothing,
    "remove": _removal,
    "whiten": _whitening,
    "shuffle": _shuffle,
}
