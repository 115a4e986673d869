"""Images with a target per pixel: `x.jpg` and `x.npy` (depth) or `x.png` (classes), beside it or in a second folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from corp.data.images import Transform, list_images, open_image
from corp.errors import DataError


def find_pairs(folder: str | Path, targets: str | Path | None = None) -> list[tuple[Path, Path]]:
    """(image, target) of every image below `folder`; targets lie beside the images or, same paths, below `targets`."""
    root, images = Path(folder), list_images([folder])
    if targets is None:  # then x.png is the target of x.jpg, not an image
        others = {path.with_suffix("") for path in images if path.suffix != ".png"}
        images = [path for path in images if path.suffix != ".png" or path.with_suffix("") not in others]
    base = root if targets is None else Path(targets)
    found = [(path, _target(path, base / path.relative_to(root))) for path in images]
    missing = [path for path, target in found if target is None]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(found)} images have no target, such as {missing[0]}: "
            f"looked for {missing[0].stem}.npy and {missing[0].stem}.png below {base}"
        )
    return [(path, target) for path, target in found if target is not None]


def _target(image: Path, place: Path) -> Path | None:
    candidates = (place.with_suffix(suffix) for suffix in (".npy", ".png"))
    return next((path for path in candidates if path != image and path.is_file()), None)


def read_target(path: Path) -> Tensor:
    """A map (H, W): numbers of a .npy file, or class indices of a one-channel .png."""
    try:
        if path.suffix == ".npy":
            content = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped: a lying header allocates nothing
        else:
            with Image.open(path) as image:
                content = np.array(image)  # of a palette image the indices
    except Exception as error:  # numpy parses the header as Python, Pillow raises almost anything
        raise DataError(f"{path} cannot be read as a map of numbers: {error}") from error
    if content.ndim != 2 or content.dtype.kind not in "fiub":
        raise DataError(
            f"{path} holds {content.dtype} {content.shape}; a target is one number per pixel, (height, width)"
        )
    return torch.from_numpy(content.astype(np.float64 if content.dtype.kind == "f" else np.int64))


def whole_image(size: tuple[int, int], mean: Sequence[float], std: Sequence[float]) -> Transform:
    """Resize without cropping, and normalise: a crop would show the model another view than the target's."""

    def transform(image: Image.Image) -> Tensor:
        resized = image.resize((size[1], size[0]), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(resized, dtype=np.float32) / 255).movedim(-1, 0)  # (3, h, w)
        return (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]

    return transform


class DensePairs(Iterable[tuple[Tensor, Tensor]]):
    """Batches (images (B, 3, h, w), targets (B, H, W)); neighbours whose targets differ in size go apart."""

    def __init__(self, pairs: Sequence[tuple[Path, Path]], transform: Transform, *, batch_size: int = 16) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size}: must be at least 1")
        self.pairs, self.transform, self.batch_size = list(pairs), transform, batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        read = ((self._image(image), read_target(target)) for image, target in self.pairs)
        for _, alike in groupby(read, key=lambda pair: pair[1].shape):
            while batch := list(islice(alike, self.batch_size)):
                images, targets = zip(*batch, strict=True)
                yield torch.stack(images), torch.stack(targets)

    def _image(self, path: Path) -> Tensor:
        try:
            return self.transform(open_image(path))
        except Exception as error:  # Pillow raises almost anything on damaged files
            raise DataError(f"{path} cannot be decoded: {error}") from error
