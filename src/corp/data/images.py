"""Batches of tensors from folders of images, decoded ahead of the model by a few threads."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from corp.data.files import files_below
from corp.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm"})
THREADS = 2  # threads that decode ahead of the model
MOST_PIXELS = 2**27  # 400 MB in RGB; no camera has more, but a file of a few bytes may claim it
Transform: TypeAlias = "Callable[[Image.Image], Tensor]"


def list_images(folders: Sequence[str | Path]) -> list[Path]:
    """All image files under the folders, at any depth, sorted within each folder."""
    found: list[Path] = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder of images")
        found += files_below(folder, SUFFIXES, "images")
    return found


def choose(paths: Sequence[Path], samples: int | None, seed: int) -> list[Path]:
    """`samples` random paths, drawn by `seed`, in their order; all of them if there are fewer."""
    if samples is None or samples >= len(paths):
        return list(paths)
    if samples < 1:
        raise DataError(f"samples={samples}: at least one image is needed")
    return [paths[i] for i in sorted(random.Random(seed).sample(range(len(paths)), samples))]


def open_image(path: Path) -> Image.Image:
    """The image in RGB; it is not decoded if its header claims more pixels than any photograph has."""
    from PIL import Image  # texts do not need it

    with Image.open(path) as image:
        if image.width * image.height > MOST_PIXELS:
            raise DataError(f"{image.width} x {image.height} pixels are more than the limit of {MOST_PIXELS}")
        return image.convert("RGB")


class ImageBatches(Iterable[Tensor]):
    """Batches (B, 3, h, w) of the images at `paths`.

    Files that cannot be decoded are skipped and listed in `bad`; a share above `max_bad` is an error.
    """

    def __init__(
        self, paths: Sequence[Path], transform: Transform, *, batch_size: int = 32, max_bad: float = 0.05
    ) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size}: must be at least 1")
        if not 0 <= max_bad <= 1:
            raise DataError(f"max_bad={max_bad}: must be a share between 0 and 1")
        self.paths, self.transform, self.batch_size = list(paths), transform, batch_size
        self.max_bad = max_bad
        self.bad: list[tuple[Path, str]] = []

    @property
    def samples(self) -> int:
        """The number of images, including unreadable ones."""
        return len(self.paths)

    def fingerprint(self) -> str:
        """A hash of the names and sizes of the files, in order: equal for equal data."""
        digest = hashlib.blake2b(digest_size=16)
        for path in self.paths:
            digest.update(f"{path.name}\0{path.stat().st_size}\n".encode())
        return digest.hexdigest()

    def parts(self, sizes: Sequence[int], seed: int) -> list[ImageBatches]:
        """Disjoint parts of these images in an order drawn by `seed`; the first k together are sizes[k - 1] images."""
        order = random.Random(seed).sample(self.paths, len(self.paths))
        allowed = self.max_bad * len(order)  # of all images, so that one bad image in a small part is no error
        return [
            ImageBatches(order[a:b], self.transform, batch_size=self.batch_size, max_bad=min(1.0, allowed / (b - a)))
            for a, b in pairwise((0, *sizes))
        ]

    def describe(self) -> str:
        """The preprocessing, on one line."""
        return " ".join(str(self.transform).split())

    def __iter__(self) -> Iterator[Tensor]:
        return (batch for _, _, batch in self.indexed(lambda _: True))

    def indexed(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, int, Tensor]]:
        """(index, index of its first image, batch) of the wanted batches; the others are not decoded.

        A batch is a fixed slice of the paths without the unreadable ones, the same for every worker and run.
        """
        self.bad = []
        starts = range(0, len(self.paths), self.batch_size)
        indices = [index for index in range(len(starts)) if wanted(index)]
        seen = 0
        for index, images in zip(indices, self._decoded([starts[i] for i in indices]), strict=True):
            seen += len(images)
            if images:
                yield index, starts[index], torch.stack(images)
        if indices and seen == 0:
            raise DataError(f"none of the {len(self.bad)} images can be decoded; the first: {self._first_bad()}")

    def _decoded(self, starts: list[int]) -> Iterator[list[Tensor]]:
        """The readable images of the batches at `starts`, in order, decoded up to two batches ahead."""
        waiting: deque[list[tuple[Path, Future[Tensor | str]]]] = deque()
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="corp-decode")
        try:
            for start in starts:
                paths = self.paths[start : start + self.batch_size]
                waiting.append([(path, pool.submit(self._decode, path)) for path in paths])
                if len(waiting) > 2:
                    yield self._readable(waiting.popleft())
            while waiting:
                yield self._readable(waiting.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _readable(self, batch: list[tuple[Path, Future[Tensor | str]]]) -> list[Tensor]:
        images = [(path, future.result()) for path, future in batch]
        self.bad += [(path, image) for path, image in images if isinstance(image, str)]
        if len(self.bad) > self.max_bad * len(self.paths):
            raise DataError(
                f"{len(self.bad)} of {len(self.paths)} images cannot be decoded, more than the allowed "
                f"{self.max_bad:.0%}; the first: {self._first_bad()}"
            )
        return [image for _, image in images if isinstance(image, Tensor)]

    def _first_bad(self) -> str:
        return "{} ({})".format(*self.bad[0])

    def _decode(self, path: Path) -> Tensor | str:
        """The transformed image, or why there is none."""
        try:
            return self.transform(open_image(path))
        # Pillow raises almost anything on damaged files; in any case the file is named and counted.
        except Exception as error:
            return f"{type(error).__name__}: {error}"
