"""A finding's figures as SVG: in the page, coloured by its style sheet, and as documents of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from wpr.findings import Figure, Series
from wpr.report.axes import CHARACTER, HEIGHT, TOP, WIDTH, Area, Axis, Points, number
from wpr.report.markup import Markup, join, paragraph, shown, tag
from wpr.report.tables import thinned

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#65a30d", "#475569")
"""Of the series, in order; also people who do not see all colours can tell them apart."""

POINTS = 4000
"""Points that a scatter draws at most, over all its series; evenly spaced ones of more."""

LABEL, VALUE = 116, 46
"""Widths of the names before bars and of the numbers behind them."""

LONGEST_NAME = 18
BAR, GAP = 13, 9
RADAR = 78
CELL = 20
"""Height of a matrix's row."""

STYLE = (
    "<style>.wpr-plot{font:11px system-ui,sans-serif}.wpr-plot .t{font-weight:600;font-size:12px}"
    ".wpr-plot text{fill:#1f2937}.wpr-plot .g{stroke:#9ca3af;stroke-opacity:.35}"
    ".wpr-plot .whisker{stroke:#1f2937}"
    ".wpr-plot .ruled{stroke:#6b7280;stroke-dasharray:5 3}"
    # Of the page's charts.
    ".wpr-plot .line{fill:none;stroke-width:1.8}.wpr-plot .raw{fill:none;stroke-opacity:.3}"
    ".wpr-plot .trail{fill:none;stroke-width:1.3;stroke-opacity:.6}.wpr-plot .mark{stroke:#ffffff;stroke-width:1.5}"
    ".wpr-plot .line.d1,.wpr-plot .trail.d1{stroke-dasharray:7 4}"
    ".wpr-plot .line.d2,.wpr-plot .trail.d2{stroke-dasharray:2 3}"
    ".wpr-plot .line.d3,.wpr-plot .trail.d3{stroke-dasharray:9 3 2 3}"
    + "".join(
        ",".join(f".wpr-plot .{kind}{look}" for kind in kinds) + f"{{{painted}:{colour}}}"
        for painted, kinds in (("fill", ("fill", "mark", "dot")), ("stroke", ("stroke", "line", "raw", "trail")))
        for look, colour in [*((f".c{index}", colour) for index, colour in enumerate(COLOURS)), (".neutral", "#767c86")]
    )
    + "@media (prefers-color-scheme:dark){.wpr-plot text{fill:#e5e7eb}.wpr-plot .back{fill:#111827}"
    ".wpr-plot .whisker{stroke:#e5e7eb}.wpr-plot .mark{stroke:#111827}}</style>"
)


@dataclass(frozen=True)
class Drawing:
    """What was drawn, without the figure's title, and how high it is; it is as wide as `WIDTH`."""

    body: Markup
    height: float


def draw_figure(figure: Figure) -> str:
    """The figure with its title and legend as an SVG document, readable in light and dark."""
    drawing = draw(figure)
    named = _names(figure)
    head, at, line = (
        [tag("text", title, x=8, y=18 + 15 * row, class_="t") for row, title in enumerate(_rows(figure))],
        8.0,
        0,
    )
    top = 18.0 + 15 * len(head)
    for index, name in named:
        width = 26 + CHARACTER * len(name)
        if at > 8 and at + width > WIDTH:
            at, line = 8.0, line + 1
        y = top + 16 * line
        head.append(tag("rect", x=at, y=y - 9, width=12, height=10, class_=f"fill c{_colour(index)}"))
        head.append(tag("text", name, x=at + 16, y=y))
        at += width
    top += 16 * (line + 1) if named else 0
    height = round(top - 12 + drawing.height)
    moved = tag("g", drawing.body, transform=f"translate(0,{top - 12:.0f})")
    return document(join(*head, moved), WIDTH, height, 2, _description(figure))


