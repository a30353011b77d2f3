"""Responses: what a model answered to each prompt, as text and as tokens; one record, one line of a file.

    {"header": {"model": "runs/tiny/sft/model", "temperature": 0.5, "prompts": 64, ...}}
    {"number": 0, "prompt_id": "5c1f", "prompt": "...", "response": "...", "response_ids": [31, 7, 2], "length": 3,
     "finished": true, "temperature": 0.5}

`wpr generate` writes files with a header, whole or not at all. PPO's files of held-out prompts (``responses.jsonl``,
``responses-before.jsonl``) have none, and besides what was measured: ``score``, ``kl``, ... Files from elsewhere may do
with ``prompt_id``, ``prompt`` and ``response`` alone. Responses of two files belong together where their ``prompt_id``
is the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wpr.data.rows import BadRowError, DataError, Message, Row, checked_text, shown
from wpr.runs.fingerprints import tokenizer_fingerprint
from wpr.runs.jsonl_log import PARTIAL
from wpr.runs.values import as_number, as_text, finite, mapping

if TYPE_CHECKING:
    from wpr.data import Encoder

ID_LENGTH = 12
"""Hexadecimal digits of a prompt's name: among a million prompts, two get the same one with probability 0.2%."""

AFTER, BEFORE = "responses.jsonl", "responses-before.jsonl"
"""PPO's files, of the policy and of the model that it started from."""

OLD_NAMES = {"tokens": "length", "stopped": "finished"}
"""What files of `wpr generate` called them before they had token ids."""

NOT_IN_FILES = ("prompt_ids", "drawn", "measures")


@dataclass(frozen=True)
class Response:
    """What a model answered to one prompt.

    prompt_id: names the prompt; the same in every file about it.
    prompt: a text that was continued, or the chat messages that were answered.
    number: its place, among the run's held-out responses or in its file. None in the next three: unknown.
    temperature: that it was drawn at, 0 for the most likely token each time.
    length: its tokens, with the one that ended it.
    finished: whether the model ended it; False where it was cut at the longest length allowed.
    response_ids: its tokens. drawn: whether these are what was drawn; else they are not known yet, or `with_tokens`
        made them of the text, which may have been drawn as other tokens.
    prompt_ids: the prompt's tokens, where they were asked for; files do not have them.
    measures: numbers by name, ``score``, ``gold``, ``kl``, ..., summed over its tokens where they are per token.
    divergences: the same by the names of other regularizers. columns: of the data that the prompt is from.
    """

    prompt_id: str
    prompt: str | list[Message]
    response: str
    number: int = 0
    response_ids: Sequence[int] = ()
    length: int | None = None
    finished: bool | None = None
    temperature: float | None = None
    divergences: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)
    prompt_ids: Sequence[int] = ()
    drawn: bool = False

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Response:
        """The response of plain values that are known to be right: of the trainer, or of a line that was checked."""
        names = [one.name for one in fields(cls) if one.name not in ("drawn", "measures")]
        known = {name: values[name] for name in names if values.get(name) is not None}
        numbers = {name: as_number(value) for name, value in values.items() if name not in names}
        measures = {name: number for name, number in numbers.items() if number is not None}
        return cls(**known, measures=measures, drawn="response_ids" in known)

    def as_dict(self) -> dict[str, Any]:
        """As a line has it; what is not known is left out."""
        values = {**vars(self), **self.measures, "response_ids": list(self.response_ids) if self.drawn else None}
        return {
            name: value
            for name, value in values.items()
            if name not in NOT_IN_FILES and value is not None and value != {}
        }

    @property
    def prompt_text(self) -> str:
        """The prompt to read."""
        return prompt_text(self.prompt)

    def measured(self, name: str) -> float | None:
        """What was measured; None where it was not, or is not finite."""
        return finite(self.measures.get(name))


