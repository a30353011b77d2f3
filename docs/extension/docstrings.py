"""Docstrings of the package, which are plain text with backticks, as reStructuredText and as Markdown.

A paragraph that begins with ``name: `` of a parameter or field describes it, and others after it:

    lam: inverse entropy, in units of one over cost.
    rho: how far mass is moved rather than replaced. Only for
        unbalanced marginals.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable
from typing import Any


def paragraphs(text: str) -> list[str]:
    """Parts of a docstring between blank lines, indentation kept."""
    return [part for part in re.split(r"\n[ \t]*\n", inspect.cleandoc(text)) if part.strip()]


def descriptions(paragraph: str, names: Iterable[str]) -> list[tuple[list[str], str]] | None:
    """What a paragraph says of ``names``: pairs of names and text; None if it does not begin with one of them."""
    known = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    if not known or paragraph[0].isspace():
        return None
    text = " ".join(paragraph.split())
    starts = list(re.finditer(rf"(?:^|(?<=[.;)] ))((?:{known})(?:(?:, | and )(?:{known}))*): ", text))
    if not starts or starts[0].start() != 0:
        return None
    ends = [start.start() for start in starts[1:]] + [len(text)]
    return [(re.split(", | and ", s[1]), text[s.end() : e].strip()) for s, e in zip(starts, ends, strict=True)]


def parameters(thing: Any) -> list[str]:
    """Names that the docstring of a function or class may describe."""
    fields = list(getattr(thing, "__dataclass_fields__", {})) if isinstance(thing, type) else []
    try:
        return [*fields, *inspect.signature(thing).parameters]
    except (TypeError, ValueError):
        return fields


def as_rst(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Make reStructuredText of a docstring; called by autodoc, which takes ``lines`` as they are then."""
    rst: list[str] = []
    for paragraph in paragraphs("\n".join(lines)):
        described = _args(paragraph) or descriptions(paragraph, parameters(thing))
        if described is not None:
            rst += [f":param {', '.join(names)}: {escaped(text)}" for names, text in described]
        else:
            rst += plain_rst(paragraph)
        rst.append("")
    lines[:] = rst


def _args(paragraph: str) -> list[tuple[list[str], str]] | None:
    """The same of a section ``Args:``, as TRL and transformers write it: ``name (types): text``."""
    if not paragraph.startswith("Args:\n"):
        return None
    lines = re.sub(r"\n +", " ", textwrap.dedent(paragraph.partition("\n")[2])).splitlines()
    found = [re.fullmatch(r"(\w+) \((.*?)\): (.*)", line) for line in lines]
    return [([match[1]], f"{match[3]} ({match[2].replace('*', '')})") for match in found if match]


def plain_rst(paragraph: str) -> list[str]:
    """A paragraph: prose, a list, or lines that stand further in, which are kept as they are."""
    paragraph = re.sub(r"::$", ":", paragraph)
    first, *rest = paragraph.splitlines()
    if first[0].isspace():
        return [".. code-block:: none", "", *textwrap.indent(textwrap.dedent(paragraph), "   ").splitlines()]
    if re.match(r"[-*] |\d+\. ", first):
        return [escaped(line) for line in paragraph.splitlines()]
    inner = next((i for i, line in enumerate(rest) if line[0].isspace()), None)
    if inner is None:
        return [escaped(line) for line in paragraph.splitlines()]
    return [*map(escaped, [first, *rest[:inner]]), "", *plain_rst("\n".join(rest[inner:]))]


def escaped(text: str) -> str:
    """Prose in which only backticks have a meaning."""
    parts = re.split(r"(``.+?``|`[^`]+`)", text)
    parts[::2] = [re.sub(r"([*|\\]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def as_markdown(text: str) -> str:
    """Prose of a docstring in Markdown, on one line."""
    parts = re.split(r"(``.+?``|`[^`]+`)", re.sub(r"\s+", " ", text))
    parts[::2] = [re.sub(r"([*|\\<>\[\]_{}])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = ["`" + part.strip("`").replace("|", "\\|") + "`" for part in parts[1::2]]
    return "".join(parts)
