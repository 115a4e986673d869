"""Texts in tables: .csv and .tsv files, parquet files, and folders that `datasets` saved."""

from __future__ import annotations

import csv
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from corp.data.files import Ranges, no_field
from corp.errors import DataError


class Table(Ranges):
    """Rows of a .csv or .tsv file. A first line with tabs in it means tabs, and no quoting, whatever the name says."""

    def __init__(self, path: Path, field: str) -> None:
        self._field = field
        self._column = 0
        self._format: dict[str, Any] = {}
        super().__init__(path)

    def _find(self, content: mmap.mmap) -> Iterator[tuple[int, int]]:
        first = content[: max(0, content.find(b"\n")) or len(content)]
        tabs = b"\t" in first
        self._format = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"delimiter": ","}
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
                start = place[0]  # the reader takes no more lines than a row has
        except csv.Error as error:
            raise DataError(f"{self.path} cannot be read as a table: {error}") from error

    def _find_column(self, first: str) -> bool:
        """Note which column holds the text; is the first row a header?"""
        names = [name.strip() for name in self._cells(first)]
        if self._field in names:
            self._column = names.index(self._field)
            return True
        if not self._field.isdecimal() or not 1 <= int(self._field) <= len(names):
            raise no_field(f"{self.path}, line 1", self._field, names, None, numbers=True)
        self._column = int(self._field) - 1
        return False

    def _cells(self, text: str) -> list[str]:
        return next(csv.reader(text.splitlines(keepends=True), **self._format))

    def read(self, number: int) -> str:
        cells = self._cells(super().read(number))
        if self._column >= len(cells):
            raise DataError(
                f"{self.path}, line {self.line(number)}: {len(cells)} columns, no column {self._column + 1}"
            )
        return cells[self._column]


class Parquet:
    """Rows of a parquet file, all their columns where `field` is None; the last row group read is kept."""

    def __init__(self, path: Path, field: str | None) -> None:
        try:
            import pyarrow.parquet as parquet
        except ModuleNotFoundError:
            raise DataError(f"{path}: reading parquet takes pyarrow; pip install pyarrow") from None
        self.path = path
        try:
            self._file = parquet.ParquetFile(path)
        except Exception as error:  # pyarrow's own kinds, which cannot be named without it
            raise DataError(f"{path} cannot be read as parquet: {error}") from error
        names = list(self._file.schema_arrow.names)
        if field is not None and field not in names:
            raise no_field(str(path), field, names, None)
        self._field = field
        sizes = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._ends = torch.tensor(sizes).cumsum(0)
        self._sizes = sizes
        self._held: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return sum(self._sizes)

    def begins(self, _number: int) -> bool:
        return True

    def where(self, number: int) -> str:
        return f"{self.path}, row {number + 1}"

    def _group(self, group: int) -> Any:
        try:
            return self._file.read_row_group(group, columns=None if self._field is None else [self._field])
        except Exception as error:  # a damaged file, in pyarrow's own kinds
            raise DataError(f"{self.path} cannot be read as parquet: {error}") from error

    def record(self, number: int) -> dict[str, Any]:
        group = int(torch.searchsorted(self._ends, number, right=True))
        if self._held[0] != group:
            self._held = (group, self._group(group))
        place = number - int(self._ends[group]) + self._sizes[group]
        (row,) = self._held[1].slice(place, 1).to_pylist()
        found: dict[str, Any] = row
        return found

    def read(self, number: int) -> str:
        return text_in(self.record(number).get(str(self._field)), self._field, self.where(number))


class SavedDataset:
    """A folder that `datasets` saved (save_to_disk)."""

    def __init__(self, path: Path, field: str | None) -> None:
        try:
            import datasets
        except ModuleNotFoundError:
            raise DataError(f"{path}: reading a datasets folder takes datasets; pip install datasets") from None
        if (path / "dataset_dict.json").is_file():
            splits = sorted(part.name for part in path.iterdir() if (part / "dataset_info.json").is_file())
            raise DataError(f"{path} holds several splits; give one of them, e.g. {path / (splits or ['train'])[0]}")
        try:
            self._rows: Any = datasets.load_from_disk(str(path))
        except Exception as error:  # whatever the library makes of a damaged folder
            raise DataError(f"{path} cannot be read as a datasets folder: {error}") from error
        self.path, self._field = path, field
        if field is not None and field not in self._rows.column_names:
            raise no_field(str(path), field, list(self._rows.column_names), None)

    def __len__(self) -> int:
        return len(self._rows)

    def begins(self, _number: int) -> bool:
        return True

    def where(self, number: int) -> str:
        return f"{self.path}, row {number + 1}"

    def record(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = self._rows[number]
        return found

    def read(self, number: int) -> str:
        return text_in(self._rows[number][self._field], self._field, self.where(number))


def text_in(value: Any, field: str | None, where: str) -> str:
    """The text of a cell; an empty one for null."""
    if value is not None and not isinstance(value, str):
        raise DataError(f"{where}: {field!r} holds a {type(value).__name__}, not text")
    return value or ""
