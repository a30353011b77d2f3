"""Reading a recipe's YAML: as YAML 1.2 understands it, with the line of every key.

In YAML 1.2 `no` is text and `1e-5` a number, as training settings mean them. A key that stands twice is refused: the
first would be lost without a word. So is what would never end: text nested without measure, and aliases of aliases that
a few lines unfold to billions of values.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver

from wpr.data.rows import shown
from wpr.errors import RecipeError

DEEPEST = 50
MOST_VALUES = 100_000
"""Levels and values, aliases written out, that a file may have: far more than any recipe, and read in a second."""

_TAG = "tag:yaml.org,2002:"


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
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(
            f"{called}, line {line} has a character that YAML does not allow (number {error.character}); remove it"
        ) from None
    except MarkedYAMLError as error:
        mark, problem = error.problem_mark, error.problem
        if isinstance(error, MaxDepthExceededError):
            problem = f"it is nested deeper than {DEEPEST} levels"
        raise RecipeError(
            f"{called}, line {mark.line + 1}, column {mark.column + 1} is not valid YAML: {problem}; fix the line (a "
            "missing colon, quote or bracket, or a tab, is the usual cause)"
        ) from None
    if values is None:
        raise RecipeError(
            f"{called} is empty; write `key: value` lines, or begin with a copy of one: `wpr recipes tiny`"
        )
    if not isinstance(values, dict):
        raise RecipeError(f"{called} holds {type(values).__name__}, not settings; write `key: value` lines")
    return YamlFile(called, _with_text_keys(values), lines)


def parse_value(text: str) -> Any:
    """A value of the command line, as it would stand in a file: ``1e-5``, ``true``, ``[a, b]``, text."""
    try:
        return _parse(text, "command line")[0]
    except YAMLError:
        return text


def _parse(text: str, called: str) -> tuple[Any, dict[str, int]]:
    """The values, and the line of every dotted key."""
    reader = YAML(typ="safe", pure=True)
    reader.Constructor, reader.max_depth = _Constructor, DEEPEST
    lines: dict[str, int] = {}
    node = reader.compose(text)
    if node is None:
        return None, lines
    _note_lines(node, "", lines, called)
    return reader.constructor.construct_document(node), lines


def _with_text_keys(values: Any) -> Any:
    """Keys as text throughout: a policy may be called 1."""
    if isinstance(values, dict):
        return {str(key): _with_text_keys(value) for key, value in values.items()}
    return [_with_text_keys(value) for value in values] if isinstance(values, list) else values


class _Constructor(SafeConstructor):
    def construct_object(self, node: Node, deep: bool = False) -> Any:
        """Dates, and numbers with ``_``, are the text they are: YAML 1.2 has neither. A tag that does not fit its text
        (`!!int abc`) is reported with its place.
        """
        if node.ctag.handle is None and (node.tag == _TAG + "timestamp" or "_" in node.value):
            return node.value
        try:
            return super().construct_object(node, deep)
        except (ConstructorError, ValueError, LookupError, TypeError, AttributeError):
            text = shown(node.value) if isinstance(node, ScalarNode) else "this"
            problem = f"{text} cannot be read as {str(node.tag).removeprefix(_TAG)}"
            raise MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


def _note_lines(node: Node, prefix: str, lines: dict[str, int], called: str, above: tuple[int, ...] = ()) -> None:
    """Note the line of every key; refuse keys that stand twice, and aliases that unfold without measure."""
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
    if isinstance(node, ScalarNode):
        return
    pairs = node.value if isinstance(node, MappingNode) else [(part, part) for part in node.value]
    for index, (key, value) in enumerate(pairs):
        own = str(key.value) if isinstance(node, MappingNode) else str(index)
        name = f"{prefix}.{own}" if prefix else own
        if name in lines:
            raise RecipeError(
                f"{called}, line {key.start_mark.line + 1}: {name} stands here for the second time (first in line "
                f"{lines[name]}); remove one of them"
            )
        lines[name] = key.start_mark.line + 1
        _note_lines(value, name, lines, called, (*above, id(node)))


def to_yaml(values: Any) -> str:
    """Settings as YAML, in the order they have."""
    writer = YAML(typ="safe", pure=True)
    writer.Representer = _Representer
    writer.default_flow_style, writer.width = False, 100
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    writer.dump(values, stream)
    return stream.getvalue()


class _Representer(SafeRepresenter):
    """Writes text that YAML 1.1 would take for something else as quoted text, and numbers so that all readers agree."""


def _text_node(representer: SafeRepresenter, text: str) -> ScalarNode:
    meant = VersionedResolver(version=(1, 1)).resolve(ScalarNode, text, (True, False))
    return representer.represent_scalar(_TAG + "str", text, None if str(meant) == _TAG + "str" else "'")


def _float_node(representer: SafeRepresenter, value: float) -> ScalarNode:
    node = representer.represent_float(value)
    if "e" in node.value and "." not in node.value:  # 1e-05 is text to readers of YAML 1.1
        node.value = node.value.replace("e", ".0e")
    return node


_Representer.add_representer(str, _text_node)
_Representer.add_representer(float, _float_node)
