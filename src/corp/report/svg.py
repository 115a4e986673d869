"""Small charts as SVG elements: bars and lines. Nothing is distinguished by colour alone.

An element has its colours for print, so a drawing can be a separate file; page.html overrides them by class for
light and dark screens. Drawings are narrow (420 units) because a phone shows them at that size; the page puts them
side by side if there is room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

WIDTH = 420
LETTER = 6.9  # units per character of the 12-unit font, on average
LONGEST = 22  # characters of a label; the full name is in its tooltip
COLOURS = ("#0072b2", "#e69f00", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")  # Okabe-Ito, safe for colour blindness
DASHES = ("", "7 4", "2 3", "10 3 2 3", "4 2")
MARKERS = ((12, 0), (4, 45), (3, 90), (4, 0), (3, -90), (5, -90))  # polygons: corners, degrees of rotation


class Entry(NamedTuple):
    """One row of a bar chart: a short label, the full name, and the numbers."""

    label: str
    name: str
    values: Sequence[float]
    texts: Sequence[str]


class Series(NamedTuple):
    """One line of a line chart; `band` is (x, least, most), shaded behind the line."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()


def drawing(label: str, width: float, height: float) -> Element:
    """An empty drawing; `label` is its text alternative. Wide ones scroll instead of shrinking."""
    svg = Element("svg", {"role": "img", "aria-label": label, "viewBox": f"0 0 {width:g} {height:g}"})
    svg.attrib |= {"font-size": "12", "font-family": "sans-serif"}
    if width > WIDTH:
        svg.set("style", f"min-width:{width:g}px")
    return svg


def picture(title: str, *drawings: Element) -> Element:
    """The drawings side by side under a title, as one drawing for a separate file."""
    boxes = [[float(number) for number in (one.get("viewBox") or "").split()[2:]] for one in drawings]
    across, down = sum(width + 20 for width, _ in boxes), 34 + max(height for _, height in boxes)
    whole = drawing(title, across, down)
    whole.attrib |= {"xmlns": "http://www.w3.org/2000/svg", "width": f"{across:g}", "height": f"{down:g}"}
    _add(whole, "rect", width=across, height=down, fill="#ffffff")
    _text(whole, 10, 18, title)
    x = 10.0
    for one, (width, _) in zip(drawings, boxes, strict=True):
        _add(whole, "g", transform=f"translate({x:g} 34)").extend(one)
        x += width + 20
    return whole


def save(drawing: Element, path: Path) -> None:
    """Write the drawing to a file, the same bytes each time."""
    path.write_bytes(tostring(drawing, encoding="utf-8"))


def bar_chart(label: str, entries: Sequence[Entry], names: Sequence[str], *, top: float | None = None) -> Element:
    """Horizontal bars, one per value; `names` are the names of an entry's bars, `top` is the value of a full bar."""
    whole = top or max((v for entry in entries for v in entry.values if math.isfinite(v)), default=1.0)
    left = _margin(entries)
    room = WIDTH - left - 12 - LETTER * max((len(t) for entry in entries for t in entry.texts), default=0)
    start, step = 24 if len(names) > 1 else 4, 14 * len(names) + 8
    svg = drawing(label, WIDTH, start + step * len(entries))
    x = left
    for i, name in enumerate(names if len(names) > 1 else ()):
        _bar(svg, i, x, 2, 18)
        _text(svg, x + 23, 12, name)
        x += 40 + LETTER * len(name)
    for number, entry in enumerate(entries):
        y = start + number * step
        group = _add(svg, "g")
        _add(group, "title", f"{entry.name}: {', '.join(entry.texts)}")
        _text(group, left - 6, y + 7 * len(entry.values) + 3, shorten(entry.label), "end")
        for i, (value, text) in enumerate(zip(entry.values, entry.texts, strict=True)):
            length = room * share(value, whole)
            _bar(group, i, left, y + 14 * i, length)
            _text(group, left + length + 5, y + 14 * i + 10, text)
    _path(svg, [(left, start), (left, start + step * len(entries) - 4)], class_="axis", stroke="#555555")
    return svg


