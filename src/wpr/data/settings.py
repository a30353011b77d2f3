"""The recipe's ``data`` and ``split`` sections."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from wpr.data.rows import DataError

FORMATS: dict[str, tuple[str, ...]] = {
    "tldr": ("info", "summaries", "choice"),
    "hh": ("chosen", "rejected"),
    "full-hh": ("prompt", "chosen", "rejected"),
    "apps": ("question", "input_output", "solutions", "starter_code", "difficulty", "problem_id"),
    "preference": ("prompt", "chosen", "rejected", "demonstrated"),
    "demonstrations": ("prompt", "completion"),
    "prompts": ("prompt",),
}
"""The formats, and the columns that each of them knows by name."""

FIDELITIES = ("own", "released")

RESERVED = ("prompt", "input_ids", "attention_mask")
"""Names that PPO's rows have for themselves."""


@dataclass
class DataSettings:
    """Where the data lies, how it is read, and how long it may be."""

    format: str
    """How a record becomes a row: tldr, hh (Anthropic's transcripts), full-hh (Dahoas' columns), apps, preference
    (columns of text or chat messages), demonstrations (prompt and completion), prompts (for PPO alone)."""

    source: str | list[str] | None = None
    """Local files, a folder, a glob pattern, or a Hugging Face hub dataset; unset: the format's own on the hub."""

    revision: str | None = None
    """Revision of the hub dataset; unset: the format's own."""

    files: list[str] | None = None
    """Patterns of the training files in a folder or hub dataset (``*`` also crosses ``/``); unset: the format's own."""

    validation: str | list[str] | None = None
    """Held-out data of its own: local files, a folder with one data file, or a glob pattern."""

    validation_files: list[str] | None = None
    """Held-out data as patterns in the same folder or hub dataset. Unset: the format's own, if ``files`` is unset too;
    an empty list: none, so that ``split.held_out`` is taken from the training files."""

    columns: dict[str, str] = field(default_factory=dict)
    """Our name to theirs: ``{"prompt": "question", "chosen": "good"}``. A name that the format does not know is a
    column to keep for the rewards."""

    template: str = "auto"
    """chat: the tokenizer's chat template; text: the format's plain text; auto: chat where the tokenizer has one."""

    max_prompt_tokens: int = 512
    """Longest prompt, template and beginning-of-sequence token included."""

    max_completion_tokens: int = 256
    """Longest completion, end token included, as PPO's ``max_new_tokens`` counts."""

    too_long: str = "drop"
    """Rows over either limit: drop, or truncate (prompts lose their beginning; completions their end, end token
    included)."""

    bad_rows: str = "stop"
    """Malformed rows: stop before anything is trained, or skip them and say how many."""

    fidelity: str = "own"
    """own; or released, as the paper's code has it: TL;DR's prompts without the title, every solution of APPS for SFT,
    and a prompt in PPO as often as it has rows."""

    limit: int | None = None
    """At most so many rows of the training and of the validation files, drawn by the seed; for trials."""

    def __post_init__(self) -> None:
        _choice("data.format", self.format, FORMATS)
        _choice("data.template", self.template, ("auto", "chat", "text"))
        _choice("data.too_long", self.too_long, ("drop", "truncate"))
        _choice("data.bad_rows", self.bad_rows, ("stop", "skip"))
        _choice("data.fidelity", self.fidelity, FIDELITIES)
        for name in ("max_prompt_tokens", "max_completion_tokens", "limit"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise DataError(f"data.{name} is {value!r}; it must be a whole number of at least 1")
        for name in ("source", "files", "validation"):
            if getattr(self, name) == [] or getattr(self, name) == "":
                raise DataError(f"data.{name} is empty; name a file, or leave it out")
        if self.validation is not None and self.validation_files is not None:
            raise DataError(
                "data.validation and data.validation_files are both set; keep validation for files elsewhere, or "
                "validation_files for patterns in data.source"
            )
        self._check_columns()

    def _check_columns(self) -> None:
        own = FORMATS[self.format]
        for ours, theirs in self.columns.items():
            if not isinstance(ours, str) or not isinstance(theirs, str) or not ours or not theirs:
                raise DataError(f"data.columns maps {ours!r} to {theirs!r}; both must be names of columns")
            if ours in own:
                continue
            close = difflib.get_close_matches(ours, own, 1, 0.75)
            if close:
                raise DataError(f"data.columns has {ours!r}; did you mean {close[0]!r}? To keep a column, rename it")
            if ours in RESERVED:
                raise DataError(f"data.columns has {ours!r}, which PPO's rows need for themselves; choose another name")

    @property
    def kept_columns(self) -> dict[str, str]:
        """Columns to keep for the rewards: our name to theirs."""
        return {ours: theirs for ours, theirs in self.columns.items() if ours not in FORMATS[self.format]}


@dataclass
class SplitSettings:
    """How rows are shared out to the stages."""

    sft: float = 0.2
    """Share of supervised fine-tuning. Shares are of what is left after ``held_out``, and add up to at most 1."""

    reward: float = 0.4
    """Share of the reward model."""

    ppo: float = 0.4
    """Share of PPO."""

    held_out: float = 0.05
    """Share that no stage trains on; taken first, and only where the data has no validation files of its own."""

    by: str = "prompt"
    """prompt: all rows of a prompt go to one part. comparison: every row by itself, as in the paper, where prompts
    recur across stages."""

    def __post_init__(self) -> None:
        _choice("split.by", self.by, ("prompt", "comparison"))
        for name in ("sft", "reward", "ppo", "held_out"):
            share = getattr(self, name)
            if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
                raise DataError(f"split.{name} is {share!r}; it must be a share between 0 and 1")
        if self.held_out == 1:
            raise DataError("split.held_out is 1, which leaves nothing to train on; lower it")
        total = self.sft + self.reward + self.ppo
        if total > 1 + 1e-9:
            raise DataError(f"split.sft, reward and ppo add up to {total:g}; they are shares of one whole: at most 1")
        if total == 0:
            raise DataError("split.sft, reward and ppo are all 0; give the stage that you want to run a share")


def _choice(name: str, value: object, known: dict[str, tuple[str, ...]] | tuple[str, ...]) -> None:
    if isinstance(value, str) and value in known:
        return
    close = difflib.get_close_matches(str(value).lower(), list(known), 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise DataError(f"{name} is {value!r}; {hint}known are {', '.join(known)}")
