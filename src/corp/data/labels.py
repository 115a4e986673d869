"""Class indices of image files: from sub-folders, from ImageNet synset ids, or from a CSV file."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from corp.data.images import ImageBatches, list_images
from corp.errors import DataError

SYNSET = re.compile(r"(n\d{8})(?![0-9A-Za-z])")  # n01440764, n01440764_10026.JPEG


def find_labels(folders: Sequence[Path], classes: int | None) -> dict[Path, int] | None:
    """Class index of every image, by the order of the class names; None where names say nothing about classes.

    Sorted names are the model's classes only if all of them are there: `classes` (None: unknown) is how many it has.
    """
    names = {path: _class_name(path, Path(folder)) for folder in folders for path in list_images([folder])}
    known = sorted({name for name in names.values() if name is not None})
    unnamed = [path for path, name in names.items() if name is None]
    if not known or unnamed:
        return None
    if classes is not None and len(known) != classes:
        if all(SYNSET.fullmatch(name) for name in known):
            raise DataError(
                f"{len(known)} synset ids are there but the model has {classes} classes: which of them they are is "
                "ambiguous; give --labels FILE.csv (file,label), or --labels none to evaluate without labels"
            )
        return None
    index = {name: number for number, name in enumerate(known)}
    return {path: index[name] for path, name in names.items() if name is not None}


def _class_name(path: Path, root: Path) -> str | None:
    """The first sub-folder below the root, or else the synset id that the file name starts with."""
    parts = path.relative_to(root).parts
    if len(parts) > 1:
        return parts[0]
    match = SYNSET.match(path.name)
    return match[1] if match else None


def read_labels(file: Path, folders: Sequence[Path]) -> dict[Path, int]:
    """Class index of every image, from a CSV of file,label; a file is a path below its folder, or a unique name."""
    rows = _rows(file)
    labels = {}
    missing = []
    for folder in map(Path, folders):
        paths = list_images([folder])
        names = _unique_names(paths)
        for path in paths:
            key = next((k for k in (path.relative_to(folder).as_posix(), names.get(path)) if k in rows), None)
            if key is None:
                missing.append(path)
            else:
                labels[path] = rows[key]
    if missing:
        total = len(missing) + len(labels)
        raise DataError(f"{file} has no label for {len(missing)} of {total} images, such as {missing[0]}")
    return labels


def _unique_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Bare names, of the files that share theirs with no other."""
    count: dict[str, int] = {}
    for path in paths:
        count[path.name] = count.get(path.name, 0) + 1
    return {path: path.name for path in paths if count[path.name] == 1}


def _rows(file: Path) -> dict[str, int]:
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            lines = [(number, row) for number, row in enumerate(csv.reader(stream), 1) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read as a CSV of file,label: {error}") from error
    name, label = 0, 1
    if lines and {"file", "label"} <= {cell.strip().lower() for cell in lines[0][1]}:
        header = [cell.strip().lower() for cell in lines.pop(0)[1]]
        name, label = header.index("file"), header.index("label")
    if not lines:
        raise DataError(f"{file} holds no labels; it should have lines of file,label")
    return dict(_row(file, number, row, name, label) for number, row in lines)


def _row(file: Path, number: int, row: list[str], name: int, label: int) -> tuple[str, int]:
    try:
        return row[name].strip(), int(row[label])
    except (IndexError, ValueError):
        raise DataError(
            f"{file}, line {number}: {','.join(row)!r} is not file,label with a class index as the label"
        ) from None


class LabelledBatches(Iterable[tuple[Tensor, Tensor]]):
    """Batches (images (B, 3, h, w), labels (B,)); where an image cannot be read its label is left out too."""

    def __init__(self, batches: ImageBatches, labels: Mapping[Path, int]) -> None:
        self.batches, self.labels = batches, labels

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.batches.batch_size
        for _, start, images in self.batches.indexed(lambda _: True):
            # A batch's unreadable files are noted before the batch is given out.
            bad = {path for path, _ in self.batches.bad}
            labels = [self.labels[path] for path in self.batches.paths[start : start + size] if path not in bad]
            yield images, torch.tensor(labels)  # (B,)
