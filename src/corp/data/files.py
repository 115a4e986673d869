"""Files below a folder, and texts that are byte ranges of a file: plain text and lines of JSON."""

from __future__ import annotations

import json
import mmap
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from corp.errors import DataError

START = 8192  # bytes that are tested for binary content
MOST_FIELDS = 8  # the most fields that a message names
SEPARATOR = b"<|endoftext|>"  # between the documents of a plain text, if it has several


def files_below(folder: Path, suffixes: Set[str], what: str) -> list[Path]:
    """The files with one of the suffixes, at any depth, sorted."""
    found = [Path(parent, name) for parent, _, names in os.walk(folder, followlinks=True) for name in names]
    found = sorted(path for path in found if path.suffix.lower() in suffixes)
    if not found:
        raise DataError(f"no {what} in {folder} or its sub-folders (looked for {', '.join(sorted(suffixes))})")
    return found


class Documents(ABC):
    """The texts of a file or folder, by number."""

    path: Path

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, number: int) -> str: ...

    def begins(self, _number: int) -> bool:
        """Whether the text begins a document; False if it continues the document of the text before it."""
        return True


class Ranges(Documents):
    """Texts that are byte ranges of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.starts, self.ends = array("q"), array("q")
        if path.stat().st_size:  # an empty file cannot be mapped
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                self._refuse_binary(content[:START])
                for start, end in self._find(content):
                    self.starts.append(start)
                    self.ends.append(end)

    def _refuse_binary(self, start: bytes) -> None:
        if b"\0" in start:
            raise DataError(f"{self.path} is not text in UTF-8: it has zero bytes (a binary file, or UTF-16)")

    @abstractmethod
    def _find(self, content: mmap.mmap) -> Iterator[tuple[int, int]]:
        """The start and the end of every text."""

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, number: int) -> str:
        start = self.starts[number]
        with self.path.open("rb") as file:
            file.seek(start)
            raw = file.read(self.ends[number] - start)
        try:
            return raw.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}: byte {start + error.start} is not UTF-8 ({error.reason}); convert the file to UTF-8"
            ) from error

    def line(self, number: int) -> int:
        """The line, from 1, on which text `number` begins: for messages."""
        with self.path.open("rb") as file:
            return file.read(self.starts[number]).count(b"\n") + 1


class PlainText(Ranges):
    """Documents between separators; without separators, one per line, or the whole file in pieces of whole lines."""

    def __init__(self, path: Path, lines: bool, piece: int) -> None:
        self._lines, self._piece, self._whole = lines, piece, False
        super().__init__(path)

    def begins(self, number: int) -> bool:
        return number == 0 or not self._whole

    def read(self, number: int) -> str:
        text = super().read(number)
        return text if self._whole else text.strip()  # line ends beside a separator are not part of the document

    def _find(self, content: mmap.mmap) -> Iterator[tuple[int, int]]:
        if content.find(SEPARATOR) >= 0:
            return between(content, SEPARATOR)
        if self._lines:
            return between(content, b"\n")
        self._whole = True
        return self._pieces(content)

    def _pieces(self, content: mmap.mmap) -> Iterator[tuple[int, int]]:
        start = 0
        while start < len(content):
            end = start + self._piece
            if end < len(content):
                behind = (content.rfind(mark, start, end) + 1 for mark in (b"\n", b" "))  # 0 if there is none
                end = next(filter(None, behind), end)
                while end < len(content) and content[end] & 0xC0 == 0x80:  # never inside a UTF-8 character
                    end += 1
            yield start, min(end, len(content))
            start = end


def between(content: mmap.mmap, mark: bytes) -> Iterator[tuple[int, int]]:
    """The stretches between marks that are not only white space."""
    start = 0
    while start < len(content):
        found = content.find(mark, start)
        end = len(content) if found < 0 else found
        if content[start:end].strip():
            yield start, end
        start = end + len(mark)


class JsonLines(Ranges):
    """One JSON object per line, its text under a key."""

    def __init__(self, path: Path, field: str) -> None:
        self._field = field
        super().__init__(path)

    def _find(self, content: mmap.mmap) -> Iterator[tuple[int, int]]:
        return between(content, b"\n")

    def where(self, number: int) -> str:
        return f"{self.path}, line {self.line(number)}"

    def record(self, number: int) -> dict[str, Any]:
        """The whole object of a line."""
        try:
            record = json.loads(super().read(number))
        except json.JSONDecodeError as error:
            raise DataError(f"{self.where(number)}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise DataError(f"{self.where(number)}: expected a JSON object, found a {type(record).__name__}")
        return record

    def read(self, number: int) -> str:
        record = self.record(number)
        value = record.get(self._field)
        if not isinstance(value, str):
            raise no_field(self.where(number), self._field, list(record), value)
        return value.encode("utf-8", "replace").decode()  # tokenizers reject half a surrogate pair


def no_field(where: str, field: str, there: list[str], value: Any = None, *, numbers: bool = False) -> DataError:
    """The error for a record without a text under `field`; `there` are the fields it has."""
    if field in there:
        return DataError(
            f"{where}: {field!r} holds a {type(value).__name__}, not text; give another field as field=NAME"
        )
    known = ", ".join(map(repr, there[:MOST_FIELDS])) or "nothing"
    known += f" and {len(there) - MOST_FIELDS} more" if len(there) > MOST_FIELDS else ""
    hint = ", or the column's number (from 1) if there is no header" if numbers else ""
    return DataError(f"{where} has no field {field!r}; it has {known}; give the field of the text as field=NAME{hint}")
