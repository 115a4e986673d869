"""Pairs of sentences with a human score of their likeness (STS-B and files of its shape)."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corp.errors import DataError

NAMES = ("score", "sentence1", "sentence2")
STSB = (4, 5, 6)  # where they are in STS-B's own files, which have no header


class Pairs(NamedTuple):
    """Sentences 0 and 1 are the first pair, 2 and 3 the second …; scores (N,) are of the pairs."""

    sentences: list[str]
    scores: Tensor


def read_pairs(file: Path) -> Pairs:
    """A table with a header score, sentence1, sentence2, or without one as STS-B has it: columns 5, 6 and 7."""
    rows = _rows(file)
    names = [cell.strip().lower() for cell in rows[0][1]]
    columns: tuple[int, ...] = STSB
    if set(NAMES) <= set(names):
        columns = tuple(names.index(name) for name in NAMES)
        rows = rows[1:]
    sentences, scores = list[str](), list[float]()
    for number, row in rows:
        try:
            score, first, second = (row[column] for column in columns)
            scores.append(float(score))
        except (IndexError, ValueError):
            raise DataError(
                f"{file}, line {number}: no score in column {columns[0] + 1} and sentences in columns "
                f"{columns[1] + 1} and {columns[2] + 1} (a header of {', '.join(NAMES)} names others)"
            ) from None
        sentences += [first, second]
    if not scores:
        raise DataError(f"{file} holds no pairs")
    empty = next((i for i, sentence in enumerate(sentences) if not sentence.strip()), None)
    if empty is not None:
        raise DataError(f"{file}, line {rows[empty // 2][0]}: a sentence is empty")
    return Pairs(sentences, torch.tensor(scores, dtype=torch.float64))


def _rows(file: Path) -> list[tuple[int, list[str]]]:
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            tabs = "\t" in stream.readline()
            stream.seek(0)
            # Where tabs part the cells, quotation marks are text: STS-B has lines with one only.
            format_: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"delimiter": ","}
            rows = [(number, row) for number, row in enumerate(csv.reader(stream, **format_), 1) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read as a table of scored sentence pairs: {error}") from error
    if not rows:
        raise DataError(f"{file} is empty")
    return rows
