"""Numbers that must not reach the weights: what went wrong is written to a file before anything else happens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wpr.ppo.rollout import Rollout


@dataclass(frozen=True)
class Fault:
    """What went wrong, and where.

    kind: for instance ``policy logits``, ``score``, ``reward``, ``penalty``, ``loss``.
    message: one line for a person.
    prompt, response: of the response it was found in, if it is known.
    row: that response's number in this process's rollout. position: the token of the response, if it is known.
    values: the numbers at fault.
    """

    kind: str
    message: str
    prompt: Any = None
    response: str | None = None
    row: int | None = None
    position: int | None = None
    values: dict[str, Any] = field(default_factory=dict)


class TrainingFault(RuntimeError):  # noqa: N818 (a fault of the run, not of the program)
    """Training was stopped before a bad number could reach the weights. ``path`` is the file that tells about it."""

    def __init__(self, message: str, path: Path | None) -> None:
        self.path = path
        super().__init__(message)


def write_fault(fault: Fault, folder: Path, step: int, rank: int) -> Path:
    """Write the fault as JSON to ``faults/step-<step>-rank-<rank>.json``, a number added if that exists."""
    folder = folder / "faults"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step}-rank-{rank}.json"
    again = 1
    while path.exists():
        again += 1
        path = folder / f"step-{step}-rank-{rank}-{again}.json"
    content = {"step": step, "rank": rank, **asdict(fault)}
    path.write_text(json.dumps(_strict(content), indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    return path


def report_fault(fault: Fault | None, folder: Path, step: int, rank: int) -> tuple[str, Path | None]:
    """Write this process's fault, if it has one: what is to be said of it, and the file."""
    if fault is None:
        return "another process met a fault; see its file in faults/", None
    path = write_fault(fault, folder, step, rank)
    return f"{fault.message}; written to {path}", path


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _strict(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    return value


def describe_loss(
    batch: Rollout, log_probs: Tensor, values: Tensor, policy: Tensor, value: Tensor, text: Callable[[Tensor], str]
) -> Fault | None:
    """The fault of a micro-batch whose loss is not finite, with the first token that it may come from; None where the
    loss is finite. ``text`` decodes tokens.
    """
    if torch.isfinite(policy + value):
        return None
    bad = (~(log_probs.isfinite() & values.isfinite()) & batch.mask).nonzero()
    row, position = bad[0].tolist() if len(bad) else (None, None)
    found: dict[str, float] = {"policy_loss": policy.item(), "value_loss": value.item()}
    prompt = response = None
    if row is not None:
        found |= {"log_prob": log_probs[row, position].item(), "value": values[row, position].item()}
        start = batch.input_ids.shape[1] - batch.mask.shape[1]
        prompt = text(batch.input_ids[row, :start][batch.attention_mask[row, :start].bool()])
        response = text(batch.input_ids[row, start:][batch.mask[row]])
    message = f"the loss is not finite (policy {policy.item()}, value {value.item()})"
    return Fault("loss", message, prompt, response, row, position, found)


def describe_gradient(norm: float, part_norms: Mapping[str, float]) -> Fault:
    """The fault of a gradient that is not finite although the loss is. part_norms: ``policy_grad_norm`` and
    ``critic_grad_norm``, where they are known.
    """
    parts = {name.removesuffix("_grad_norm"): part for name, part in part_norms.items()}
    shown = ", ".join(f"{name} {part:.4g}" for name, part in parts.items())
    message = f"the gradient's norm is {norm}" + (f" ({shown})" if shown else "") + ", from a finite loss"
    return Fault("gradient", message, values={"norm": norm, **parts})
