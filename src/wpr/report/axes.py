"""Axes of every plot and chart: linear, logarithmic or of names; where values lie, and which of them are written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wpr.report.markup import Markup, join, tag
from wpr.runs.values import LARGEST

Points = Sequence[tuple[float, float]]
"""From left to right."""

WIDTH, HEIGHT = 340, 236
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 28, 38
"""Room around the points of a plot."""

CHARACTER = 6.2
"""Width of a character of a plot's text, on average, in the plot's units."""

SLANT = 35
"""Degrees at which names are written that have no room side by side."""

LINE, LONGEST = 20, 24
"""Room that a slanted name needs, and the characters that it has at most."""


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, that cover ``low`` to ``high`` without going beyond."""
    if not high > low:
        return [low]
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def number(value: float) -> str:
    """A tick's number, short."""
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.6g}"


@dataclass(frozen=True)
class Axis:
    """From ``low`` to ``high``; names: what stands at 0, 1, 2, ... instead of numbers."""

    low: float
    high: float
    log: bool = False
    names: tuple[str, ...] = ()

    @classmethod
    def around(
        cls, values: Iterable[float], log: bool = False, margin: float = 0.04, include: Sequence[float] = ()
    ) -> Axis | None:
        """An axis that holds all finite values (of a logarithmic one: all positive ones) with some room at both ends;
        None where there is none. include: values that it holds besides.
        """
        known = [value for value in values if _can_be_shown(value, log)]
        if not known:
            return None
        known += [value for value in include if _can_be_shown(value, log)]
        low, high = (math.log10(end) if log else end for end in (min(known), max(known)))
        size = max(abs(low), abs(high))
        if high - low <= max(1e-9 * size, 1 / LARGEST):  # too narrow for numbers to be told apart on it
            room = 0.5 if log else (size if size > 1 / LARGEST else 1.0) * 0.1
            low, high = low - room, high + room
        else:
            low, high = low - margin * (high - low), high + margin * (high - low)
        return cls(10**low, 10**high, True) if log else cls(low, high)

    @classmethod
    def of_names(cls, names: Sequence[str]) -> Axis:
        """An axis with names at equal distances."""
        return cls(-0.5, len(names) - 0.5, names=tuple(names))

    def share(self, value: float) -> float | None:
        """Where a value lies, 0 at the low end and 1 at the high one; None for what the axis cannot show."""
        if not _can_be_shown(value, self.log):
            return None
        low, high, at = (math.log10(one) if self.log else one for one in (self.low, self.high, value))
        return (at - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        """Values that are written, and how."""
        if self.names:
            return [(float(index), name) for index, name in enumerate(self.names)]
        if not self.log:
            return [(value, number(value)) for value in ticks(self.low, self.high, 5)]
        powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
        if len(powers) < 2:  # less than a decade or so: round numbers within it
            return [(value, number(value)) for value in ticks(self.low, self.high) if value > 0]
        step = math.ceil(len(powers) / 5)
        return [(10.0**power, number(10.0**power)) for power in powers if power % step == 0]


def _can_be_shown(value: float, log: bool) -> bool:
    """Whether a value has a place on an axis: finite and not beyond all measure; on a logarithmic one, positive."""
    return math.isfinite(value) and abs(value) <= LARGEST and (not log or value >= 1 / LARGEST)


@dataclass(frozen=True)
class Area:
    """Where a plot's points lie in the drawing, upwards being less."""

    x: Axis
    y: Axis
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM

    @classmethod
    def around(cls, points: Points, x_margin: float = 0.0) -> Area | None:
        """Linear axes that hold all finite points, with a little room above and below; None where there is none."""
        finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        x_axis = Axis.around([x for x, _ in finite], margin=x_margin)
        y_axis = Axis.around([y for _, y in finite], margin=0.05)
        return None if x_axis is None or y_axis is None else cls(x_axis, y_axis)

    def place(self, x: float, y: float) -> tuple[float, float] | None:
        """The place of a point; None for one that cannot be shown."""
        across, upwards = self.x.share(x), self.y.share(y)
        if across is None or upwards is None:
            return None
        return self.left + across * (self.right - self.left), self.bottom - upwards * (self.bottom - self.top)

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        """A line through the points, with a gap where one cannot be shown."""
        commands, pen = [], "M"
        for point in points:
            placed = self.place(*point)
            if placed is None:
                pen = "M"
                continue
            commands.append(f"{pen}{placed[0]:.1f} {placed[1]:.1f}")
            pen = "L"
        return " ".join(commands)

    def grid(self, x_label: str, y_label: str | None = None) -> Markup:
        """Lines and numbers of both axes, and what they count."""
        parts = []
        for value, text in self.y.ticks():
            y = (self.place(self.x.low, value) or (0, 0))[1]
            parts.append(tag("line", x1=self.left, x2=self.right, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="g"))
            parts.append(tag("text", text, x=self.left - 6, y=f"{y + 4:.1f}", text_anchor="end"))
        parts += self._slanted() if self.slanted else self._level()
        middle = (self.left + self.right) / 2
        parts.append(tag("text", x_label, x=middle, y=f"{self.bottom + 31 + self.lower:.0f}", text_anchor="middle"))
        return join(*parts, None if y_label is None else tag("text", y_label, x="2", y=self.top - 10))

    @property
    def slanted(self) -> bool:
        """Whether the lower axis has names that do not fit side by side."""
        return bool(self.x.names) and self._widest(self.x.ticks()) > self._room(self.x.ticks())

    @property
    def lower(self) -> float:
        """How much further down than numbers slanted names reach."""
        if not self.slanted:
            return 0.0
        longest = max(len(text) for _, text in self._cut_names())
        return max(0.0, longest * CHARACTER * math.sin(math.radians(SLANT)) - 4)

    def _level(self) -> list[Markup]:
        parts = []
        for value, text, anchor in self.written_below():
            x = (self.place(value, self.y.low) or (0, 0))[0]
            parts.append(tag("text", text, x=f"{x:.1f}", y=self.bottom + 15, text_anchor=anchor))
        return parts

    def _slanted(self) -> list[Markup]:
        """Names upwards to the right, each ending below its place."""
        parts = []
        for place, text in self._cut_names():
            x = (self.place(place, self.y.low) or (0, 0))[0]
            turned = f"translate({x + 4:.1f},{self.bottom + 12}) rotate(-{SLANT})"
            named = tag("title", self.x.names[int(place)])
            parts.append(tag("g", named, tag("text", text, transform=turned, text_anchor="end")))
        return parts

    def _cut_names(self) -> list[tuple[float, str]]:
        """Names with their places, none so long that it would leave the drawing; of very many, evenly spaced ones. A
        name loses its middle: policies of a sweep begin alike and most of them differ in the end. If two come out alike
        all have their place before them.
        """
        places = self.x.ticks()
        kept = places[:: math.ceil(len(places) * LINE / (self.right - self.left))]
        cut = []
        for place, text in kept:
            x = (self.place(place, self.y.low) or (self.left, 0))[0]
            most = min(LONGEST, int(x / (CHARACTER * math.cos(math.radians(SLANT)))))
            head = (most - 1) // 3
            cut.append((place, text if len(text) <= most else f"{text[:head]}…{text[len(text) - most + head + 1 :]}"))
        if len({text for _, text in cut}) < len(cut):
            return [(place, f"{int(place) + 1}: {text[3:]}") for place, text in cut]
        return cut

    def _room(self, ticks: Sequence[tuple[float, str]]) -> float:
        return (self.right - self.left) / max(1, len(ticks))

    @staticmethod
    def _widest(ticks: Sequence[tuple[float, str]]) -> float:
        return max((len(text) for _, text in ticks), default=1) * CHARACTER + 4

    def written_below(self) -> list[tuple[float, str, str]]:
        """Ticks of the lower axis, as many as there is room for; the outer ones do not stick out."""
        found = self.x.ticks()
        kept = found[:: max(1, math.ceil(self._widest(found) / self._room(found)))]
        written = []
        for value, text in kept:
            x = (self.place(value, self.y.low) or (0, 0))[0]
            half = len(text) * CHARACTER / 2
            anchor = "end" if x + half > self.right + 10 else "middle"
            written.append((value, text, anchor))
        return written
