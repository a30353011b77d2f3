"""Markup: what is text stays text; numbers and durations to read."""

from __future__ import annotations

import math

import pytest

from wpr.report.markup import coded, duration, join, script_data, shown, tag


def test_markup_escapes_what_is_no_markup() -> None:
    assert tag("p", "<b>", tag("b", "&"), None, class_='"', hidden=True, title=None) == (
        '<p class="&quot;" hidden>&lt;b&gt;<b>&amp;</b></p>'
    )
    assert coded("run `a < b` again") == "run <code>a &lt; b</code> again"
    assert join("<", None, tag("br")) == "&lt;<br/>"
    assert (
        script_data("x", "</script>&")
        == '<script type="application/json" id="x">"\\u003c/script\\u003e\\u0026"</script>'
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.12345, "0.123"), (-0.5, "~0.5"), (12.0, "12"), (1234567.8, "1234568"), (2e-8, "2e~8"), (0.0, "0"),
     (3.14e12, "3.1e12"), (math.nan, "not a number"), (-math.inf, "~∞"), ("as it is", "as it is")],
)  # fmt: skip
def test_numbers_to_read(value: float | str | None, text: str) -> None:
    expected = text.replace("~", "\N{MINUS SIGN}") if text != "-" else "\N{EN DASH}"
    assert shown(value) == expected


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.44, "2.4 s"), (38.2, "38 s"), (95.3, "1 min 35 s"), (11_100, "3 h 5 min"), (59.97, "60 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
