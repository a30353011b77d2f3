"""Rubrics: what a judge is told before two responses, and the form of its answer. One YAML file each.

    title: the better joke                 for tables
    answer: letter                         or json: an object with "comparison" and "choice"
    system: You know what is funny.        left out if there is none
    user: |
      {prompt} ... {response_a} ... {response_b}

The three fields stand in braces; other braces are text, and ``{{prompt}}`` writes the word in braces.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from wpr.evaluation.judging.questions import JudgingSettingsError, Message
from wpr.evaluation.judging.verdicts import LETTER, OBJECT, read_letter, read_object

FIELDS = ("prompt", "response_a", "response_b")
FORMS: Mapping[str, tuple[Callable[[str], str], str]] = {"letter": (read_letter, LETTER), "json": (read_object, OBJECT)}
_FIELD = re.compile(r"\{(\{\w+\})\}|\{(\w+)\}")


@dataclass(frozen=True)
class Rubric:
    """A rubric that was read. answer: the form of the answer, one of `FORMS`."""

    name: str
    title: str
    answer: str
    user: str
    system: str | None = None

    def messages(self, fields: Mapping[str, str]) -> tuple[Message, ...]:
        """What is sent."""
        return messages_of(self.system, self.user, fields)

    @property
    def read(self) -> Callable[[str], str]:
        """Makes A, B or E of an answer."""
        return FORMS[self.answer][0]

    @property
    def form(self) -> str:
        """The form of an answer in words."""
        return FORMS[self.answer][1]


def shipped_rubrics() -> list[str]:
    """Names of the rubrics in the package."""
    folder = resources.files("wpr.evaluation.judging.rubrics")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_rubric(name: str) -> Rubric:
    """A shipped rubric by its name, or one of your own by its file."""
    if name in shipped_rubrics():
        file = resources.files("wpr.evaluation.judging.rubrics") / f"{name}.yaml"
        return read_rubric(file.read_text(encoding="utf-8"), name, name)
    path = Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name, shipped_rubrics(), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise JudgingSettingsError(f"rubric {name!r} is neither a file nor one of {', '.join(shipped_rubrics())}{hint}")
    return read_rubric(text_of(path), path.stem, str(path))


def read_rubric(text: str, name: str, where: str) -> Rubric:
    """Check a rubric's text; ``where`` names it in errors."""
    found = keys_of(text, where, ("title", "answer", "user", "system"), "it needs answer and user, see docs/judging.md")
    if found.get("answer") not in FORMS:
        raise JudgingSettingsError(f"rubric {where} has answer: {found.get('answer')!r}; it must be letter or json")
    check_texts(found, ("title", "system", "user"), where)
    user, system = found.get("user", ""), found.get("system")
    check_fields(user + (system or ""), FIELDS, FIELDS, where)
    return Rubric(name, found.get("title") or name, found["answer"], user.strip() + "\n", system)


def text_of(path: Path) -> str:
    """A rubric's file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JudgingSettingsError(f"rubric {path} cannot be read as UTF-8 text: {error}") from None


def keys_of(text: str, where: str, known: Sequence[str], needs: str) -> dict[str, Any]:
    """The keys of a rubric's text, all of them known. needs: what to do where there are none."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        found: Any = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise JudgingSettingsError(f"rubric {where} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise JudgingSettingsError(f"rubric {where} has no keys; {needs}")
    check_keys(found, known, where)
    return found


def check_keys(found: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    """Refuse a key that nobody reads."""
    for key in found:
        if key not in known:
            raise JudgingSettingsError(f"rubric {where} has the key {key!r}, which is none of {', '.join(known)}")


def check_texts(found: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    """Refuse what is no text."""
    for key in keys:
        if not isinstance(found.get(key, ""), str):
            raise JudgingSettingsError(f"rubric {where}: {key} must be a text")


def check_fields(template: str, known: Sequence[str], needed: Sequence[str], where: str) -> set[str]:
    """The fields that stand in braces; refused where one is unknown, or one that the judge has to see is missing."""
    used = {match.group(2) for match in _FIELD.finditer(template) if match.group(2)}
    for field in sorted(used - set(known)):
        names = [f"{{{name}}}" for name in known]
        raise JudgingSettingsError(
            f"rubric {where} has the field {{{field}}}; there are {', '.join(names[:-1])} and {names[-1]} "
            f"(write {{{{{field}}}}} for the word in braces)"
        )
    for field in needed:
        if field not in used:
            raise JudgingSettingsError(f"rubric {where} does not show the judge {{{field}}}; put it into user")
    return used


def messages_of(system: str | None, user: str, fields: Mapping[str, str]) -> tuple[Message, ...]:
    """What is sent. Texts are put in once: braces within them stay as they are."""
    head = () if system is None else ({"role": "system", "content": _filled(system, fields)},)
    return (*head, {"role": "user", "content": _filled(user, fields)})


def _filled(template: str, fields: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda match: match.group(1) or fields[match.group(2)], template)
