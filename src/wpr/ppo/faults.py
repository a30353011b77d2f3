"""Numbers that must not reach the weights: what went wrong is written to a file before anything else happens."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What went wrong, and where.

    kind: for instance ``policy logits``, ``score``, ``reward``, ``penalty``, ``loss``.
    message: one line for a person.
    prompt, response: of the response it was found in, if it can be told.
    row: that response's number in this process's rollout. position: the token of the response, if it can be told.
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


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _strict(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    return value
