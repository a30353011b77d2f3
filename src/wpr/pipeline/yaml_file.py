"""Reading a recipe's YAML: as YAML 1.2 understands it, with the line of every key.

PyYAML follows YAML 1.1, where `no` is false and `1e-5` is text; both occur in training settings and mean what they
say here. A key that stands twice is refused: the first would be lost without a word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from wpr.pipeline.errors import RecipeError


class _Loader(yaml.SafeLoader):
    """Safe, with YAML 1.2's booleans and numbers, and dates as the text they are."""


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
    """What a file says, and where: ``lines`` has the line of every dotted key."""

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
    shown = name or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{shown} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{shown} cannot be read: {error.strerror}") from None
    try:
        node = yaml.compose(text, Loader=_Loader)
        lines: dict[str, int] = {}
        if node is not None:
            _note_lines(node, "", lines, shown)
        values = yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(
            f"{shown}, line {line} has a character that YAML does not allow (number {error.character}); remove it"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise RecipeError(
            f"{shown}{where} is not valid YAML: {getattr(error, 'problem', None) or error}; mend the line (a missing "
            "colon, quote or bracket, or a tab, is the usual cause)"
        ) from None
    if values is None:
        raise RecipeError(
            f"{shown} is empty; write `key: value` lines, or begin with a copy of one: `wpr recipes tiny`"
        )
    if not isinstance(values, dict):
        raise RecipeError(f"{shown} holds {type(values).__name__}, not settings; write `key: value` lines")
    return YamlFile(shown, _with_text_keys(values), lines)


def _with_text_keys(values: Any) -> Any:
    """Keys as text throughout: a policy may be called 1."""
    if isinstance(values, dict):
        return {str(key): _with_text_keys(value) for key, value in values.items()}
    return [_with_text_keys(value) for value in values] if isinstance(values, list) else values


def parse_value(text: str) -> Any:
    """A value of the command line, as it would stand in a file: ``1e-5``, ``true``, ``[a, b]``, text."""
    try:
        return yaml.load(text, Loader=_Loader)
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


def _note_lines(node: yaml.Node, prefix: str, lines: dict[str, int], shown: str, above: tuple[int, ...] = ()) -> None:
    if id(node) in above:
        raise RecipeError(f"{shown}, line {node.start_mark.line + 1}: {prefix} holds itself; write its settings out")
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, part in enumerate(node.value):
            _note_lines(part, f"{prefix}.{index}", lines, shown, above)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}.{key.value}" if prefix else str(key.value)
        line = key.start_mark.line + 1
        if name in lines:
            raise RecipeError(
                f"{shown}, line {line}: {name} stands here for the second time (first in line {lines[name]}); remove "
                "one of them"
            )
        lines[name] = line
        _note_lines(value, name, lines, shown, above)
