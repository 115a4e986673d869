"""A frozen backbone under a head of your own: fit the head once on the dense backbone, then prune the backbone.

Two linear heads on patch tokens, fitted in closed form to features of the dense backbone and judged on other images
with the dense backbone and with pruned ones. Nothing has to be downloaded, because the targets come with the images:

- 'depth' is a function of a patch's brightness. Such a plain property survives pruning: here it is read from pruned
  features a little better than from dense ones;
- 'segmentation' says what a patch belongs to (which digit, or blank; an animal or a thing), which takes the whole
  network, and is what pruning costs.

python examples/frozen_head.py                 # the built-in model of handwritten digits
CORP_ASSETS=... python examples/frozen_head.py # DeiT-Tiny and photographs, from the vision/ folder in there
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import corp
from corp.data import digits
from corp.evaluate.dense import MapScore
from corp.evaluate.heads import HeadInfo, WithHead
from corp.evaluate.probe import fit_head
from corp.evaluate.run import judged

ANIMALS_BELOW = 2_600_000  # WordNet numbers people and animals before things


class Examples(NamedTuple):
    """Images (N, channels, H, W) with a depth and a class for every patch, both (N, h, w)."""

    images: Tensor
    depth: Tensor
    classes: Tensor


def examples(images: Tensor, labels: Tensor, patch: int, blank: int | None = None) -> Examples:
    light = nn.functional.avg_pool2d(images.mean(1), patch)  # (N, h, w)
    classes = labels[:, None, None].expand_as(light)
    if blank is not None:
        classes = classes.where(light > light.min(), blank)
    return Examples(images, (light / 2).exp(), classes)


def handwritten_digits() -> tuple[nn.Module, Tensor, Examples, Examples]:
    """The backbone, images to calibrate it with, and examples to fit the heads on and to judge them by."""
    data = digits.load_split()
    fit = examples(data.train_images, data.train_labels, 2, blank=10)
    return digits.load_model(), data.train_images, fit, examples(data.test_images, data.test_labels, 2, blank=10)


def photographs(vision: Path) -> tuple[nn.Module, Tensor, Examples, Examples]:
    from corp.adapters import timm_models
    from corp.data.images import ImageBatches, choose, list_images

    model = timm_models.create("deit_tiny_patch16_224", vision / "deit_tiny_patch16_224.safetensors")
    paths = choose(list_images([vision / "calibration"]), 240, seed=0)
    images = torch.cat(list(ImageBatches(paths, timm_models.preprocessing(model), max_bad=0)))
    labels = torch.tensor([int(path.name[1:9]) > ANIMALS_BELOW for path in paths]).long()
    # The files are sorted by what they show, so every third image goes to each purpose.
    fit, held_out = examples(images[1::3], labels[1::3], 16), examples(images[2::3], labels[2::3], 16)
    return model, images[::3], fit, held_out


def main() -> None:
    assets = os.environ.get("CORP_ASSETS")
    dense, calibration, fit, held_out = photographs(Path(assets) / "vision") if assets else handwritten_digits()
    classes = int(fit.classes.max()) + 1
    images, depths, labels = (tensor.split(32) for tensor in fit)
    depth_head = fit_head(dense, list(zip(images, depths, strict=True)), HeadInfo("depth")).head
    class_head = fit_head(dense, list(zip(images, labels, strict=True)), HeadInfo(), classes=classes).head

    stats = corp.calibrate(dense, calibration.split(32))
    backbones = {"dense": dense}
    for share in (0.3, 0.5):
        plan = corp.plan(
            dense, stats, corp.Recipe.paper(mlp=share)
        )  # attn=share too; on DeiT that takes half a minute more
        result = corp.apply(dense, stats, plan)
        backbones[f"MLPs - {share:.0%}"] = result.model
    print(result.report, "\n")

    images, depths, labels = (tensor.split(32) for tensor in held_out)
    models = [WithHead(backbone, depth_head) for backbone in backbones.values()]
    depth_scores = judged(models, lambda: MapScore("depth"), zip(images, depths, strict=True))
    models = [WithHead(backbone, class_head) for backbone in backbones.values()]
    class_scores = judged(models, lambda: MapScore("segmentation"), zip(images, labels, strict=True))
    print("backbone        RMSE  delta1    mIoU")
    for name, of_depth, of_classes in zip(backbones, depth_scores, class_scores, strict=True):
        depth, regions = of_depth.truth.estimates(), of_classes.truth.estimates()
        numbers = (depth["rmse"].value, depth["delta1"].value, regions["miou"].value)
        print(f"{name:12}  " + "  ".join(f"{number:6.3f}" for number in numbers))


if __name__ == "__main__":
    main()
