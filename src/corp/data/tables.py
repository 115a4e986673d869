"""Texts in tables: .csv and .tsv files, parquet files, and folders that `datasets` saved."""

from __future__ import annotations

import csv
import mmap
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from corp.data.files import Documents, Ranges, no_field
from corp.errors import DataError


def format_of(first: str) -> dict[str, Any]:
    """How to read a table: tabs in the first line mean separation by tabs and no quoting, whatever the file's name."""
    return {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if "\t" in first else {"delimiter": ","}


def read_columns(
    path: Path, names: Sequence[str], columns: Sequence[int]
) -> tuple[Sequence[int], list[tuple[int, list[str]]]]:
    """The positions of the named columns of a small table (`columns` without a header), and its (line, cells)."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = csv.reader(stream, **format_of(stream.readline()))
            stream.seek(0)
            found = [(rows.line_num, row) for row in rows if row]
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a table of {', '.join(names)}: {error}") from error
    header = [cell.strip().lower() for cell in found[0][1]] if found else []
    if set(names) <= set(header):
        return [header.index(name) for name in names], found[1:]
    return columns, found


class Table(Ranges):
    """Rows of a .csv or .tsv file."""

    def __init__(self, path: Path, field: str) -> None:
        self._field = field
        self._column = 0
        self._format: dict[str, Any] = {}
        super().__init__(path)

    def _find(self, content: mmap.mmap) -> Iterator[tuple[int, int]]:
        first = content[: max(0, content.find(b"\n")) or len(content)]
        self._format = format_of(first.decode("latin-1"))
        place = [0]

        def lines() -> Iterator[str]:
            while place[0] < len(content):
                end = content.find(b"\n", place[0]) + 1 or len(content)
                line, place[0] = content[place[0] : end], end
                yield line.decode("latin-1")  # only quotes and line ends matter here

        start = 0
        try:
            for number, row in enumerate(csv.reader(lines(), **self._format)):
                if number == 0 and self._find_column(content[start : place[0]].decode("utf-8-sig", "replace")):
                    pass  # a header
                elif row:
                    yield start, place[0]
                start = place[0]  # the reader consumes only the lines of one row
        except csv.Error as error:
            raise DataError(f"{self.path} cannot be read as a table: {error}") from error

    def _find_column(self, first: str) -> bool:
        """Find the column of the text; returns whether the first row is a header."""
        names = [name.strip() for name in self._cells(first)]
        if self._field in names:
            self._column = names.index(self._field)
            return True
        if not self._field.isdecimal() or not 1 <= int(self._field) <= len(names):
            raise no_field(f"{self.path}, line 1", self._field, names, numbers=True)
        self._column = int(self._field) - 1
        return False

    def _cells(self, text: str) -> list[str]:
        return next(csv.reader(text.splitlines(keepends=True), **self._format))

    def read(self, number: int) -> str:
        cells = self._cells(super().read(number))
        if self._column >= len(cells):
            raise DataError(
                f"{self.path}, line {self.line(number)}: the row has {len(cells)} columns, so there is no column "
                f"{self._column + 1}"
            )
        return cells[self._column]


class Column(Documents):
    """Records that a library reads; `field` is the column of the text, None for whole records."""

    def __init__(self, path: Path, field: str | None, fields: list[str], count: int) -> None:
        if field is not None and field not in fields:
            raise no_field(str(path), field, fields)
        self.path, self._field, self._count = path, field, count

    def __len__(self) -> int:
        return self._count

    def where(self, number: int) -> str:
        return f"{self.path}, row {number + 1}"

    @abstractmethod
    def record(self, number: int) -> dict[str, Any]:
        """All fields of a row."""

    def read(self, number: int) -> str:
        value = self.record(number)[str(self._field)]
        if value is not None and not isinstance(value, str):
            raise no_field(self.where(number), str(self._field), [str(self._field)], value)
        return value or ""


class Parquet(Column):
    """Rows of a parquet file; the last row group is cached. (`datasets` would copy the file to its cache first.)"""

    def __init__(self, path: Path, field: str | None) -> None:
        try:
            import pyarrow.parquet as parquet
        except ModuleNotFoundError:
            raise DataError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from None
        with _readable(path, "parquet"):
            self._file = parquet.ParquetFile(path)
        sizes = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._starts = [0, *accumulate(sizes)]
        self._held: tuple[int, Any] = (-1, None)
        super().__init__(path, field, list(self._file.schema_arrow.names), sum(sizes))

    def record(self, number: int) -> dict[str, Any]:
        group = bisect_right(self._starts, number) - 1
        if self._held[0] != group:
            with _readable(self.path, "parquet"):
                columns = None if self._field is None else [self._field]
                self._held = (group, self._file.read_row_group(group, columns=columns))
        with _readable(self.path, "parquet"):  # a damaged file may promise more rows than it holds, or hold no text
            (row,) = self._held[1].slice(number - self._starts[group], 1).to_pylist()
        found: dict[str, Any] = row
        return found


class SavedDataset(Column):
    """A folder that `datasets` saved (save_to_disk)."""

    def __init__(self, path: Path, field: str | None) -> None:
        try:
            import datasets
        except ModuleNotFoundError:
            raise DataError(f"{path}: reading a datasets folder needs datasets: pip install datasets") from None
        if (path / "dataset_dict.json").is_file():
            splits = sorted(part.name for part in path.iterdir() if (part / "dataset_info.json").is_file())
            raise DataError(f"{path} holds several splits; give one of them, e.g. {path / (splits or ['train'])[0]}")
        with _readable(path, "a datasets folder"):
            self._rows: Any = datasets.load_from_disk(str(path))
        super().__init__(path, field, list(self._rows.column_names), len(self._rows))

    def record(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = self._rows[number]
        return found


@contextmanager
def _readable(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the libraries have their own exceptions for damaged files
        raise DataError(f"{path} cannot be read as {what}: {error}") from error
