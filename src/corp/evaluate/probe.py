"""Linear heads on frozen features, fitted in closed form: ridge regression of patches' content, from streaming sums.

A patch's target is the share of its labelled pixels that each class has, or their mean depth. Rare classes count more:
a pixel of class c has the weight freq_c^-1/2, between plain least squares, which hardly predicts a class of 1 %, and
full balance, which predicts it everywhere. Newton's method on the logistic loss was no better (docs/dense.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from corp.calibration.batches import evaluating, move, placement
from corp.calibration.holdout import HoldOut
from corp.errors import DataError, warn
from corp.evaluate.dense import may_be_labels, require_classes, require_depths, warn_of_labels
from corp.evaluate.heads import DEPTH, LEAST_DEPTH, HeadInfo, LinearHead, patch_map
from corp.numerics.refit import RIDGES, GapMoments, choose_ridge, fit_gap, gap_left

Pairs = Iterable[tuple[Tensor, Tensor]]
BALANCE = 0.5  # the power of a class's frequency that its pixels are divided by
FEWEST = 4  # images; two are held out of these
DEEPEST = 200.0  # metres; a median depth above that is in other units
MOST_CLASSES = 1000  # more is a label map of another kind, such as instances or depths


class Probe(NamedTuple):
    """A fitted head, the best ridge on held-out images, and its R² there."""

    head: LinearHead
    ridge: float
    explained: float
    images: int


class WeightedSums:
    """Sums of weight, w x, w x xᵀ, w y, w y xᵀ and w |y|² over patches, in float64."""

    def __init__(self) -> None:
        self.weight = self.energy = torch.zeros((), dtype=torch.float64)
        self.x = self.xx = self.y = self.yx = self.energy

    def update(self, x: Tensor, y: Tensor, w: Tensor) -> None:
        """Add features x (N, C), targets y (N, K) and weights w (N,)."""
        x, y, w = x.double(), y.double(), w.double()
        wx, wy = w[:, None] * x, w[:, None] * y
        self.weight, self.energy = self.weight + w.sum(), self.energy + (wy * y).sum()
        self.x, self.y = self.x + wx.sum(0), self.y + wy.sum(0)
        self.xx, self.yx = self.xx + wx.mT @ x, self.yx + wy.mT @ x

    def __add__(self, other: WeightedSums) -> WeightedSums:
        both = WeightedSums()
        for name in vars(both):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        return both

    def moments(self, scale: Tensor | None = None) -> GapMoments:
        """Weighted means and covariances of x / scale and of y."""
        x, y = self.x / self.weight, self.y / self.weight
        scale = torch.ones_like(x) if scale is None else scale
        cov = (self.xx / self.weight - torch.outer(x, x)) / torch.outer(scale, scale)
        cross = (self.yx / self.weight - torch.outer(y, x)) / scale
        return GapMoments(x / scale, cov, y, cross, float(self.energy / self.weight - y.square().sum()))


def fit_head(
    backbone: nn.Module,
    pairs: Pairs,
    info: HeadInfo,
    *,
    classes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Probe:
    """Fit a linear head on the features of the last `info.blocks` blocks of a frozen backbone.

    pairs: images (B, 3, H, W) with label maps (B, H', W'), iterable twice: the maps are read first, for the classes and
    their frequencies. Memory is limited by the sums, (blocks C)² numbers, whatever the number of images.
    """
    count, pixels = _survey(pairs, info, classes)
    if count < FEWEST:
        raise DataError(f"{count} image(s) are too few to fit the head and to choose its ridge; give at least {FEWEST}")
    sums = _collect(backbone, pairs, info, pixels, HoldOut(count), progress)
    if min(float(part.weight) for part in sums) == 0:
        raise DataError("no labelled pixel in the images that fit the head, or in those that choose its ridge")
    return _solved(*sums, info, count)


def _solved(fit: WeightedSums, unseen: WeightedSums, info: HeadInfo, images: int) -> Probe:
    """The head from all sums, with the best ridge on unseen images."""
    both = fit + unseen
    scale = both.moments().cov.diagonal().clamp(min=torch.finfo(torch.float32).tiny).sqrt()
    held = unseen.moments(scale)
    ridge = choose_ridge(fit.moments(scale), held) or RIDGES[-1]
    R, c = fit_gap(both.moments(scale), ridge)
    explained = 1 - gap_left(held, fit_gap(fit.moments(scale), ridge)) / held.energy if held.energy > 0 else 0.0
    head = LinearHead(R.shape[1], R.shape[0], least=LEAST_DEPTH if info.task == DEPTH else None)
    with torch.no_grad():
        head.weight.copy_(R / scale)
        head.bias.copy_(c)
    return Probe(head.eval(), ridge, explained, images)


def _survey(pairs: Pairs, info: HeadInfo, classes: int | None) -> tuple[int, Tensor | None]:
    """Read the label maps only: how many there are, and how many pixels each class has (K,); None for depths."""
    images, counts, medians = 0, torch.zeros(0, dtype=torch.int64), []
    labels: list[bool | None] = []
    for _, maps in pairs:
        images += len(maps)
        if info.task == DEPTH:
            depths = [depth for one in maps if len(depth := one[one > 0])]
            medians += [float(depth.median()) for depth in depths]
            labels += map(may_be_labels, depths)
        else:
            counts = _added(counts, maps, info.ignore, classes)
    if not images:
        raise DataError("no images to fit the head on (a generator can be used only once)")
    if info.task == DEPTH:
        _check_depths(medians)
        warn_of_labels(labels)
        return images, None
    if not bool(counts.any()):
        raise DataError(f"no pixel has a label: all are {info.ignore}")
    return images, nn.functional.pad(counts, (0, (classes or len(counts)) - len(counts)))


def _added(counts: Tensor, maps: Tensor, ignore: int, classes: int | None) -> Tensor:
    labels = maps[maps != ignore].long()
    require_classes(labels, classes or MOST_CLASSES, ignore)
    found = torch.bincount(labels, minlength=len(counts))
    return nn.functional.pad(counts, (0, len(found) - len(counts))) + found


def _check_depths(medians: list[float]) -> None:
    require_depths(bool(medians))
    depth = float(torch.tensor(medians).median())
    if depth > DEEPEST:
        warn(f"the median depth is {depth:.4g}: are the maps in metres? For millimetres give scale=1000")


def _collect(
    backbone: nn.Module,
    pairs: Pairs,
    info: HeadInfo,
    pixels: Tensor | None,
    rule: HoldOut,
    progress: Callable[[int], None] | None,
) -> tuple[WeightedSums, WeightedSums]:
    """The sums of the images that are fitted, and of those that are held out."""
    device, dtype = placement(backbone)
    parts, first = (WeightedSums(), WeightedSums()), 0
    with torch.no_grad(), evaluating(backbone):
        for images, maps in pairs:
            features = patch_map(backbone, move(images, device, dtype), info.blocks).float().cpu()  # (B, C, h, w)
            y, w = patch_targets(maps, (features.shape[-2], features.shape[-1]), info, pixels)
            for i, one in enumerate(features):
                parts[rule.holds(first + i)].update(one.flatten(1).mT, y[i].flatten(1).mT, w[i].flatten())
            first += len(images)
            if progress:
                progress(len(images))
    return parts


def patch_targets(maps: Tensor, grid: tuple[int, int], info: HeadInfo, pixels: Tensor | None) -> tuple[Tensor, Tensor]:
    """The target (B, K, h, w) and the weight (B, h, w) of each patch, from maps (B, H, W)."""
    if info.task == DEPTH:
        valid = torch.isfinite(maps) & (maps > 0)
        values, known = torch.where(valid, maps.double(), 0.0)[:, None], valid.double()[:, None]  # (B, 1, H, W)
        weight = nn.functional.adaptive_avg_pool2d(known, grid)
        mean = nn.functional.adaptive_avg_pool2d(values, grid) / weight.clamp(min=torch.finfo(torch.float64).tiny)
        return mean, weight[:, 0]
    assert pixels is not None
    labels = torch.where(maps == info.ignore, len(pixels), maps).long()  # ignored pixels are an extra last class
    shown = nn.functional.one_hot(labels, len(pixels) + 1)[..., :-1].movedim(-1, 1).float()  # (B, K, H, W)
    share = nn.functional.adaptive_avg_pool2d(shown, grid)  # (B, K, h, w)
    balance = (pixels / pixels.sum()).clamp(min=torch.finfo(torch.float32).tiny) ** -BALANCE  # (K,)
    weighted = share * torch.where(pixels > 0, balance, 0.0).float()[:, None, None]
    weight = weighted.sum(1)
    return weighted / weight.clamp(min=torch.finfo(torch.float32).tiny)[:, None], weight
