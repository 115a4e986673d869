"""Small charts as SVG text: bars, a heat map, lines. No library, no colour that is not also a pattern or a number.

Colours, fonts and the hatching live in page.html, so that one drawing serves light, dark and print. Drawings are
narrow (420 units) because a phone shows them at that size; the page puts them side by side where there is room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH = 420
LETTER = 6.9  # units per character of the 12-unit font, on average
LONGEST = 22  # characters of a label; the full name is in its tooltip
DASHES = ("", "7 4", "2 3", "10 3 2 3", "4 2")
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.5-3.5h7v7h-7z",
    "M-4.5-3.5h9l-4.5 8z",
    "M0-5l5 5l-5 5l-5-5z",
    "M-4.5 3.5h9l-4.5-8z",
    "M-1.5-5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",
)


class Row(NamedTuple):
    """One line of a bar chart or heat map: a short label, the whole name, and the numbers."""

    label: str
    name: str
    values: Sequence[float]
    texts: Sequence[str]


class Series(NamedTuple):
    """One line of a line chart."""

    name: str
    points: Sequence[tuple[float, float]]


def bar_chart(label: str, rows: Sequence[Row], names: Sequence[str], *, top: float | None = None) -> str:
    """Horizontal bars, one per value; the first of `names` is solid, the second hatched. `top` is the full length."""
    whole = top or max((v for row in rows for v in row.values if math.isfinite(v)), default=1.0)
    left = 12 + LETTER * max((len(shorten(row.label)) for row in rows), default=0)
    room = WIDTH - left - 12 - LETTER * max((len(t) for row in rows for t in row.texts), default=0)
    start = 24 if len(names) > 1 else 4
    parts = [_bar_key(names, left)] if len(names) > 1 else []
    step = 14 * len(names) + 8
    for number, row in enumerate(rows):
        parts.append(_bar_row(row, start + number * step, left, room, whole))
    axis = f'<path class="axis" d="M{left:.1f} {start}V{start + step * len(rows) - 4}"/>'
    return drawing(label, "".join(parts) + axis, WIDTH, start + step * len(rows))


def _bar_row(row: Row, y: float, left: float, room: float, whole: float) -> str:
    middle = y + 7 * len(row.values) + 3
    parts = [f'<text class="end" x="{left - 6:.1f}" y="{middle:.1f}">{escape(shorten(row.label))}</text>']
    for i, (value, text) in enumerate(zip(row.values, row.texts, strict=True)):
        length = room * share(value, whole)
        top = y + 14 * i
        parts.append(f'<rect class="bar{i}" x="{left:.1f}" y="{top}" width="{length:.1f}" height="12"/>')
        parts.append(f'<text class="value" x="{left + length + 5:.1f}" y="{top + 10}">{escape(text)}</text>')
    return f"<g><title>{escape(row.name)}: {escape(', '.join(row.texts))}</title>{''.join(parts)}</g>"


def _bar_key(names: Sequence[str], left: float) -> str:
    parts, x = [], left
    for i, name in enumerate(names):
        parts.append(f'<rect class="bar{i}" x="{x:.1f}" y="2" width="18" height="11"/>')
        parts.append(f'<text x="{x + 23:.1f}" y="12">{escape(name)}</text>')
        x += 40 + LETTER * len(name)
    return "".join(parts)


def heat_map(label: str, rows: Sequence[Row], *, top: float, ends: tuple[str, str], column: str = "head") -> str:
    """Rows by columns of shaded cells, each with its number; `ends` name the lightest and the darkest shade."""
    count = max((len(row.values) for row in rows), default=1)
    left = 12 + LETTER * max((len(shorten(row.label)) for row in rows), default=0)
    cell = min(64.0, max(26.0, (WIDTH - left) / count))
    width = max(WIDTH, math.ceil(left + cell * count))
    heads = "".join(_text(left + cell * (i + 0.5), 28, str(i), "middle") for i in range(count))
    parts = [_text(left, 12, f"{column} (across), layer (down)", ""), heads]
    parts += [_heat_row(row, 34 + 24 * number, left, cell, top) for number, row in enumerate(rows)]
    bottom = 34 + 24 * len(rows)
    return drawing(label, "".join(parts) + _shades(left, bottom + 12, ends), width, bottom + 30)


def _heat_row(row: Row, y: float, left: float, cell: float, top: float) -> str:
    parts = [_text(left - 6, y + 16, shorten(row.label), "end")]
    for i, (value, text) in enumerate(zip(row.values, row.texts, strict=True)):
        shade = 0.06 + 0.94 * share(value, top)
        x = left + cell * i
        ink = "deep" if shade > 0.85 else "pale"  # the ink that stands out on this shade
        box = f'x="{x + 1:.1f}" y="{y + 1}" width="{cell - 2:.1f}" height="22" rx="3"'
        parts.append(f"<g><title>{escape(row.name)}, head {i}: {escape(text)}</title>")
        parts.append(f'<rect class="heat" {box} fill-opacity="{shade:.3f}"/>')
        parts.append(_text(x + cell / 2, y + 16, text, f"middle {ink}") + "</g>")
    return "".join(parts)


def _shades(left: float, y: float, ends: tuple[str, str]) -> str:
    """The key of a heat map."""
    x = left + 8 + LETTER * len(ends[0])
    box = f'y="{y}" width="22" height="11"'
    steps = (f'<rect class="heat" x="{x + 22 * i:.1f}" {box} fill-opacity="{0.06 + 0.188 * i:.3f}"/>' for i in range(6))
    return _text(left, y + 10, ends[0], "") + "".join(steps) + _text(x + 138, y + 10, ends[1], "")


def line_chart(label: str, series: Sequence[Series], axes: tuple[str, str], shown: Callable[[float], str]) -> str:
    """Lines over the share removed (0 to 1); `axes` name x and y, `shown` writes a y value."""
    points = [point for line in series for point in line.points]
    y_ticks = ticks(0.0, max((y for _, y in points), default=1.0))
    x_ticks = ticks(0.0, max((x for x, _ in points), default=1.0))
    left, right, top, bottom = 52.0, WIDTH - 14.0, 26.0, 252.0

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * share(x, x_ticks[-1]), bottom - (bottom - top) * share(y, y_ticks[-1])

    parts = [_text(2, 12, axes[1], "")]
    for y in y_ticks:
        parts.append(f'<path class="grid" d="M{left} {at(0, y)[1]:.1f}H{right}"/>')
        parts.append(_text(left - 6, at(0, y)[1] + 4, shown(y), "end"))
    parts += [_text(at(x, 0)[0], bottom + 17, f"{x:.0%}", "middle") for x in x_ticks]
    parts.append(_text((left + right) / 2, bottom + 36, axes[0], "middle"))
    parts += [_line(i, line, at, shown) for i, line in enumerate(series)]
    parts += [_line_key(i, line.name, bottom + 58 + 19 * i) for i, line in enumerate(series)]
    return drawing(label, "".join(parts), WIDTH, bottom + 54 + 19 * len(series))


def _line(
    i: int, line: Series, at: Callable[[float, float], tuple[float, float]], shown: Callable[[float], str]
) -> str:
    places = [(*at(x, y), f"{line.name}, {x:.0%} removed: {shown(y)}") for x, y in line.points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in places)
    dots = "".join(
        f'<path class="dot{i % 6}" transform="translate({x:.1f} {y:.1f})" d="{MARKERS[i % 6]}">'
        f"<title>{escape(title)}</title></path>"
        for x, y, title in places
    )
    return f'<path class="line{i % 6}" stroke-dasharray="{DASHES[i % 5]}" d="M{path}"/>{dots}' if places else ""


def _line_key(i: int, name: str, y: float) -> str:
    line = f'<path class="line{i % 6}" stroke-dasharray="{DASHES[i % 5]}" d="M52 {y - 4}h34"/>'
    dot = f'<path class="dot{i % 6}" transform="translate(69 {y - 4})" d="{MARKERS[i % 6]}"/>'
    return f"{line}{dot}{_text(94, y, shorten(name, 48), '')}"


def ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers from `low` to at least `high`."""
    span = high - low if math.isfinite(high) and high > low else 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if span / (factor * power) <= 6)
    return [low + step * i for i in range(math.ceil(span / step - 1e-9) + 1)]


def share(value: float, whole: float) -> float:
    """`value` as a part of `whole`, kept within the drawing whatever a file claims."""
    if not (math.isfinite(value) and math.isfinite(whole)) or whole <= 0:
        return 1.0 if value > 0 else 0.0
    return min(1.0, max(0.0, value / whole))


def shorten(text: str, longest: int = LONGEST) -> str:
    """The end tells sites apart, the beginning says where they are: cut in the middle."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 3]}…{text[-(longest - longest // 3 - 1) :]}"


def drawing(label: str, content: str, width: float, height: float) -> str:
    """The outer element; `label` is what somebody hears who cannot see it. Wide ones scroll instead of shrinking."""
    least = f' style="min-width:{width}px"' if width > WIDTH else ""
    box = f'viewBox="0 0 {width:g} {height:g}"'
    return f'<svg role="img" aria-label="{escape(label)}" {box}{least}>{content}</svg>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
