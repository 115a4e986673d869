"""Pairs of sentences with a human score of their similarity (STS-B and files in its format)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from corp.data.tables import read_columns
from corp.errors import DataError

NAMES = ("score", "sentence1", "sentence2")
STSB = (4, 5, 6)  # the columns in STS-B's own files, which have no header


class Pairs(NamedTuple):
    """Sentences 0 and 1 are the first pair, 2 and 3 the second …; scores (N,) are those of the pairs."""

    sentences: list[str]
    scores: Tensor


def read_pairs(file: Path) -> Pairs:
    """Read a table with a header score, sentence1, sentence2, or STS-B's format without a header (columns 5, 6, 7)."""
    columns, rows = read_columns(file, NAMES, STSB)
    if not rows:
        raise DataError(f"{file} is empty: it holds no pairs")
    sentences, scores = list[str](), list[float]()
    for line, row in rows:
        try:
            score, first, second = (row[column] for column in columns)
            scores.append(float(score))
        except (IndexError, ValueError):
            raise DataError(
                f"{file}, line {line}: no score in column {columns[0] + 1} and sentences in columns "
                f"{columns[1] + 1} and {columns[2] + 1} (a header of {', '.join(NAMES)} names others)"
            ) from None
        if not (first.strip() and second.strip()):
            raise DataError(f"{file}, line {line}: a sentence is empty")
        sentences += [first, second]
    return Pairs(sentences, torch.tensor(scores, dtype=torch.float64))
