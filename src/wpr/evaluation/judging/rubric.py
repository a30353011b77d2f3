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
from collections.abc import Callable, Mapping
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
        """What is sent. Texts are put in once: braces within them stay as they are."""
        system = () if self.system is None else ({"role": "system", "content": _filled(self.system, fields)},)
        return (*system, {"role": "user", "content": _filled(self.user, fields)})

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
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JudgingSettingsError(f"rubric {path} cannot be read as UTF-8 text: {error}") from None
    return read_rubric(text, path.stem, str(path))


def read_rubric(text: str, name: str, where: str) -> Rubric:
    """Check a rubric's text; ``where`` names it in errors."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        found: Any = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise JudgingSettingsError(f"rubric {where} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise JudgingSettingsError(f"rubric {where} has no keys; it needs answer and user, see docs/judging.md")
    known = ("title", "answer", "user", "system")
    for key in found:
        if key not in known:
            raise JudgingSettingsError(f"rubric {where} has the key {key!r}, which is none of {', '.join(known)}")
    if found.get("answer") not in FORMS:
        raise JudgingSettingsError(f"rubric {where} has answer: {found.get('answer')!r}; it must be letter or json")
    for key in ("title", "system", "user"):
        if not isinstance(found.get(key, ""), str):
            raise JudgingSettingsError(f"rubric {where}: {key} must be a text")
    user, system = found.get("user", ""), found.get("system")
    used = {match.group(2) for match in _FIELD.finditer(user + (system or "")) if match.group(2)}
    for field in sorted(used - set(FIELDS)):
        raise JudgingSettingsError(
            f"rubric {where} has the field {{{field}}}; there are {{prompt}}, {{response_a}} and {{response_b}} "
            f"(write {{{{{field}}}}} for the word in braces)"
        )
    for field in FIELDS:
        if field not in used:
            raise JudgingSettingsError(f"rubric {where} does not show the judge {{{field}}}; put it into user")
    return Rubric(name, found.get("title") or name, found["answer"], user.strip() + "\n", system)


def _filled(template: str, fields: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda match: match.group(1) or fields[match.group(2)], template)
