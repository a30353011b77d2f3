"""What is watched and never trained on: scores of responses beside the reward, of which one may be gold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GOLD = "gold"
"""What the score that policies are compared by is called in logs and files."""

PROMPT, SOURCE = "prompt", "source"
"""What responses are compared with: the prompt itself, or a column, by default of this name."""

NEEDS = {"meaning": "encoder", "fluency": "model", "function": "function", "words-kept": None, "copies": None}
"""The setting that each kind needs and no other kind takes."""


@dataclass
class MonitorSettings:
    """One score of responses.

    kind: ``meaning``, cosine of an encoder's vectors of response and source; ``words-kept``, share of the source's
        words that the response has; ``copies``, 1 for a response that is its source, else 0; ``fluency``, mean
        log-probability of the response's tokens under a language model; ``function``, of your own.
    of: the source: a column of the data that `data.columns` keeps, or ``prompt``, which of a chat is the last turn; by
        default the column ``source``.
    encoder: ``wordllama``, ``minilm`` (packages from PyPI), a folder or a hub name.
    model: ``pico``, a folder or a hub name of a causal language model.
    function: ``package.module:function``, see `wpr.rewards.FunctionReward`.
    in_training: whether it is also logged of the responses in training; without, it is asked only about held-out ones,
        which spares the time of a large encoder or language model.
    """

    kind: Literal["meaning", "words-kept", "fluency", "copies", "function"]
    of: str | None = None
    encoder: str | None = None
    model: str | None = None
    function: str | None = None
    in_training: bool = True

    def __post_init__(self) -> None:
        needed = NEEDS[self.kind]
        if needed is not None and not getattr(self, needed):
            raise ValueError(f"kind={self.kind} needs {needed}: see docs/evaluation.md, section 3")
        taken = {needed} if self.kind in ("fluency", "function") else {needed, "of"}
        for name in ("encoder", "model", "function", "of"):
            if name not in taken and getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)} has no meaning for kind={self.kind}; leave it out")

    @property
    def source(self) -> str | None:
        """The column that responses are compared with, or ``prompt``; None where they are not."""
        return (self.of or SOURCE) if self.kind in ("meaning", "words-kept", "copies") else None