@dataclass(frozen=True)
class ResponseFile:
    """A file of responses that was read.

    header: how they were made, see `wpr.evaluation.response_generation`; empty where the file does not say.
    rows: in the order of the file, each ``prompt_id`` once.
    """

    path: Path
    header: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Response, ...] = ()

    @property
    def name(self) -> str:
        """What tables call it: the file's name without its ending."""
        return self.path.name.removesuffix(".jsonl")

    def with_tokens(self, encoder: Encoder) -> list[Response]:
        """The responses with their prompts' tokens and their own: those of the file where this tokenizer drew them,
        else what it makes of the texts.
        """
        prints = mapping(self.header.get("fingerprint"))
        own = prints.get("tokenizer") == tokenizer_fingerprint(encoder.tokenizer)
        rows = self.rows if own else [replace(row, response_ids=(), drawn=False) for row in self.rows]
        return [with_tokens(row, encoder) for row in rows]

    def by_prompt(self) -> dict[str, Response]:
        """Responses by ``prompt_id``, in their order."""
        return {row.prompt_id: row for row in self.rows}


def prompt_id(prompt: str | Sequence[Message]) -> str:
    """The name of a prompt that has none: made of its content, so that the same prompt has it in every file."""
    return Row(prompt if isinstance(prompt, str) else tuple(prompt)).prompt_digest().hex()[:ID_LENGTH]


def prompt_text(prompt: object) -> str:
    """A prompt to read: text as it is, chat turns as ``role: content`` paragraphs."""
    if isinstance(prompt, list):
        turns = (mapping(turn) for turn in prompt)
        return "\n\n".join(f"{as_text(turn.get('role')) or 'turn'}: {as_text(turn.get('content'))}" for turn in turns)
    return as_text(prompt)


def with_tokens(row: Response, encoder: Encoder) -> Response:
    """The response with its prompt's tokens, and with its own where the file has none, or none of this tokenizer's."""
    prompt = row.prompt if isinstance(row.prompt, str) else tuple(row.prompt)
    drawn = row.drawn and max(row.response_ids, default=0) < len(encoder.tokenizer)
    ids = row.response_ids if drawn else _tokenized(row, encoder)
    return replace(row, prompt_ids=encoder.prompt(Row(prompt)), response_ids=ids, drawn=drawn)


def _tokenized(row: Response, encoder: Encoder) -> list[int]:
    """Tokens of a response of which a file from elsewhere, or of an older run, has the text alone.

    A text can be tokenized in several ways; what is tried is the text by itself and, for tokenizers that drop or add a
    space at the start of a text, as what it adds to the prompt. The one of the recorded length is taken.
    """

    def bare(text: str) -> list[int]:
        return list(encoder.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    end = [encoder.end_id] if row.finished else []
    tried = [[*bare(row.response), *end]]
    if isinstance(row.prompt, str):
        start, whole = bare(row.prompt), bare(row.prompt + row.response)
        if whole[: len(start)] == start:
            tried.append([*whole[len(start) :], *end])
    return next((ids for ids in tried if len(ids) == row.length), tried[0])


def whose_tokens(rows: Sequence[Response]) -> str:
    """Whose tokens are measured: those drawn, or what a tokenizer makes of the texts."""
    again = [row for row in rows if not row.drawn]
    if not again:
        return "The responses' tokens are those that were drawn."
    same = sum(row.length is None or len(row.response_ids) == row.length for row in again)
    return (
        f"Responses are tokenized again from their texts: {same} of {len(again)} have as many tokens as when they "
        "were drawn."
    )


def drawn_at(header: Mapping[str, Any]) -> float | None:
    """The temperature in the header of a file of responses; None where it has none."""
    sampling = header.get("sampling")
    found = sampling.get("temperature") if isinstance(sampling, Mapping) else header.get("temperature")
    return float(found) if isinstance(found, int | float) else None


def read_responses(path: Path | str) -> ResponseFile:
    """Read and check a file of responses; `DataError` names the file, the line and what is wrong with it."""
    path = Path(path)
    lines = _text(path).split("\n")
    header: dict[str, Any] = {}
    rows: list[Response] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        values = _object(line, f"{path}:{number}", last=number == len(lines))
        if "header" in values and "response" not in values:
            if rows or header:
                raise DataError(
                    f"{path}:{number} is a second header; files of responses cannot be joined end to end: pass them "
                    "one by one"
                )
            header = _header(values["header"], f"{path}:{number}")
            continue
        row = response_of({"number": len(rows)} | values, f"{path}:{number}", ours=bool(header))
        if row.prompt_id in seen:
            raise DataError(
                f"{path}:{number} answers the prompt {row.prompt_id!r} again, as line {seen[row.prompt_id]} does; a "
                "file holds one response per prompt: put the others into a file of their own"
            )
        seen[row.prompt_id] = number
        rows.append(row)
    if not rows:
        raise DataError(f"{path} has no responses; make it again with `wpr generate`")
    wanted = header.get("prompts")
    if isinstance(wanted, int) and wanted != len(rows):
        raise DataError(
            f"{path} has {len(rows)} responses where its header says {wanted}; lines are missing: copy it again, or "
            "make it again with `wpr generate`"
        )
    return ResponseFile(path, header, tuple(rows))


def _text(path: Path) -> str:
    if not path.is_file():
        if path.is_dir():
            raise DataError(f"{path} is a folder; name one file of responses (*.jsonl) in it")
        if path.with_name(path.name + PARTIAL).exists():
            raise DataError(
                f"{path} is not finished; run the same `wpr generate` again, which goes on where it stopped"
            )
        raise DataError(f"{path} does not exist; `wpr generate` writes files of responses to a run's generations/")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line} holds the byte 0x{error.object[error.start]:02x}, which is not UTF-8") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _object(line: str, where: str, last: bool) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        cut = "; the file was cut off: copy it again" if last else ""
        raise DataError(f"{where} is not JSON ({error}): {shown(line)}{cut}") from None
    if not isinstance(values, dict):
        raise DataError(f"{where} is {shown(values)}; a line holds one object with prompt_id, prompt and response")
    return values


