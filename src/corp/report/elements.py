"""Pieces of an HTML page: tables, figures, lists of facts. Everything given as text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

Cell = str | tuple[float | None, str]  # text, or a number to sort by and how it is written


def heading(level: int, text: str) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def code(text: str) -> str:
    return f'<pre tabindex="0"><code>{escape(text)}</code></pre>'


def tile(name: str, big: str, small: str) -> str:
    """A number to see at one glance."""
    numbers = f'<dd class="big">{escape(big)}</dd><dd class="small">{escape(small)}</dd>'
    return f'<div class="tile"><dt>{escape(name)}</dt>{numbers}</div>'


def figure(title: str, subtitle: str, drawing: str) -> str:
    """`drawing` is SVG, which has its own text alternative. The keyboard can scroll it where it is wide."""
    below = f"<span>{escape(subtitle)}</span>" if subtitle else ""
    area = f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(title)}">{drawing}</div>'
    return f"<figure><figcaption><b>{escape(title)}</b>{below}</figcaption>{area}</figure>"


def figures(drawn: Iterable[str]) -> str:
    return f'<div class="figures">{"".join(drawn)}</div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    return f'<dl class="facts">{entries}</dl>'


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Columns of numbers are aligned right; the page's script makes the headers sort."""
    numeric = [bool(rows) and all(not isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    heads = "".join(
        f'<th scope="col"{_number_class(is_number)}>{escape(column)}</th>'
        for column, is_number in zip(columns, numeric, strict=True)
    )
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    content = f"<caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>"
    area = f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(caption)}">'
    return f'{area}<table class="sortable">{content}</table></div>'


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    value, text = cell
    return f'<td{_number_class(True)} data-value="{"" if value is None else repr(value)}">{escape(text)}</td>'


def _number_class(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def percent(value: float | None, digits: int = 2) -> Cell:
    return (None, "–") if value is None else (value, f"{value:.{digits}%}")


def whole(value: int | None) -> Cell:
    return (None, "–") if value is None else (float(value), f"{value:,}".replace(",", " "))


def flat(content: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Nested objects as one list of names and values."""
    found: list[tuple[str, str]] = []
    for key, value in content.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and value:
            found += flat(value, f"{name} › ")
        else:
            found.append((name, "–" if value in (None, "", {}, [], ()) else str(value)))
    return found
