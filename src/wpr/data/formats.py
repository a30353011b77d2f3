"""From a record of a known dataset, or of your own columns, to a row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from wpr.data.dialogues import answered, as_messages, check_prompt, parse_transcript, same_prompt
from wpr.data.rows import BadRowError, Message, Row, checked_text, shown
from wpr.data.settings import FORMATS, DataSettings


@dataclass(frozen=True)
class HubDataset:
    """Where a format's own dataset lies on the hub: its name, its revision, and patterns of its files."""

    name: str
    train: tuple[str, ...]
    validation: tuple[str, ...]
    revision: str | None = None


_HH_FOLDERS = ("helpful-base", "helpful-online", "helpful-rejection-sampled", "harmless-base")

HUB: dict[str, HubDataset] = {
    # The dataset itself is a script; the hub's own conversion is what can be read without running it.
    "tldr": HubDataset(
        "openai/summarize_from_feedback",
        ("comparisons/train/*.parquet",),
        ("comparisons/validation/*.parquet",),
        "refs/convert/parquet",
    ),
    "hh": HubDataset(
        "Anthropic/hh-rlhf",
        tuple(f"{folder}/train.jsonl.gz" for folder in _HH_FOLDERS),
        tuple(f"{folder}/test.jsonl.gz" for folder in _HH_FOLDERS),
    ),
    "full-hh": HubDataset("Dahoas/full-hh-rlhf", ("data/train-*.parquet",), ("data/test-*.parquet",)),
    "apps": HubDataset("codeparrot/apps", ("train.jsonl",), ("test.jsonl",)),
    "preference": HubDataset(
        "HuggingFaceH4/ultrafeedback_binarized", ("data/train_prefs-*.parquet",), ("data/test_prefs-*.parquet",)
    ),
}
"""The datasets that formats bring with them."""


class Columns:
    """A record's values by our names, with errors that say which columns there are.

    released: whether rows are made as the paper's code makes them; see `DataSettings.fidelity`.
    """

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str], released: bool = False) -> None:
        self.values = values
        self.names = names
        self.released = released

    def has(self, ours: str) -> bool:
        """Whether the record has the column, and a value in it."""
        return self.values.get(self.names.get(ours, ours)) is not None

    def get(self, ours: str) -> Any:
        """The column's value; a missing column is a bad row."""
        theirs = self.names.get(ours, ours)
        if theirs not in self.values:
            there = ", ".join(map(repr, list(self.values)[:12])) or "none"
            raise BadRowError(
                f"no column {theirs!r} (there are {there}); name it in data.columns: {{{ours}: THEIR_NAME}}"
            )
        return self.values[theirs]

    def text(self, ours: str) -> str:
        """The column's value, which must be text with something in it."""
        return _filled(self.get(ours), self.names.get(ours, ours))


def make_row(values: Mapping[str, Any], origin: str, settings: DataSettings) -> Row | None:
    """The row of a record; None for one of another task (TL;DR's validation files hold news articles too).

    Raises `BadRowError` for a record of the wrong shape.
    """
    columns = Columns(values, settings.columns, settings.fidelity == "released")
    row = PARSERS[settings.format](columns)
    if row is None:
        return None
    kept = {ours: columns.get(ours) for ours in settings.kept_columns}
    return replace(row, columns={**row.columns, **kept}, origin=origin)


def _filled(value: Any, name: str) -> str:
    if not checked_text(value, name).strip():
        raise BadRowError(f"{name!r} is empty")
    return str(value)


# TL;DR


def _tldr(columns: Columns) -> Row | None:
    info, summaries, choice = columns.get("info"), columns.get("summaries"), columns.get("choice")
    if not isinstance(info, dict):
        raise BadRowError(f"'info' is {shown(info)}; an object with subreddit, title and post is needed")
    if info.get("post") is None and info.get("article") is not None:
        return None
    texts = _summaries(summaries)
    if isinstance(choice, bool) or not isinstance(choice, int | float) or choice not in (0, 1):
        raise BadRowError(f"'choice' is {shown(choice)}; 0 or 1, the number of the better summary, is needed")
    given = zip(texts, summaries, strict=True)
    reference = next((text for text, summary in given if summary.get("policy") == "ref"), None)
    post = Columns(info, {})
    title = checked_text(info.get("title") or "", "title").strip()  # a post may go without
    subreddit, text = post.text("subreddit").strip(), post.text("post").strip()
    return Row(
        f"POST\nSubreddit: r/{subreddit}\n{text}\nTL;DR:"
        if columns.released
        else f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {text}\n\nTL;DR:",
        texts[int(choice)],
        texts[1 - int(choice)],
        demonstrated=reference,
    )


