"""A frozen backbone under the user's own head: depth and segmentation, per pixel, in streaming sums."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from corp.calibration.batches import evaluating, move
from corp.errors import DataError, ModelError

DELTA = 1.25  # depth within this factor of the truth counts as right
IGNORE = 255  # pixels that nobody labelled, by the convention of PASCAL VOC and Cityscapes


class DenseMetric(Protocol):
    """Sums over pixels."""

    def add(self, prediction: Tensor, target: Tensor) -> None:
        """The head's output (B, K, H, W) and the target (B, H, W)."""

    def result(self) -> dict[str, float]:
        """The numbers, over all pixels so far."""


class Depth:
    """RMSE and delta1: the share of pixels with max(p/t, t/p) < 1.25. Targets <= 0 or not finite are not counted."""

    def __init__(self) -> None:
        self.pixels, self.squares, self.near = 0, 0.0, 0

    def add(self, prediction: Tensor, target: Tensor) -> None:
        if prediction.shape[1] != 1:
            raise ModelError(f"a depth head has one channel, this one {prediction.shape[1]}")
        p, t = prediction[:, 0].cpu().double(), target.cpu().double()  # (B, H, W)
        valid = torch.isfinite(t) & (t > 0)
        p, t = p[valid], t[valid]  # (pixels,)
        if not bool(torch.isfinite(p).all()):
            raise ModelError(f"{int((~torch.isfinite(p)).sum())} of {len(p)} predicted depths are not finite")
        self.pixels += len(t)
        self.squares += float((p - t).square().sum())
        # Both ratios below the bound, without dividing by a predicted zero; no negative depth is near.
        self.near += int(((p < DELTA * t) & (t < DELTA * p)).sum())

    def result(self) -> dict[str, float]:
        if not self.pixels:
            raise DataError("no pixel has a depth: all targets are <= 0 or not finite")
        return {"rmse": (self.squares / self.pixels) ** 0.5, "delta1": self.near / self.pixels}


class Segmentation:
    """Mean over classes of intersection over union; classes that are neither there nor predicted do not count."""

    def __init__(self, classes: int, ignore: int = IGNORE) -> None:
        if classes < 1:
            raise DataError(f"classes={classes}: at least one class is needed")
        self.classes, self.ignore = classes, ignore
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64)  # (target, predicted)

    def add(self, prediction: Tensor, target: Tensor) -> None:
        if prediction.shape[1] != self.classes:
            raise ModelError(f"the head gives {prediction.shape[1]} classes, {self.classes} were announced")
        p, t = prediction.argmax(1).cpu(), target.cpu().long()  # (B, H, W)
        counted = t != self.ignore
        p, t = p[counted], t[counted]  # (pixels,)
        if len(t) and not 0 <= int(t.min()) <= int(t.max()) < self.classes:
            odd = int(t.min()) if int(t.min()) < 0 else int(t.max())
            raise DataError(f"label {odd} is not one of {self.classes} classes, nor {self.ignore} (ignored)")
        flat = torch.bincount(t * self.classes + p, minlength=self.classes**2)
        self.confusion += flat.view(self.classes, self.classes)

    def result(self) -> dict[str, float]:
        both = self.confusion.diag().double()
        either = self.confusion.sum(0) + self.confusion.sum(1) - self.confusion.diag()
        seen = either > 0
        if not bool(seen.any()):
            raise DataError(f"no pixel has a label: all targets are {self.ignore}")
        return {"miou": float((both[seen] / either[seen]).mean())}


M = TypeVar("M", bound=DenseMetric)


def evaluate_head(backbone: nn.Module, head: nn.Module, pairs: Iterable[tuple[Tensor, Tensor]], metric: M) -> M:
    """Run the head on the backbone's patch features and add every pixel to `metric`, which is also returned.

    pairs: images (B, 3, H, W) with targets (B, H', W') of the same view; predictions are resized to the targets.
    """
    first = next(backbone.parameters())
    count = 0
    with torch.no_grad(), evaluating(backbone), evaluating(head):
        for images, targets in pairs:
            prediction = head(patch_map(backbone, move(images, first.device, first.dtype)))
            metric.add(_fitted(prediction, targets), targets)
            count += len(images)
    if count == 0:
        raise DataError("nothing was evaluated: there were no pairs (a generator can be used only once)")
    return metric


def patch_map(backbone: nn.Module, images: Tensor) -> Tensor:
    """The patch tokens of forward_features as a map (B, C, h, w); class and register tokens are dropped."""
    forward_features = getattr(backbone, "forward_features", None)
    if not callable(forward_features):
        raise ModelError(f"{type(backbone).__name__} has no forward_features to take patch tokens from")
    tokens = forward_features(images)  # (B, prefix + h w, C)
    if not isinstance(tokens, Tensor) or tokens.dim() != 3:
        raise ModelError(f"forward_features of {type(backbone).__name__} does not give tokens (images, tokens, width)")
    prefix = int(getattr(backbone, "num_prefix_tokens", 1))
    patches = tokens.shape[1] - prefix
    height, width = images.shape[-2:]
    h = round((patches * height / width) ** 0.5)  # patches are square, so the grid has the image's proportions
    if h < 1 or patches % h:
        raise ModelError(
            f"{tokens.shape[1]} tokens less {prefix} prefix tokens do not fill a grid for {height} x {width} images; "
            "set num_prefix_tokens on the backbone"
        )
    return tokens[:, prefix:].mT.reshape(len(tokens), -1, h, patches // h)


def _fitted(prediction: Tensor, targets: Tensor) -> Tensor:
    """The head's output as (B, K, H', W') at the targets' size."""
    if prediction.dim() == 3:
        prediction = prediction[:, None]
    size = (targets.shape[-2], targets.shape[-1])
    if prediction.shape[-2:] == size:
        return prediction
    return nn.functional.interpolate(prediction.float(), size=size, mode="bilinear", align_corners=False)
