"""A frozen backbone under a head of your own: fit the head once on the dense backbone, then prune the backbone.

Two linear heads on patch tokens, fitted by least squares to features of the dense backbone and judged on other images
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
from corp.evaluate.dense import Depth, Segmentation, evaluate_head, patch_map

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


def linear_head(features: Tensor, targets: Tensor) -> nn.Conv2d:
    """The least-squares map from features (N, C, h, w) to targets (N, h, w, K), as a 1 x 1 convolution."""
    x = features.movedim(1, -1).flatten(0, 2).double()  # (tokens, C)
    x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    weights = torch.linalg.lstsq(x, targets.flatten(0, 2).double()).solution  # (C + 1, K)
    head = nn.Conv2d(features.shape[1], targets.shape[-1], 1)
    with torch.no_grad():
        head.weight.copy_(weights[:-1].mT[..., None, None])
        head.bias.copy_(weights[-1])
    return head


def main() -> None:
    assets = os.environ.get("CORP_ASSETS")
    dense, calibration, fit, held_out = photographs(Path(assets) / "vision") if assets else handwritten_digits()
    with torch.no_grad():
        features = torch.cat([patch_map(dense, batch) for batch in fit.images.split(32)])
    classes = int(fit.classes.max()) + 1
    depth_head = linear_head(features, fit.depth[..., None])
    class_head = linear_head(features, nn.functional.one_hot(fit.classes, classes))

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
    print("backbone        RMSE  delta1    mIoU")
    for name, backbone in backbones.items():
        depth = evaluate_head(backbone, depth_head, zip(images, depths, strict=True), Depth()).result()
        regions = evaluate_head(backbone, class_head, zip(images, labels, strict=True), Segmentation(classes)).result()
        print(f"{name:12}  {depth['rmse']:6.3f}  {depth['delta1']:6.3f}  {regions['miou']:6.3f}")


if __name__ == "__main__":
    main()