def document(body: Markup, width: int, height: int, scale: int = 1, description: str | None = None) -> str:
    """An SVG document of its own, readable in light and dark, shown ``scale`` times as large as it is drawn."""
    back = tag("rect", width=width, height=height, fill="#ffffff", class_="back")
    svg = tag(
        "svg", Markup(STYLE), back, body, viewbox=f"0 0 {width} {height}", width=scale * width, height=scale * height,
        class_="wpr-plot", role="img", aria_label=description,
    )  # fmt: skip
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def figure_panel(figure: Figure, identifier: str) -> Markup:
    """The figure as a panel of the page."""
    drawing = draw(figure)
    svg = tag(
        "svg", drawing.body, viewbox=f"0 4 {WIDTH} {drawing.height - 4:.0f}", class_="chart plot", role="img",
        aria_label=_description(figure), id=identifier,
    )  # fmt: skip
    names = [tag("span", _sample(index), name, class_="named") for index, name in _names(figure)]
    legend = tag("p", *names, class_="legend small") if names else None
    note = paragraph(figure.note, class_="note") if figure.note else None
    return tag("figure", tag("figcaption", figure.title), legend, svg, note, class_="panel")


def draw(figure: Figure) -> Drawing:
    """The figure's drawing; words where there is nothing to draw."""
    categories = figure.categories
    if figure.kind == "radar" and len(categories or ()) >= 3:
        found = _radar(figure, categories or [])
    elif figure.kind == "matrix":
        found = _matrix(figure, categories or [])
    elif figure.kind in ("bars", "radar"):
        found = _bars(figure, categories or [])
    else:
        found = _plane(figure, categories)
    return found or Drawing(tag("text", "There are no numbers to draw.", x=8, y=40), 60)


def _plane(figure: Figure, categories: list[str] | None) -> Drawing | None:
    """Scatters, lines and histograms: points between two axes."""
    series = []
    for index, one in enumerate(figure.series):
        # Over names, series stand a little apart, so that their intervals do not cover each other.
        aside = 0.14 * (index - (len(figure.series) - 1) / 2) if categories else 0.0
        series.append((index, one, [(x + aside, y) for x, y in _points(one, categories)]))
    marks = {axis: [mark.value for mark in figure.marks if mark.axis == axis] for axis in ("x", "y")}
    ends = [end for one in figure.series for ends in (one.low, one.high) for end in ends or ()]
    histogram = figure.kind == "histogram"
    x_values = [x for _, one, points in series for x in (_edges(one) if histogram else [x for x, _ in points])]
    y_values = [y for _, _, points in series for _, y in points] + ends
    x_axis = (
        Axis.of_names(categories)
        if categories
        else Axis.around(x_values, figure.log_x, 0.0 if histogram else 0.03, marks["x"])
    )
    floor = [0.0] if histogram and not figure.log_y else []
    y_axis = Axis.around(y_values, figure.log_y, 0.0 if floor else 0.05, [*marks["y"], *floor])
    if x_axis is None or y_axis is None:
        return None
    area = Area(x_axis, y_axis)
    drawn: list[Markup | None] = [area.grid(figure.x_label, figure.y_label)]
    most = max(50, POINTS // max(1, len(series)))
    whole = area
    intervals = figure.kind == "lines" and not categories and bool(ends)
    for index, one, points in series:
        look = f"c{_colour(index)}"
        # A few units aside, so that intervals at one place do not cover each other.
        aside = 3.0 * (index - (len(series) - 1) / 2) if intervals else 0.0
        area = replace(whole, left=whole.left + aside, right=whole.right + aside)
        if histogram:
            drawn.append(_steps(area, one, look))
        elif figure.kind == "scatter" and not one.joined:
            size, opacity = (2.6, 1.0) if categories else (2.0, 0.7)
            drawn.append(_cloud(area, thinned(points, most), look, size, opacity))
        else:
            path = area.path(points)
            drawn.append(tag("path", d=path, fill="none", stroke_width="2", class_=f"stroke {look}") if path else None)
            if figure.kind == "lines" and len(points) <= 40:
                drawn.append(_cloud(area, points, look, size=2.6, opacity=1.0))
        drawn.append(_whiskers(area, one, points, look))
    drawn += [_ruled(whole, mark.value, mark.label, mark.axis) for mark in figure.marks]
    return Drawing(join(*drawn), HEIGHT + round(whole.lower))


def _points(one: Series, categories: list[str] | None) -> Points:
    if categories is not None:
        places = {name: float(index) for index, name in enumerate(categories)}
        return [(places[str(x)], y) for x, y in zip(one.x, one.y, strict=False)]
    return list(zip(_edges(one), one.y, strict=False))  # a histogram has one edge more


def _edges(one: Series) -> list[float]:
    return [float(edge) for edge in one.x]


def _cloud(area: Area, points: Points, look: str, size: float, opacity: float) -> Markup:
    """Points, fainter where they are many."""
    faint = opacity if len(points) < 400 or opacity == 1 else max(0.15, opacity * (400 / len(points)) ** 0.5)
    placed = [found for point in points if (found := area.place(*point)) is not None]
    dots = [tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=size) for x, y in placed]
    return tag("g", *dots, fill_opacity=f"{faint:.2f}", class_=f"fill {look}")