def _header(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise DataError(f"{where} has the header {shown(values)}; it must be an object")
    return values


def response_of(values: Mapping[str, Any], where: str, ours: bool = True) -> Response:
    """A line's response, checked; `DataError` begins with ``where``. ours: whether the file is one that this package
    wrote. Another may mean something else by the names of what a line may have besides, which is then not known.
    """
    for name in OPTIONAL | OLD_NAMES if ours else ("temperature", *OLD_NAMES):
        fits, limit = OPTIONAL[OLD_NAMES.get(name, name)]
        if values.get(name) is not None and not fits(values[name]):
            raise DataError(f"{where}: {name!r} is {shown(values[name])}; it must be {limit}")
    values = {OLD_NAMES.get(name, name): value for name, value in values.items()}
    values = {name: value for name, value in values.items() if name not in OPTIONAL or OPTIONAL[name][0](value)}
    for name in ("prompt_id", "prompt", "response"):
        if name not in values:
            raise DataError(f"{where} has no {name!r} (it has {', '.join(sorted(values))}); every response needs one")
    identity = values["prompt_id"]
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        raise DataError(f"{where} has the prompt_id {shown(identity)}; it must be a text or a whole number")
    try:
        _check_prompt(values["prompt"])
        checked_text(values["response"], "response")
    except BadRowError as error:
        raise DataError(f"{where}: {error}") from None
    return Response.from_values(values | {"prompt_id": str(identity)})


def _check_prompt(value: Any) -> None:
    if not isinstance(value, list):
        checked_text(value, "prompt")
        return
    if not value:
        raise BadRowError("'prompt' has no messages")
    for turn in value:
        if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
            raise BadRowError(f"'prompt' has the turn {shown(turn)}; a turn is an object with role and content")
        for name in ("role", "content"):
            checked_text(turn[name], f"prompt.{name}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _is_nonnegative(value: object) -> bool:
    found = finite(value)
    return found is not None and found >= 0


OPTIONAL: dict[str, tuple[Callable[[Any], bool], str]] = {
    "number": (_is_whole, "a whole number of 0 or more"),
    "length": (_is_whole, "a whole number of 0 or more"),
    "temperature": (_is_nonnegative, "a number of 0 or more"),
    "finished": (lambda value: isinstance(value, bool), "true or false"),
    "divergences": (lambda value: isinstance(value, dict), "an object"),
    "columns": (lambda value: isinstance(value, dict), "an object"),
    "response_ids": (lambda value: isinstance(value, list) and all(map(_is_whole, value)), "a list of token ids"),
}
"""What a line may have besides: whether a value fits, and what it must be."""
