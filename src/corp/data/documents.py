"""Documents in .txt, .jsonl, .csv, .tsv and .parquet files and in `datasets` folders, read on demand.

Only positions are stored, not texts, so a file may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from corp.data.chat import Chats, Message
from corp.data.files import Documents, JsonLines, PlainText, files_below
from corp.data.tables import Parquet, SavedDataset, Table
from corp.errors import DataError

PLAIN, TABLES = frozenset({".txt", ".text", ".raw"}), frozenset({".csv", ".tsv"})
SUFFIXES = PLAIN | TABLES | {".jsonl", ".parquet"}
BLOCK = 256  # documents read at a time, in their order on disk


def open_documents(
    paths: Sequence[str | Path],
    *,
    field: str,
    lines: bool,
    piece: int,
    template: Callable[[list[Message]], str] | None = None,
) -> list[Documents]:
    """The documents of files and folders of files.

    field   the key, column name or column number (from 1) of the text, if a record has several
    lines   a plain text without separators has one document per line; otherwise it is one document, read in
            pieces of about `piece` bytes
    template  records are conversations, and this makes a text of their messages (see data.chat)
    """
    found = [_open(file, field, lines, piece, template) for path in paths for file in _files(Path(path))]
    if not sum(map(len, found)):
        raise DataError(f"there is no text in {', '.join(map(str, paths))}")
    return found


def in_order(sources: Sequence[Documents]) -> Iterator[tuple[str, bool]]:
    """All texts in their order, each with whether it begins a document."""
    for source in sources:
        for number in range(len(source)):
            yield source.read(number), source.begins(number)


def drawn(sources: Sequence[Documents], seed: int) -> Iterator[str]:
    """All texts in a random order given by `seed`, read at most one block ahead."""
    ends = torch.tensor([len(source) for source in sources]).cumsum(0)
    order = torch.randperm(int(ends[-1]), generator=torch.Generator().manual_seed(seed))
    for block in order.split(BLOCK):
        texts = {}
        for number in block.sort().values.tolist():
            where = int(torch.searchsorted(ends, number, right=True))
            texts[number] = sources[where].read(number - int(ends[where]) + len(sources[where]))
        yield from (texts[number] for number in block.tolist())


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{path}: texts are read from {', '.join(sorted(SUFFIXES))} files, not {path.suffix!r}")
        return [path]
    if not path.is_dir():
        raise DataError(f"there is no file or folder {path}")
    if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return [path]
    return files_below(path, SUFFIXES, "texts")


def _open(
    path: Path, field: str, lines: bool, piece: int, template: Callable[[list[Message]], str] | None
) -> Documents:
    suffix = "" if path.is_dir() else path.suffix.lower()
    records: Any = {".jsonl": JsonLines, ".parquet": Parquet, "": SavedDataset}.get(suffix)
    try:
        if template is not None and records is None:
            raise DataError(f"{path}: conversations are read from .jsonl and .parquet files and folders of datasets")
        if template is not None:
            return Chats(records(path, None), template)
        if records is not None:
            made: Documents = records(path, field)
            return made
        return Table(path, field) if suffix in TABLES else PlainText(path, lines, piece)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