def _steps(area: Area, one: Series, look: str) -> Markup:
    """A histogram's outline over a faint filling, from the axis up."""
    edges, base = _edges(one), area.y.low
    outline = [(edges[0], base)]
    for left, right, y in zip(edges[:-1], edges[1:], one.y, strict=True):
        height = y if (area.y.share(y) or -1) >= 0 else base
        outline += [(left, height), (right, height)]
    outline.append((edges[-1], base))
    path = area.path(outline)
    filling = tag("path", d=path, fill_opacity="0.2", class_=f"fill {look}")
    return join(filling, tag("path", d=path, fill="none", stroke_width="1.5", class_=f"stroke {look}"))


def _whiskers(area: Area, one: Series, points: Points, look: str) -> Markup | None:
    if one.low is None or one.high is None:
        return None
    drawn = []
    for (x, _), low, high in zip(points, one.low, one.high, strict=True):
        ends = [area.place(x, end) for end in (low, high)]
        if ends[0] is None or ends[1] is None:
            continue
        (at, bottom), (_, top) = ends[0], ends[1]
        path = f"M{at:.1f} {bottom:.1f}V{top:.1f}M{at - 3:.1f} {bottom:.1f}h6M{at - 3:.1f} {top:.1f}h6"
        drawn.append(tag("path", d=path, fill="none", stroke_width="1.2", class_=f"stroke {look}"))
    return join(*drawn)