def line_chart(
    label: str,
    series: Sequence[Series],
    axes: tuple[str, str],
    shown: Callable[[float], str],
    x_shown: Callable[[float], str] = "{:.0%}".format,
) -> Element:
    """Lines over axes that start at 0; `axes` name x and y, `shown` and `x_shown` format their values."""
    ys = [y for line in series for _, y in line.points] + [high for line in series for *_, high in line.band]
    y_ticks = ticks(max(ys, default=1.0))
    x_ticks = ticks(max((x for line in series for x, _ in line.points), default=1.0))
    left, right, top, bottom = 52.0, WIDTH - 14.0, 26.0, 252.0
    svg = drawing(label, WIDTH, bottom + 54 + 19 * len(series))

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * share(x, x_ticks[-1]), bottom - (bottom - top) * share(y, y_ticks[-1])

    _text(svg, 2, 12, axes[1])
    for y in y_ticks:
        _path(svg, [at(0, y), (right, at(0, y)[1])], class_="grid", stroke="#dddddd")
        _text(svg, left - 6, at(0, y)[1] + 4, shown(y), "end")
    for x in x_ticks:
        _text(svg, at(x, 0)[0], bottom + 17, x_shown(x), "middle")
    _text(svg, (left + right) / 2, bottom + 36, axes[0], "middle")
    for i, line in enumerate(series):
        told = [f"{line.name}, {axes[0]} {x_shown(x)}: {shown(y)}" for x, y in line.points]
        edge = [at(x, low) for x, low, _ in line.band] + [at(x, high) for x, _, high in reversed(line.band)]
        if edge:
            _path(svg, edge, closed=True, class_=f"dot{i % 6}", fill=COLOURS[i % 6], fill_opacity="0.2")
        _line(svg, i, [at(*point) for point in line.points], told)
        y = bottom + 54 + 19 * i
        _line(svg, i, [(52, y), (69, y), (86, y)], ["", line.name, ""])
        _text(svg, 94, y + 4, shorten(line.name, 48))
    return svg


def _line(svg: Element, i: int, places: Sequence[tuple[float, float]], told: Sequence[str]) -> None:
    """A line with a marker at every point that has a tooltip."""
    style: Any = {"class_": f"line{i % 6}", "stroke": COLOURS[i % 6], "stroke_width": "2"}
    if places:
        _path(svg, places, **style, stroke_dasharray=DASHES[i % 5])
    corners, rotation = MARKERS[i % 6]
    angles = [math.radians(rotation + 360 * corner / corners) for corner in range(corners)]
    for (x, y), text in zip(places, told, strict=True):
        if text:
            edge = [(x + 4.5 * math.cos(angle), y + 4.5 * math.sin(angle)) for angle in angles]
            dot = _path(svg, edge, closed=True, class_=f"dot{i % 6}", fill=COLOURS[i % 6])
            _add(dot, "title", text)


def ticks(high: float) -> list[float]:
    """Four to eight round numbers from 0 to at least `high`."""
    span = high if math.isfinite(high) and high > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if span / (factor * power) <= 6)
    return [step * i for i in range(math.ceil(span / step - 1e-9) + 1)]


def share(value: float, whole: float) -> float:
    """`value` as a share of `whole`, limited to the drawing whatever a file contains."""
    if not (math.isfinite(value) and math.isfinite(whole)) or whole <= 0:
        return 1.0 if value > 0 else 0.0
    return min(1.0, max(0.0, value / whole))


def shorten(text: str, longest: int = LONGEST) -> str:
    """The text, shortened in the middle: its beginning and its end identify a site."""
    return text if len(text) <= longest else f"{text[: longest // 3]}…{text[-(longest - longest // 3 - 1) :]}"


def _margin(entries: Sequence[Entry]) -> float:
    return 12 + LETTER * max((len(shorten(entry.label)) for entry in entries), default=0)


def _bar(parent: Element, i: int, x: float, y: float, width: float) -> None:
    _add(parent, "rect", class_=f"bar{i}", x=x, y=y, width=width, height=12, fill=COLOURS[i % 6])


def _text(parent: Element, x: float, y: float, text: str, anchor: str = "start") -> None:
    _add(parent, "text", text, x=x, y=y, text_anchor=anchor)


def _path(parent: Element, points: Sequence[tuple[float, float]], *, closed: bool = False, **style: Any) -> Element:
    d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + ("Z" if closed else "")
    return _add(parent, "path", d=d, **{"fill": "none", **style})


def _add(parent: Element, tag: str, text: str = "", **attributes: Any) -> Element:
    """A child element; `class_` and `text_anchor` stand for class and text-anchor. Text is escaped on writing."""
    written = {key: f"{value:.1f}" if isinstance(value, float) else str(value) for key, value in attributes.items()}
    node = SubElement(parent, tag, {key.rstrip("_").replace("_", "-"): value for key, value in written.items()})
    node.text = text
    return node
