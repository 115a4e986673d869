"""Images with a number per pixel, found by their names: classes (.png, indices or palette) or depths (.npy, .png)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from corp.data.images import Transform, list_images, open_image
from corp.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES, MAPS = "images", ("labels", "annotations", "masks", "depths", "depth")  # folders of one layout
BICUBIC = 3  # Pillow's number of the filter
SUFFIX = "annot"  # of the folder of maps in the other layout: train/ and trainannot/


def find_pairs(folder: str | Path) -> list[tuple[Path, Path]]:
    """(image, map) of every image below `folder`; see `match_maps`. An image without a map is an error."""
    found = match_maps(folder)
    missing = [path for path, target in found if target is None]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(found)} images have no map, such as {missing[0]}: looked for "
            f"{missing[0].stem}.npy and .png beside it, in {IMAGES}/ with {MAPS[0]}/, and in X/ with X{SUFFIX}/"
        )
    return [(path, target) for path, target in found if target is not None]


def match_maps(folder: str | Path) -> list[tuple[Path, Path | None]]:
    """Every image with its map of the same name, or None.

    Maps are in labels/ beside images/, in Xannot/ beside X/, or beside the images themselves.
    """
    root, maps = _layout(Path(folder))
    images = list_images([root])
    if maps == root:  # then x.png is the map of x.jpg, not an image
        others = {path.with_suffix("") for path in images if path.suffix != ".png"}
        images = [path for path in images if path.suffix != ".png" or path.with_suffix("") not in others]
    return [(path, _map_of(path, maps / path.relative_to(root))) for path in images]


def _layout(root: Path) -> tuple[Path, Path]:
    """The folders of the images and of the maps; both are `root` unless the names say otherwise."""
    children = sorted(child for child in root.iterdir() if child.is_dir()) if root.is_dir() else []
    candidates = [
        *((root / IMAGES, root / name) for name in MAPS),
        (root, root.with_name(root.name + SUFFIX)),
        *((child, root / f"{child.name}{SUFFIX}") for child in children),
    ]
    found = [(images, maps) for images, maps in candidates if images.is_dir() and maps.is_dir()]
    if len(found) > 1:
        told = ", ".join(f"{images.name}/ + {maps.name}/" for images, maps in found)
        raise DataError(f"{root} holds more than one set of images and maps ({told}); give the folder of one of them")
    return found[0] if found else (root, root)


def _map_of(image: Path, place: Path) -> Path | None:
    candidates = (place.with_suffix(suffix) for suffix in (".npy", ".png"))
    return next((path for path in candidates if path != image and path.is_file()), None)


def read_target(path: Path) -> Tensor:
    """A map (H, W): numbers of a .npy file, or the values or palette indices of a one-channel .png."""
    from PIL import Image

    try:
        if path.suffix == ".npy":
            content = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped: a false header allocates nothing
        else:
            with Image.open(path) as image:
                content = np.array(image)  # for a palette image, the indices
    except Exception as error:  # numpy parses the header as Python, Pillow raises almost anything
        raise DataError(f"{path} cannot be read as a map of numbers: {error}") from error
    if content.ndim != 2 or content.dtype.kind not in "fiub":
        raise DataError(
            f"{path} holds {content.dtype} {content.shape}; a map has one number per pixel, (height, width)"
        )
    return torch.from_numpy(content.astype(np.float64 if content.dtype.kind == "f" else np.int64))


class WholeImage:
    """Resizes without cropping, and normalises; a crop would show another part of the image than the map."""

    def __init__(self, size: tuple[int, int], mean: Sequence[float], std: Sequence[float]) -> None:
        self.size, self.mean, self.std = tuple(size), tuple(mean), tuple(std)

    def __call__(self, image: Image) -> Tensor:
        height, width = self.size
        resized = image.convert("RGB").resize((width, height), BICUBIC)
        pixels = torch.from_numpy(np.array(resized, dtype=np.float32) / 255).movedim(-1, 0)  # (3, h, w)
        return (pixels - torch.tensor(self.mean)[:, None, None]) / torch.tensor(self.std)[:, None, None]

    def __str__(self) -> str:
        return f"whole image, bicubic to {self.size}, mean {self.mean}, std {self.std}"


class DensePairs(Iterable[tuple[Tensor, Tensor]]):
    """Batches (images (B, 3, h, w), maps (B, H, W)); maps of different sizes are in different batches.

    Depths are divided by `scale`, the units per metre: 1000 for millimetres.
    """

    def __init__(
        self, pairs: Sequence[tuple[Path, Path]], transform: Transform, *, batch_size: int = 16, scale: float = 1.0
    ) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size}: must be at least 1")
        if not 0 < scale < float("inf"):
            raise DataError(f"scale={scale}: depths are divided by it, so it must be above 0")
        self.pairs, self.transform, self.batch_size, self.scale = list(pairs), transform, batch_size, scale

    @property
    def samples(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _, alike in groupby((self._pair(*pair) for pair in self.pairs), key=lambda pair: pair[1].shape):
            while batch := list(islice(alike, self.batch_size)):
                images, targets = zip(*batch, strict=True)
                yield torch.stack(images), torch.stack(targets)

    def _pair(self, path: Path, place: Path) -> tuple[Tensor, Tensor]:
        try:
            image = open_image(path)
            made = self.transform(image)
        except Exception as error:  # Pillow raises almost anything on damaged files
            raise DataError(f"{path} cannot be decoded: {error}") from error
        target = read_target(place)
        if tuple(target.shape) != (image.height, image.width):
            raise DataError(
                f"{place} is {target.shape[1]} x {target.shape[0]}, but its image is {image.width} x "
                f"{image.height}; resize the map to its image (classes by nearest neighbour)"
            )
        return made, target if self.scale == 1 else target / self.scale
