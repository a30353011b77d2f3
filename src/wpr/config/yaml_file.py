"""Reading a recipe's YAML: as YAML 1.2 understands it, with the line of every key.

PyYAML follows YAML 1.1, where `no` is false and `1e-5` is text; both occur in training settings and mean what they
say here. A key that stands twice is refused: the first would be lost without a word. So is what would never end: text
nested without measure, and aliases of aliases that a few lines unfold to billions of values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from wpr.data.rows import shown
from wpr.errors import RecipeError

DEEPEST = 50
MOST_VALUES = 100_000
"""Levels and values, aliases written out, that a file may have: far more than any recipe, and read in a second."""


class _Loader(yaml.SafeLoader):
    """Safe, with YAML 1.2's booleans and numbers, and dates as the text they are."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse what is nested too deeply before Python's own stack ends."""
        self.depth += 1
        if self.depth > DEEPEST:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"it is nested deeper than {DEEPEST} levels", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A tag that does not fit its text (`!!int abc`) is told with its place."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, TypeError, AttributeError):
            problem = f"{shown(node.value)} cannot be read as {node.tag.removeprefix(_TAG)}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


_KINDS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
}
"""What plain text is read as in YAML 1.2, in this order, and the characters that it may begin with."""

_TAG = "tag:yaml.org,2002:"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag.removeprefix(_TAG) not in (*_KINDS, "timestamp")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, (_pattern, _first) in _KINDS.items():
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), list(_first))


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text[2:] if base != 10 else text, base)


_Loader.add_constructor(_TAG + "int", _whole_number)


@dataclass
class YamlFile:
    """What a file says, and where: ``lines`` has the line of every dotted key, and of a list's values by number."""

    path: str
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """``file, line n`` for a dotted key, or for the nearest one above it."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.path}, line {self.lines[key]}" if key else self.path


def read_yaml(path: Path, name: str | None = None) -> YamlFile:
    """Read a mapping from a file, ``name`` being what errors call it."""
    called = name or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{called} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{called} cannot be read: {error.strerror}") from None
    try:
        values, lines = _parse(text, called)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(
            f"{called}, line {line} has a character that YAML does not allow (number {error.character}); remove it"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise RecipeError(
            f"{called}{where} is not valid YAML: {getattr(error, 'problem', None) or error}; fix the line (a missing "
            "colon, quote or bracket, or a tab, is the usual cause)"
        ) from None
    if values is None:
        raise RecipeError(
            f"{called} is empty; write `key: value` lines, or begin with a copy of one: `wpr recipes tiny`"
        )
    if not isinstance(values, dict):
        raise RecipeError(f"{called} holds {type(values).__name__}, not settings; write `key: value` lines")
    return YamlFile(called, _with_text_keys(values), lines)


def _parse(text: str, called: str) -> tuple[Any, dict[str, int]]:
    """The values, and the line of every dotted key."""
    node = yaml.compose(text, Loader=_Loader)
    lines: dict[str, int] = {}
    if node is not None:
        _note_lines(node, "", lines, called)
    return yaml.load(text, Loader=_Loader), lines


def _with_text_keys(values: Any) -> Any:
    """Keys as text throughout: a policy may be called 1."""
    if isinstance(values, dict):
        return {str(key): _with_text_keys(value) for key, value in values.items()}
    return [_with_text_keys(value) for value in values] if isinstance(values, list) else values


def parse_value(text: str) -> Any:
    """A value of the command line, as it would stand in a file: ``1e-5``, ``true``, ``[a, b]``, text."""
    try:
        return _parse(text, "command line")[0]
    except yaml.YAMLError:
        return text


def to_yaml(values: Any) -> str:
    """Settings as YAML, in the order they have."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


class _Dumper(yaml.SafeDumper):
    """Writes text that YAML 1.1 or 1.2 would take for something else as quoted text, and numbers so that all readers
    agree.
    """


def _dump_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = repr(value)
    if "e" in text and "." not in text:  # 1e-05 is text to readers of YAML 1.1
        text = text.replace("e", ".0e")
    text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(text, text)
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(float, _dump_float)
_Dumper.yaml_implicit_resolvers = {
    first: [*_Loader.yaml_implicit_resolvers.get(first, []), *yaml.SafeLoader.yaml_implicit_resolvers.get(first, [])]
    for first in _Loader.yaml_implicit_resolvers.keys() | yaml.SafeLoader.yaml_implicit_resolvers.keys()
}


def _note_lines(node: yaml.Node, prefix: str, lines: dict[str, int], called: str, above: tuple[int, ...] = ()) -> None:
    line = node.start_mark.line + 1
    if id(node) in above:
        raise RecipeError(f"{called}, line {line}: {prefix} holds itself; write its settings out")
    if len(lines) > MOST_VALUES or len(above) > DEEPEST:
        key = prefix.partition(".")[0]
        limit = f"{MOST_VALUES} values" if len(lines) > MOST_VALUES else f"{DEEPEST} levels"
        raise RecipeError(
            f"{called}, line {lines.get(key, line)}: {key} has more than {limit} once its aliases (*name) are put in; "
            "write out what is meant"
        )
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, part in enumerate(node.value):
            lines[f"{prefix}.{index}"] = part.start_mark.line + 1
            _note_lines(part, f"{prefix}.{index}", lines, called, above)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}.{key.value}" if prefix else str(key.value)
        line = key.start_mark.line + 1
        if name in lines:
            raise RecipeError(
                f"{called}, line {line}: {name} stands here for the second time (first in line {lines[name]}); remove "
                "one of them"
            )
        lines[name] = line
        _note_lines(value, name, lines, called, above)
