"""Tables as plain text, HTML, Markdown and CSV; the command line has a richer one."""

from __future__ import annotations

import csv
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (columns, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain HTML table, cells escaped: notebooks style it."""
    lines = [_html_row("th", columns), *(_html_row("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


class Tabular:
    """An object that prints as a title and a short table, and that notebooks show as HTML."""

    def table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        """The title, the columns and the rows."""
        raise NotImplementedError

    def __str__(self) -> str:
        title, columns, rows = self.table()
        return f"{title}\n{text_table(columns, rows)}" if rows else title

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        title, columns, rows = self.table()
        return f"<p>{html.escape(title)}</p>{html_table(columns, rows) if rows else ''}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table, cells escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], *, first: str) -> None:
    """Write a column for every key of any row, in order of appearance; `first` is written even without rows."""
    columns = list(dict.fromkeys([first, *(key for row in rows for key in row)]))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
