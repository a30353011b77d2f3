"""HTML from Python: text is escaped unless it is markup already, so that nothing can be forgotten."""

from __future__ import annotations

import json
import math
from html import escape
from typing import Any


class Markup(str):
    """Text that is HTML already."""


Content = str | Markup | None

DASH, MINUS = "\u2013", "\u2212"
_VOID = ("br", "meta", "link", "input", "line", "rect", "circle", "path", "polygon")


def tag(name: str, *children: Content, **attributes: str | float | bool | None) -> Markup:
    """An element. Attributes: ``class_`` for class, ``_`` for ``-``; None and False leave one out, True is bare."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID and not children:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Content) -> Markup:
    """Pieces after each other; those that are no markup are escaped, None is left out."""
    return Markup("".join(_escaped(child) for child in children if child is not None))


def paragraph(*children: Content, class_: str | None = None) -> Markup:
    """A paragraph of text."""
    return tag("p", *children, class_=class_)


def coded(text: str) -> Markup:
    """Text with what stands between backquotes as code; a backquote without its other half is left as it is."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        parts[-2:] = [f"{parts[-2]}`{parts[-1]}"]
    return join(*(tag("code", part) if index % 2 else part for index, part in enumerate(parts)))


def details(summary: str, *children: Content, class_: str | None = None) -> Markup:
    """Something to open."""
    return tag("details", tag("summary", summary), *children, class_=class_)


def scrolling(label: str, *children: Content, class_: str = "") -> Markup:
    """A box that scrolls sideways by itself where its content is wider than the page; the keyboard reaches it."""
    return tag("div", *children, class_=f"scroll {class_}".rstrip(), tabindex="0", role="region", aria_label=label)


def script_data(identifier: str, data: Any) -> Markup:
    """JSON for the page's script. Within a script element nothing is unescaped, so what could end it is written so
    that it cannot.
    """
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return tag("script", Markup(safe), type="application/json", id=identifier)


def shown(value: float | str | None, digits: int = 3) -> str:
    """A number to read: so many digits (one fewer before an exponent), whole numbers in full, a real minus sign; what
    is none is a dash.
    """
    if value is None:
        return DASH
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "∞" if value > 0 else f"{MINUS}∞"
    text = f"{value:.0f}" if 1000 <= abs(value) < 1e9 or value == int(value) else f"{value:.{digits}g}"
    if abs(value) >= 1e9 or "e" in text:
        text = f"{value:.{digits}e}"
        leading, _, power = text.partition("e")
        text = f"{float(leading):.{digits - 1}g}e{int(power)}"
    return text.replace("-", MINUS)


def percent(value: float | None) -> str:
    """A share to read."""
    return DASH if value is None or not math.isfinite(value) else f"{100 * value:.1f}%"


def duration(seconds: float | None) -> str:
    """A time to read: ``48 s``, ``6 min 20 s``, ``3 h 5 min``."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _escaped(child: str) -> str:
    return child if isinstance(child, Markup) else escape(child)


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    # SVG spells this one attribute in two cases, and HTML's parser keeps it only so.
    name = {"viewbox": "viewBox"}.get(name, name)
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