def _summaries(summaries: Any) -> list[str]:
    if not isinstance(summaries, list) or len(summaries) != 2 or not all(isinstance(s, dict) for s in summaries):
        raise BadRowError(f"'summaries' is {shown(summaries)}; two objects with a text are needed")
    return [_filled(summary.get("text"), f"summaries[{i}].text").strip() for i, summary in enumerate(summaries)]


# HH-RLHF


def _transcripts(chosen: str, rejected: str) -> Row:
    prompt, better = answered(parse_transcript(chosen), "chosen")
    other, worse = answered(parse_transcript(rejected), "rejected")
    same_prompt(prompt, other)
    return Row(check_prompt(prompt), _filled(better, "chosen"), _filled(worse, "rejected"))


def _hh(columns: Columns) -> Row:
    return _transcripts(columns.text("chosen"), columns.text("rejected"))


def _full_hh(columns: Columns) -> Row:
    prompt = columns.text("prompt").rstrip()
    if not prompt.endswith("\n\nAssistant:"):
        raise BadRowError(f"'prompt' ends with {shown(prompt[-30:])}; it must end where the assistant's turn begins")
    return _transcripts(*(f"{prompt} {columns.text(name).strip()}" for name in ("chosen", "rejected")))


# APPS


def _apps(columns: Columns) -> Row:
    from wpr.rewards.code.problems import ProblemError, parse_problem

    given = columns.get("input_output")
    tests = checked_text(given, "input_output") if isinstance(given, str) else json.dumps(given)
    try:
        # What the reward would refuse in the middle of training is refused here.
        name = parse_problem(tests if tests.strip() else None, problem_id="the problem").fn_name
    except ProblemError as error:
        raise BadRowError(str(error)) from None
    starter = checked_text(columns.get("starter_code"), "starter_code") if columns.has("starter_code") else ""
    question = columns.text("question").strip()
    kind = "Use Call-Based format" if name else "Use Standard Input format"
    prompt = "\nQUESTION:\n" + "\n".join(filter(None, (question, starter.rstrip(), kind))) + "\n\nANSWER:\n"
    solutions = _solutions(columns.get("solutions") if columns.has("solutions") else None)
    return Row(
        prompt,
        solutions[0] if solutions else None,
        more=tuple(solutions[1:]) if columns.released else (),
        columns={
            "input_output": tests,
            "difficulty": columns.get("difficulty") if columns.has("difficulty") else None,
            "problem_id": columns.get("problem_id") if columns.has("problem_id") else None,
            "starter_code": starter,
            "fn_name": name,
        },
    )


def _json_column(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        # Integers stay text: some tests hold more digits than Python converts.
        return json.loads(value, parse_int=str) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"{name!r} is not JSON ({error}): {shown(value)}") from None


def _solutions(value: Any) -> list[str]:
    """Programs; of those after the first, only the ones that are text."""
    solutions = _json_column(value, "solutions") or []
    if not isinstance(solutions, list):
        raise BadRowError(f"'solutions' is {shown(solutions)}; a list of programs is needed")
    others = [one for one in solutions[1:] if isinstance(one, str) and one.strip()]
    return [_filled(solutions[0], "solutions[0]"), *others] if solutions else []


# Columns of text or chat messages


def _preference(columns: Columns) -> Row:
    prompt, better = _completion(columns, "chosen")
    other, worse = _completion(columns, "rejected")
    if isinstance(prompt, tuple) and isinstance(other, tuple):
        same_prompt(prompt, other)
    elif prompt != other:
        raise BadRowError(
            "one of 'chosen' and 'rejected' is a whole dialogue, the other is not; they must be of one kind"
        )
    shown_to_sft = _completion(columns, "demonstrated")[1] if columns.has("demonstrated") else None
    return Row(prompt, better, worse, demonstrated=shown_to_sft)


def _demonstrations(columns: Columns) -> Row:
    return Row(*_completion(columns, "completion"))


def _prompts(columns: Columns) -> Row:
    return Row(_prompt(columns))


def _prompt(columns: Columns) -> tuple[Message, ...] | str:
    value = columns.get("prompt")
    if isinstance(value, list):
        return check_prompt(as_messages(value, "prompt"))
    return columns.text("prompt")


def _completion(columns: Columns, name: str) -> tuple[tuple[Message, ...] | str, str]:
    """Prompt and completion. A dialogue of more than the answer brings its prompt; else there is a prompt column."""
    value = columns.get(name)
    if not isinstance(value, list):
        return _prompt(columns), columns.text(name)
    before, answer = answered(as_messages(value, name), name)
    prompt = check_prompt(before) if before else _prompt(columns)
    return prompt, _filled(answer, name)


PARSERS: dict[str, Callable[[Columns], Row | None]] = {
    "tldr": _tldr,
    "hh": _hh,
    "full-hh": _full_hh,
    "apps": _apps,
    "preference": _preference,
    "demonstrations": _demonstrations,
    "prompts": _prompts,
}
assert PARSERS.keys() == FORMATS.keys()
