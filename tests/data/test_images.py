"""A folder of images into batches: order, choice, damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from corp import CorpError
from corp.data.images import ImageBatches, choose, list_images


def to_tensor(image: Image.Image) -> Tensor:
    return torch.tensor(image.getpixel((0, 0)), dtype=torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(10):
        path = tmp_path / ("deep/er" if i % 2 else "a") / f"{i:02}.{'png' if i % 3 else 'JPG'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (i, 0, 0)).save(path, "PNG")
    (tmp_path / "notes.txt").write_text("not an image")
    return tmp_path


def test_all_images_any_nesting_in_sorted_order(folder: Path) -> None:
    paths = list_images([folder])
    assert len(paths) == 10
    assert paths == sorted(paths)
    batches = list(ImageBatches(paths, to_tensor, batch_size=4))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert torch.cat(batches)[:, 0].tolist() == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]


def test_choice_is_drawn_by_seed_and_keeps_the_order(folder: Path) -> None:
    paths = list_images([folder])
    assert choose(paths, 4, seed=0) == choose(paths, 4, seed=0)
    assert choose(paths, 4, seed=0) != choose(paths, 4, seed=1)
    assert choose(paths, 4, seed=0) == sorted(choose(paths, 4, seed=0))
    assert choose(paths, 99, seed=0) == paths


def test_several_folders_are_taken_together(folder: Path) -> None:
    assert len(list_images([folder / "a", folder / "deep"])) == 10


def test_damaged_files_are_named_counted_and_skipped(folder: Path) -> None:
    (folder / "a" / "00.JPG").write_bytes(b"\x89PNG\r\n truncated")
    batches = ImageBatches(list_images([folder]), to_tensor, batch_size=4, max_bad=0.1)
    assert sum(len(batch) for batch in batches) == 9
    assert [path.name for path, _ in batches.bad] == ["00.JPG"]


def test_too_many_damaged_files_are_an_error(folder: Path) -> None:
    for name in ("a/00.JPG", "deep/er/01.png"):
        (folder / name).write_text("no image")
    with pytest.raises(CorpError, match=r"2 of 10 images cannot be decoded, more than the allowed 10%.*00\.JPG"):
        list(ImageBatches(list_images([folder]), to_tensor, max_bad=0.1))


def test_folders_without_images_say_so(tmp_path: Path) -> None:
    with pytest.raises(CorpError, match="no images in"):
        list_images([tmp_path])
    with pytest.raises(CorpError, match="not a folder of images"):
        list_images([tmp_path / "nothing"])


def test_stopping_early_stops_the_decoding(folder: Path) -> None:
    batches = iter(ImageBatches(list_images([folder]), to_tensor, batch_size=1))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
