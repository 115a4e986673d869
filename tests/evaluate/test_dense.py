"""Scores of maps against loops over pixels, their intervals against the jackknife, and files of images with maps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import corp
from corp.data.dense import DensePairs, WholeImage, find_pairs, match_maps, read_target
from corp.errors import CorpWarning
from corp.evaluate.dense import Depth, MapMetric, MapScore, Segmentation
from tests.helpers.maps import scored
from tests.helpers.seeds import seed, seeded

PLAIN = WholeImage((4, 4), (0.0,) * 3, (1.0,) * 3)


def values(metric: MapMetric) -> dict[str, float]:
    return {name: estimate.value for name, estimate in metric.estimates().items()}


def test_depth_equals_a_loop_over_pixels() -> None:
    prediction = torch.rand(3, 1, 4, 5) * 3 - 0.3  # some below zero
    target = torch.rand(3, 4, 5) * 3
    target[0, 0, 0], target[1, 2, 3], target[2, 1, 1] = 0.0, -1.0, float("nan")  # no depth there
    metric = Depth()
    metric.add(prediction[:1], target[:1])
    metric.add(prediction[1:], target[1:])
    pairs = [(p, t) for p, t in zip(prediction.flatten().tolist(), target.flatten().tolist(), strict=True) if t > 0]
    assert len(pairs) == 57
    near = [[p > 0 and max(p / t, t / p) < 1.25**k for p, t in pairs] for k in (1, 2, 3)]
    expected = {
        "rmse": np.mean([(p - t) ** 2 for p, t in pairs]) ** 0.5,
        "abs_rel": np.mean([abs(p - t) / t for p, t in pairs]),
        **{f"delta{k}": np.mean(hits) for k, hits in enumerate(near, 1)},
    }
    assert values(metric) == pytest.approx(expected, rel=1e-5)


def test_miou_equals_sets_of_pixels() -> None:
    logits, target = torch.randn(3, 5, 6, 6), torch.randint(0, 4, (3, 6, 6))
    logits[:, 4] = -9  # class 4 is neither there nor predicted
    target[0, :2] = 255
    metric = Segmentation(5)
    metric.add(logits[:2], target[:2])
    metric.add(logits[2:], target[2:])
    counted = [i for i, t in enumerate(target.flatten().tolist()) if t != 255]
    predicted, truth = logits.argmax(1).flatten().tolist(), target.flatten().tolist()
    ratios = []
    for k in range(4):
        there, found = ({i for i in counted if labels[i] == k} for labels in (truth, predicted))
        ratios.append(len(there & found) / len(there | found))
    right = np.mean([predicted[i] == truth[i] for i in counted])
    assert values(metric) == pytest.approx({"miou": np.mean(ratios), "pixel_accuracy": right})


def test_one_channel_separates_foreground_from_background() -> None:
    logits, target = torch.tensor([[[[2.0, -1.0, 0.5, -3.0]]]]), torch.tensor([[[1, 1, 0, 0]]])
    metric = Segmentation(1)
    metric.add(logits, target)
    assert values(metric) == pytest.approx({"miou": 1 / 3, "pixel_accuracy": 0.5})


def jackknife(metric: Depth | Segmentation, name: str) -> float:
    """The standard error from leaving out one image after the other."""
    rows, found = metric.rows, []
    for i in range(len(rows)):
        metric.rows = rows[:i] + rows[i + 1 :]
        found.append(metric.estimates()[name].value)
    metric.rows = rows
    return float(np.sqrt((len(found) - 1) * np.var(found)))


def test_intervals_over_images_agree_with_the_jackknife() -> None:
    n, generator = 60, seeded(3)
    hard = torch.rand(n, 1, 1, 1, generator=generator)  # images differ in how hard they are
    target = torch.randint(0, 3, (n, 8, 8), generator=generator)
    logits = nn.functional.one_hot(target, 3).movedim(-1, 1) + 2 * hard * torch.randn(n, 3, 8, 8, generator=generator)
    depth = torch.rand(n, 8, 8, generator=generator) + 1
    guess = depth[:, None] + hard * torch.randn(n, 1, 8, 8, generator=generator)
    segmentation, depths = Segmentation(3), Depth()
    segmentation.add(logits, target)
    depths.add(guess, depth)
    for metric in (segmentation, depths):
        for name, estimate in metric.estimates().items():
            value, low, high = estimate.interval()
            assert low is not None
            assert high is not None
            assert (high - low) / 2 == pytest.approx(1.96 * jackknife(metric, name), rel=0.05), name
            assert (low + high) / 2 == pytest.approx(value)


def test_a_difference_has_a_narrower_interval_where_both_find_the_same_images_hard() -> None:
    target = torch.randint(0, 2, (40, 6, 6))
    noise = torch.randn(40, 2, 6, 6) * torch.linspace(0, 2, 40)[:, None, None, None]
    logits = nn.functional.one_hot(target, 2).movedim(-1, 1) + noise
    first, second = Segmentation(2), Segmentation(2)
    first.add(logits, target)
    second.add(logits + 0.1 * torch.randn_like(logits), target)
    a, b = first.estimates()["miou"], second.estimates()["miou"]
    low, high = (b - a).interval()[1:]
    assert low is not None
    assert high is not None
    assert (b - a).value == pytest.approx(b.value - a.value)
    assert high - low < 0.5 * (b.interval().high - b.interval().low)  # type: ignore[operator]


def test_one_image_has_no_interval() -> None:
    metric = Segmentation(2)
    metric.add(torch.randn(1, 2, 3, 3), torch.zeros(1, 3, 3))
    assert metric.estimates()["miou"].interval()[1:] == (None, None)


def test_scores_against_labels_and_against_the_dense_maps() -> None:
    dense, other, labels = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 8, 8))
    score = MapScore("segmentation", ignore=0)
    score.add(other, dense, labels)
    assert score.truth is not None
    assert score.likeness is not None
    same = (dense.argmax(1) == other.argmax(1)).double().mean()
    assert values(score.likeness)["pixel_accuracy"] == pytest.approx(float(same))  # class 0 of a model is a class
    itself = MapScore("depth")
    itself.add(dense[:, :1], dense[:, :1], None)
    assert itself.truth is None
    with pytest.raises(corp.CorpError, match="differ from the dense"):
        MapScore("depth").add(dense[:, :1], dense)


def test_odd_targets_and_heads_are_errors() -> None:
    with pytest.raises(corp.CorpError, match="label 7 is neither one of the 3 classes"):
        Segmentation(3).add(torch.zeros(1, 3, 2, 2), torch.full((1, 2, 2), 7))
    with pytest.raises(corp.CorpError, match="head gives 4 classes, but 3 were expected"):
        Segmentation(3).add(torch.zeros(1, 4, 2, 2), torch.zeros(1, 2, 2))
    with pytest.raises(corp.CorpError, match="one channel, but this one has 2"):
        Depth().add(torch.zeros(1, 2, 2, 2), torch.ones(1, 2, 2))
    with pytest.raises(corp.CorpError, match="not finite"):
        Depth().add(torch.full((1, 1, 2, 2), math.inf), torch.ones(1, 2, 2))
    with pytest.raises(corp.CorpError, match="no pixel has a depth"):
        Depth().estimates()
    with pytest.raises(corp.CorpError, match="no pixel has a label"):
        Segmentation(3).estimates()
    with pytest.raises(corp.CorpError, match="at least one class"):
        Segmentation(0)


def test_millimetres_in_place_of_metres_are_pointed_out() -> None:
    metric = Depth()
    metric.add(torch.full((2, 1, 3, 3), 2.5), torch.full((2, 3, 3), 2500.0))
    with pytest.warns(CorpWarning, match="median depth is 2500 in the maps and 2.5 in the predictions"):
        metric.estimates()


def test_classes_in_place_of_depths_are_pointed_out() -> None:
    metric = Depth()
    labels = torch.arange(18.0).view(2, 3, 3) + 1
    metric.add(torch.full((2, 1, 3, 3), 2.5), labels)
    with pytest.warns(CorpWarning, match=r"at most 64 whole numbers: maps of classes are for the task 'segmentation'"):
        metric.estimates()


def test_one_image_of_measured_depths_is_enough_to_tell_them_from_classes() -> None:
    metric = Depth()
    depths = torch.arange(18.0).view(2, 3, 3) + 1
    depths[1, 1, 1] = 4.25
    metric.add(torch.full((2, 1, 3, 3), 2.5), depths)
    metric.estimates()  # a warning would be an error


def paint(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


@pytest.mark.parametrize("layout", ["beside", "images and labels", "annot", "parent of annot"])
def test_maps_are_found_by_name_in_every_layout(tmp_path: Path, layout: str) -> None:
    root = tmp_path / "data"
    images, maps = {
        "beside": (root, root),
        "images and labels": (root / "images", root / "labels"),
        "annot": (root, tmp_path / "dataannot"),
        "parent of annot": (root / "train", root / "trainannot"),
    }[layout]
    for i in range(3):
        pixels = np.random.default_rng(seed(i)).integers(30, 255, (4, 4, 3))
        paint(images / "a" / f"{i}.bmp", pixels)
        (maps / "a").mkdir(parents=True, exist_ok=True)
        np.save(maps / "a" / f"{i}.npy", pixels[..., 0].astype(np.float32) / 255)
    paint(maps / "a" / "2.png", np.zeros((4, 4)))  # .npy comes first
    pairs = find_pairs(root)
    assert [(image.name, target.name) for image, target in pairs] == [(f"{i}.bmp", f"{i}.npy") for i in range(3)]
    red = nn.Conv2d(3, 1, 1, bias=False)
    red.weight.data.copy_(torch.tensor([1.0, 0.0, 0.0])[None, :, None, None])  # knows the answer: the red channel
    loaded = DensePairs(pairs, PLAIN, batch_size=2)
    assert [len(x) for x, _ in loaded] == [2, 1]
    assert values(scored(red, loaded, "depth")) == pytest.approx(
        {"rmse": 0, "abs_rel": 0, "delta1": 1, "delta2": 1, "delta3": 1}, abs=1e-6
    )


def test_several_sets_in_one_folder_must_be_told_apart(tmp_path: Path) -> None:
    for name in ("train", "trainannot", "test", "testannot"):
        paint(tmp_path / name / "0.png", np.zeros((4, 4)))
    with pytest.raises(corp.CorpError, match="more than one set of images and maps"):
        find_pairs(tmp_path)
    assert len(find_pairs(tmp_path / "test")) == 1


def test_palette_maps_are_indices_and_depths_are_scaled(tmp_path: Path) -> None:
    indices = Image.fromarray(np.array([[0, 1], [2, 1]], dtype=np.uint8), mode="P")
    indices.putpalette([10, 20, 30, 200, 100, 0, 5, 5, 5])
    indices.save(tmp_path / "p.png")
    assert read_target(tmp_path / "p.png").tolist() == [[0, 1], [2, 1]]
    paint(tmp_path / "x.jpg", np.zeros((2, 2, 3)))
    Image.fromarray(np.array([[1500, 0], [65000, 250]], dtype=np.uint16)).save(tmp_path / "x.png")
    ((_, depth),) = DensePairs([(tmp_path / "x.jpg", tmp_path / "x.png")], PLAIN, scale=1000.0)
    assert depth.tolist() == [[[1.5, 0.0], [65.0, 0.25]]]


def test_label_maps_keep_their_size_and_predictions_are_resized(tmp_path: Path) -> None:
    for i, size in enumerate([(4, 4), (8, 8)]):
        paint(tmp_path / f"{i}.jpg", np.full((*size, 3), 255))
        labels = np.ones(size)
        labels[0, 0] = 255
        paint(tmp_path / f"{i}.png", labels)
    loaded = DensePairs(find_pairs(tmp_path), PLAIN)
    assert [tuple(target.shape) for _, target in loaded] == [(1, 4, 4), (1, 8, 8)]
    head = nn.Conv2d(3, 2, 1)
    head.weight.data.zero_()
    head.bias.data.copy_(torch.tensor([0.0, 1.0]))  # always says class 1
    metric = scored(head, loaded, "segmentation")
    assert values(metric) == {"miou": 1.0, "pixel_accuracy": 1.0}
    assert int(sum(row[2].sum() for row in metric.rows)) == 15 + 63


def test_missing_and_odd_maps_are_errors(tmp_path: Path) -> None:
    paint(tmp_path / "x.jpg", np.zeros((4, 4, 3)))
    assert match_maps(tmp_path) == [(tmp_path / "x.jpg", None)]
    with pytest.raises(corp.CorpError, match="1 of 1 images have no map"):
        find_pairs(tmp_path)
    paint(tmp_path / "x.png", np.zeros((4, 4, 3)))
    with pytest.raises(corp.CorpError, match="one number per pixel"):
        read_target(tmp_path / "x.png")
    (tmp_path / "x.npy").write_text("no array")
    with pytest.raises(corp.CorpError, match="cannot be read as a map"):
        read_target(tmp_path / "x.npy")
    np.save(tmp_path / "x.npy", np.ones((4, 5)))
    with pytest.raises(corp.CorpError, match="is 5 x 4, but its image is 4 x 4"):
        list(DensePairs(find_pairs(tmp_path), PLAIN))
    (tmp_path / "x.jpg").write_text("no image")
    with pytest.raises(corp.CorpError, match="cannot be decoded"):
        list(DensePairs(find_pairs(tmp_path), PLAIN))
    for odd in ({"batch_size": 0}, {"scale": 0.0}):
        with pytest.raises(corp.CorpError, match="must be"):
            DensePairs([], PLAIN, **odd)  # type: ignore[arg-type]


def test_the_whole_image_is_resized_not_cropped() -> None:
    pixels = np.zeros((10, 20, 3), dtype=np.uint8)
    pixels[:, -2:] = 255  # the right edge
    made: Tensor = WholeImage((5, 10), (0.5,) * 3, (0.5,) * 3)(Image.fromarray(pixels))
    assert made.shape == (3, 5, 10)
    assert float(made[:, :, -1].min()) > 0.5
    assert float(made[:, :, 0].max()) == -1.0
