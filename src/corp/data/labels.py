"""Class indices of image files: from sub-folders, from ImageNet synset ids, or from a CSV file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from corp.data.images import ImageBatches, list_images
from corp.data.tables import read_columns
from corp.errors import DataError

SYNSET = re.compile(r"(n\d{8})(?![0-9A-Za-z])")  # n01440764, n01440764_10026.JPEG


def find_labels(folders: Sequence[Path], classes: int | None) -> dict[Path, int] | None:
    """Class index of every image, by the order of the class names; None if the names do not indicate classes.

    Sorted names match the model's classes only if all are present: `classes` (None: unknown) is their number.
    """
    names = {path: _class_name(path, Path(folder)) for folder in folders for path in list_images([folder])}
    known = sorted({name or "" for name in names.values()})
    if not all(known):
        return None
    if classes is not None and len(known) != classes:
        if all(SYNSET.fullmatch(name) for name in known):
            raise DataError(
                f"the images have {len(known)} synset ids, but the model has {classes} classes, so their order "
                "does not give the classes; pass labels=FILE.csv with lines of file,label, or labels=none"
            )
        return None
    index = {name: number for number, name in enumerate(known)}
    return {path: index[name or ""] for path, name in names.items()}


def _class_name(path: Path, root: Path) -> str | None:
    """The first sub-folder below the root, otherwise the synset id at the start of the file name."""
    parts = path.relative_to(root).parts
    if len(parts) > 1:
        return parts[0]
    match = SYNSET.match(path.name)
    return match[1] if match else None


def read_labels(file: Path, folders: Sequence[Path], classes: int | None = None) -> dict[Path, int]:
    """Class index of every image, from a CSV of file,label; a file is a path below its folder, or a unique name.

    A label that is not below `classes` (None: unknown) is refused.
    """
    rows = _rows(file)
    labels: dict[Path, int | None] = {}
    for folder in map(Path, folders):
        paths = list_images([folder])
        count = Counter(path.name for path in paths)
        for path in paths:
            bare = rows.get(path.name) if count[path.name] == 1 else None
            labels[path] = rows.get(path.relative_to(folder).as_posix(), bare)
    missing = [path for path, label in labels.items() if label is None]
    if missing:
        raise DataError(f"{file} has no label for {len(missing)} of {len(labels)} images, such as {missing[0]}")
    found = {path: label for path, label in labels.items() if label is not None}
    _require_classes(file, found, classes)
    return found


def _require_classes(file: Path, labels: Mapping[Path, int], classes: int | None) -> None:
    odd = [path for path, label in labels.items() if label < 0 or (classes is not None and label >= classes)]
    if not odd:
        return
    numbers = set(labels.values())
    hint = "; labels count from 0, and these seem to count from 1" if min(numbers) == 1 and classes in numbers else ""
    there = "labels count from 0" if classes is None else f"the model has classes 0 to {classes - 1}"
    raise DataError(
        f"{file}: {odd[0].name} has the label {labels[odd[0]]}, but {there}{hint} ({len(odd)} of {len(labels)} images)"
    )


def _rows(file: Path) -> dict[str, int]:
    (name, label), rows = read_columns(file, ("file", "label"), (0, 1))
    found = {}
    for line, row in rows:
        try:
            found[row[name].strip()] = int(row[label])
        except (IndexError, ValueError):
            raise DataError(
                f"{file}, line {line}: {','.join(row)!r} is not file,label with a class index as the label"
            ) from None
    if not found:
        raise DataError(f"{file} holds no labels; it should have lines of file,label")
    return found


class LabelledBatches(Iterable[tuple[Tensor, Tensor]]):
    """Batches (images (B, 3, h, w), labels (B,)); the label of an unreadable image is left out too."""

    def __init__(self, batches: ImageBatches, labels: Mapping[Path, int]) -> None:
        self.batches, self.labels = batches, labels

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.batches.batch_size
        for _, start, images in self.batches.indexed(lambda _: True):
            # A batch's unreadable files are recorded before the batch is returned.
            bad = {path for path, _ in self.batches.bad}
            labels = [self.labels[path] for path in self.batches.paths[start : start + size] if path not in bad]
            yield images, torch.tensor(labels)  # (B,)