def _ruled(area: Area, value: float, label: str, axis: str) -> Markup | None:
    """A line across the plot with a word on it."""
    placed = area.place(value, area.y.low) if axis == "x" else area.place(area.x.low, value)
    if placed is None:
        return None
    x, y = placed
    if axis == "x":
        after = x + CHARACTER * len(label) < area.right
        text = tag(
            "text", label, x=f"{x + (4 if after else -4):.1f}", y=area.top + 9, text_anchor=None if after else "end"
        )
        return join(tag("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=area.top, y2=area.bottom, class_="ruled"), text)
    below = y - 4 < area.top + 8
    text = tag("text", label, x=area.right - 2, y=f"{y + (12 if below else -4):.1f}", text_anchor="end")
    return join(tag("line", x1=area.left, x2=area.right, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="ruled"), text)


def _bars(figure: Figure, categories: list[str]) -> Drawing | None:
    """Bars to the right, one row per name and series, with the names before them; above them where one is long."""
    values = [end for one in figure.series for ends in (one.y, one.low or (), one.high or ()) for end in ends]
    ruled = [mark.value for mark in figure.marks if mark.axis == "y"]
    axis = Axis.around(values, figure.log_y, 0.0, [*ruled, *([] if figure.log_y else [0.0])])
    if axis is None:
        return None
    rows = [(name, [(index, one, place) for index, one in enumerate(figure.series) for place in [_place_of(one, name)]
                    if place is not None]) for name in categories]  # fmt: skip
    above = any(len(name) > LONGEST_NAME for name in categories)
    left, line = (4, 12) if above else (LABEL, 0)
    bottom = TOP + sum(line + BAR * len(found) + GAP for _, found in rows)
    # The same area with its axes turned: values run to the right.
    area = Area(axis, Axis(0, 1), left, WIDTH - VALUE, TOP, bottom)
    zero = (area.place(axis.low if figure.log_y else 0.0, 0) or (left, 0))[0]
    drawn = [tag("text", f"{figure.y_label}", x=left, y=TOP - 10)]
    for value, text, anchor in area.written_below():
        x = (area.place(value, 0) or (0, 0))[0]
        drawn.append(tag("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=TOP, y2=bottom, class_="g"))
        drawn.append(tag("text", text, x=f"{x:.1f}", y=bottom + 14, text_anchor=anchor))
    y = TOP + GAP / 2
    for name, found in rows:
        middle = y + BAR * len(found) / 2
        if above:
            label = tag("text", _cut(name, int(WIDTH / CHARACTER)), x=left, y=f"{y + line - 3:.1f}")
        else:
            label = tag("text", _cut(name), x=LABEL - 6, y=f"{middle + 4:.1f}", text_anchor="end")
        drawn.append(tag("g", tag("title", name), label))
        y += line
        for index, one, place in found:
            drawn.append(_bar(area, one, place, y, zero, f"c{_colour(index)}"))
            y += BAR
        y += GAP
    for mark in figure.marks:
        if mark.axis == "y" and (placed := area.place(mark.value, 0)) is not None:
            x = placed[0]
            drawn.append(tag("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=TOP - 4, y2=bottom, class_="ruled"))
            after = x + CHARACTER * len(mark.label) < WIDTH
            drawn.append(tag("text", mark.label, x=f"{x:.1f}", y=bottom + 28, text_anchor="middle" if after else "end"))
    return Drawing(join(*drawn), bottom + (36 if ruled else 22))


def _place_of(one: Series, name: str) -> int | None:
    return next((place for place, x in enumerate(one.x) if str(x) == name), None)


def _bar(area: Area, one: Series, place: int, y: float, zero: float, look: str) -> Markup:
    value = one.y[place]
    placed = area.place(value, 0)
    if placed is None:
        return tag("text", "none", x=f"{zero + 4:.1f}", y=f"{y + BAR - 3:.1f}")
    x = placed[0]
    bar = tag(
        "rect", x=f"{min(x, zero):.1f}", y=f"{y + 1:.1f}", width=f"{abs(x - zero):.1f}", height=BAR - 3,
        fill_opacity="0.85", class_=f"fill {look}",
    )  # fmt: skip
    text = tag("text", _rounded(value), x=WIDTH - 2, y=f"{y + BAR - 3:.1f}", text_anchor="end")
    whisker = None
    if one.low is not None and one.high is not None:
        ends = [area.place(end[place], 0) for end in (one.low, one.high)]
        if ends[0] is not None and ends[1] is not None:
            middle, low, high = y + BAR / 2 - 0.5, ends[0][0], ends[1][0]
            path = f"M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {middle - 3:.1f}v6M{high:.1f} {middle - 3:.1f}v6"
            whisker = tag("path", d=path, fill="none", stroke_width="1.3", class_="whisker")
    return tag("g", tag("title", f"{one.name}: {shown(value)}"), bar, whisker, text)


def _radar(figure: Figure, categories: list[str]) -> Drawing | None:
    """One spoke per category, values outwards from 0 (or from the lowest, where that is below 0)."""
    values = [y for one in figure.series for y in one.y if math.isfinite(y)]
    axis = Axis.around(values, False, 0.0, [0.0, *figure.includes])
    if axis is None:
        return None
    centre_x, centre_y = WIDTH / 2, TOP + RADAR + 8
    steps = [value for value, _ in axis.ticks()]
    step = steps[1] - steps[0] if len(steps) > 1 else axis.high - axis.low
    axis = Axis(axis.low, step * math.ceil(axis.high / step - 1e-9))  # the outermost ring holds all

    def at(spoke: int, value: float) -> tuple[float, float]:
        angle = 2 * math.pi * spoke / len(categories) - math.pi / 2
        radius = RADAR * (axis.share(value) or 0.0)
        return centre_x + radius * math.cos(angle), centre_y + radius * math.sin(angle)

    drawn = [tag("text", figure.y_label, x=2, y=TOP - 10)]
    for value, text in axis.ticks():
        ring = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(spoke, value) for spoke in range(len(categories))))
        drawn.append(tag("polygon", points=ring, fill="none", class_="g"))
        x, y = at(0, value)
        drawn.append(tag("text", text, x=f"{x + 3:.1f}", y=f"{y + 4:.1f}"))
    for spoke, name in enumerate(categories):
        (x, y), far = at(spoke, axis.high), at(spoke, axis.high + 0.13 * (axis.high - axis.low))
        drawn.append(tag("line", x1=f"{centre_x:.1f}", y1=f"{centre_y:.1f}", x2=f"{x:.1f}", y2=f"{y:.1f}", class_="g"))
        anchor = "middle" if abs(far[0] - centre_x) < 12 else "start" if far[0] > centre_x else "end"
        drawn.append(tag("text", _cut(name, 15), x=f"{far[0]:.1f}", y=f"{far[1] + 4:.1f}", text_anchor=anchor))
    for index, one in enumerate(figure.series):
        spokes = [(spoke, one.y[place]) for spoke, name in enumerate(categories)
                  if (place := _place_of(one, name)) is not None and math.isfinite(one.y[place])]  # fmt: skip
        places = [at(spoke, value) for spoke, value in spokes]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        look = f"c{_colour(index)}"
        drawn.append(tag("polygon", points=corners, fill_opacity="0.12", class_=f"fill {look}"))
        drawn.append(tag("polygon", points=corners, fill="none", stroke_width="1.8", class_=f"stroke {look}"))
        # Where a category has no value a side passes over its spoke, and of a single value a polygon is nothing.
        drawn += [tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="2.2", class_=f"fill {look}") for x, y in places]
    return Drawing(join(*drawn), centre_y + RADAR + 26)


def _matrix(figure: Figure, categories: list[str]) -> Drawing | None:
    """A cell per row and column with its number, the darker the larger; a value that is none leaves a gap."""
    values = [y for one in figure.series for y in one.y if math.isfinite(y)]
    if not values:
        return None
    low, high = min(0.0, *values), max(values)
    width = (WIDTH - LABEL - 2) / len(categories)
    # Names of columns stand upright where one does not fit over its column.
    upright = any(CHARACTER * len(name) > width for name in categories)
    head = TOP + (CHARACTER * max(len(_cut(name)) for name in categories) if upright else 4) + 4
    drawn = [tag("text", figure.y_label, x=2, y=TOP - 10)]
    for column, name in enumerate(categories):
        x, y = LABEL + (column + 0.5) * width, head - 6
        turned = f"rotate(-90 {x + 4:.1f} {y:.1f})" if upright else None
        anchor = None if upright else "middle"
        label = tag("text", _cut(name), x=f"{x + (4 if upright else 0):.1f}", y=f"{y:.1f}", text_anchor=anchor,
                    transform=turned)  # fmt: skip
        drawn.append(tag("g", tag("title", name), label))
    for row, one in enumerate(figure.series):
        y = head + CELL * row
        label = tag("text", _cut(one.name), x=LABEL - 6, y=f"{y + CELL / 2 + 4:.1f}", text_anchor="end")
        drawn.append(tag("g", tag("title", one.name), label))
        for column, name in enumerate(categories):
            place = _place_of(one, name)
            if place is None or not math.isfinite(one.y[place]):
                continue
            value, x = one.y[place], LABEL + column * width
            share = (value - low) / (high - low) if high > low else 0.0
            cell = tag(
                "rect", x=f"{x + 1:.1f}", y=f"{y + 1:.1f}", width=f"{width - 2:.1f}", height=CELL - 2,
                fill_opacity=f"{0.06 + 0.5 * share:.2f}", class_="fill c0",
            )  # fmt: skip
            text = tag("text", _rounded(value), x=f"{x + width / 2:.1f}", y=f"{y + CELL / 2 + 4:.1f}",
                       text_anchor="middle")  # fmt: skip
            drawn.append(tag("g", tag("title", f"{one.name}, {name}: {shown(value)}"), cell, text))
    return Drawing(join(*drawn), head + 6 + CELL * len(figure.series))


def _names(figure: Figure) -> list[tuple[int, str]]:
    """The legend: of one series the axis says it all, and a matrix has its rows' names."""
    if figure.kind == "matrix" or len(figure.series) < 2:
        return []
    return [(index, one.name) for index, one in enumerate(figure.series)]


def _sample(index: int) -> Markup:
    square = tag("rect", width="12", height="10", class_=f"fill c{_colour(index)}")
    return tag("svg", square, width="12", height="10", class_="plot", aria_hidden="true")


def _colour(index: int) -> int:
    return index % len(COLOURS)


def _cut(name: str, most: int = LONGEST_NAME) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _rounded(value: float) -> str:
    return number(float(f"{value:.3g}"))


def _rows(figure: Figure) -> list[str]:
    """The title in lines that fit."""
    rows = [""]
    for word in figure.title.split():
        if rows[-1] and len(rows[-1]) + len(word) + 1 > 46:
            rows.append(word)
        else:
            rows[-1] = f"{rows[-1]} {word}".strip()
    return rows


def _description(figure: Figure) -> str:
    """The figure in words, for those who do not see it."""
    ranges = []
    for one in figure.series[:8]:
        finite = [y for y in one.y if math.isfinite(y)]
        if finite:
            ranges.append(f"{one.name}: {len(finite)} values from {shown(min(finite))} to {shown(max(finite))}.")
    return f"{figure.title}. {figure.y_label} by {figure.x_label}. {' '.join(ranges)}"
