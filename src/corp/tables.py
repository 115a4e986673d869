"""Tables as plain text, Markdown and CSV; the command line has a richer one."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (columns, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table, cells escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], *, first: str) -> None:
    """A column for every key of any row, in the order in which they appear; `first` is there even without rows."""
    columns = list(dict.fromkeys([first, *(key for row in rows for key in row)]))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
