"""Scores of depth and segmentation maps: pooled over pixels, with intervals over images, as pixels are correlated."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from corp.errors import DataError, ModelError, warn
from corp.evaluate.heads import DEPTH, IGNORE, SEGMENTATION
from corp.measure.intervals import Interval, Z

DELTA = 1.25  # depth within this factor of the truth counts as right; δ2 and δ3 use its square and cube
NOTHING = -1  # the ignored label in a model's own maps, which have no unlabelled pixels
FAR_OFF = 30  # between median depths: no model is that wrong, so the units differ
FEW = 64  # whole numbers in a map of depths are labels: no sensor measures so coarsely


class Estimate(NamedTuple):
    """A number, and the first-order contribution of each image to its deviation."""

    value: float
    influence: Tensor  # (N,)

    def __sub__(self, other: Estimate) -> Estimate:
        """The difference over the same images, so that images that are hard for both do not widen its interval."""
        return Estimate(self.value - other.value, self.influence - other.influence)

    def interval(self) -> Interval:
        n = len(self.influence)
        if n < 2:
            return Interval(self.value, None, None)
        half = Z * sqrt(n / (n - 1) * float(self.influence.square().sum()))
        return Interval(self.value, self.value - half, self.value + half)


def pooled(parts: Tensor, wholes: Tensor) -> Estimate:
    """The mean over ratios r of sum_i parts / sum_i wholes, both (N, R); ratios of an empty whole do not count."""
    total = wholes.sum(0)  # (R,)
    there = total > 0
    x, n, total = parts[:, there].double(), wholes[:, there].double(), total[there].double()
    ratios = x.sum(0) / total
    return Estimate(float(ratios.mean()), ((x - ratios * n) / total).mean(1))


def may_be_labels(depths: Tensor) -> bool | None:
    """Whether an image's depths are a few whole numbers, as labels are; a single one says nothing (None)."""
    if not bool((depths == depths.round()).all()):  # most maps: no need to sort them
        return False
    values = len(depths.unique())
    return values <= FEW if values > 1 else None


def require_classes(labels: Tensor, classes: int, ignore: int) -> None:
    """Refuse labels (pixels,) that are not one of the classes; ignored pixels are not among them."""
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        odd = int(labels.min()) if int(labels.min()) < 0 else int(labels.max())
        raise DataError(
            f"label {odd} is neither one of the {classes} classes, counted from 0, nor the ignored label {ignore}; if "
            f"it marks unlabelled pixels, give ignore={odd}"
        )


def require_depths(found: bool) -> None:
    if not found:
        raise DataError("no pixel has a depth: all targets are <= 0 or not finite")


def warn_of_labels(found: Iterable[bool | None]) -> None:
    """Warn if no image says that the maps are depths, and one that they are labels."""
    if set(found) - {None} == {True}:
        warn(f"every depth is one of at most {FEW} whole numbers: maps of classes are for the task {SEGMENTATION!r}")


class Depth:
    """RMSE, absolute relative error and δ1–δ3: the share of pixels with max(p/t, t/p) < 1.25, 1.25², 1.25³.

    Targets <= 0 or not finite do not count.
    """

    def __init__(self) -> None:
        self.rows: list[Tensor] = []  # per image (6,): squared and relative errors, three counts, pixels
        self.medians: list[tuple[float, float]] = []
        self.labels: list[bool | None] = []

    def add(self, prediction: Tensor, target: Tensor) -> None:
        """Add predicted maps (B, 1, h, w), which are resized to the targets (B, H, W)."""
        if prediction.shape[1] != 1:
            raise ModelError(f"a depth head must have one channel, but this one has {prediction.shape[1]}")
        for p, t in zip(fitted(prediction, target)[:, 0].double(), target.to(prediction.device).double(), strict=True):
            valid = torch.isfinite(t) & (t > 0)
            self._add_image(p[valid], t[valid])

    def _add_image(self, p: Tensor, t: Tensor) -> None:
        """Add predicted and true depths of an image's valid pixels, (pixels,) each."""
        if not bool(torch.isfinite(p).all()):
            raise ModelError(f"{int((~torch.isfinite(p)).sum())} of {len(p)} predicted depths are not finite")
        error = p - t
        # Both ratios below the bound, without dividing by a predicted zero; negative depths never count as close.
        near = [((p < bound * t) & (t < bound * p)).sum() for bound in (DELTA, DELTA**2, DELTA**3)]
        sums = [error.square().sum(), (error.abs() / t).sum(), *near]
        self.rows.append(torch.tensor([*map(float, sums), float(len(t))], dtype=torch.float64))
        if len(t):
            self.medians.append((float(p.median()), float(t.median())))
            self.labels.append(may_be_labels(t))

    def estimates(self) -> dict[str, Estimate]:
        rows = torch.stack(self.rows) if self.rows else torch.zeros(0, 6, dtype=torch.float64)
        pixels = rows[:, 5:]
        require_depths(bool((pixels > 0).any()))
        self._warn_of_units()
        warn_of_labels(self.labels)
        square = pooled(rows[:, :1], pixels)
        rmse = sqrt(square.value)
        found = {"rmse": Estimate(rmse, square.influence / (2 * rmse) if rmse else square.influence)}
        names = ("abs_rel", "delta1", "delta2", "delta3")
        return found | {name: pooled(rows[:, i : i + 1], pixels) for i, name in enumerate(names, 1)}

    def _warn_of_units(self) -> None:
        p, t = torch.tensor(self.medians, dtype=torch.float64).median(0).values.tolist()
        if t > FAR_OFF * max(p, 0.0) or p > FAR_OFF * t:
            warn(
                f"the median depth is {t:.4g} in the maps and {p:.4g} in the predictions: are both in metres? "
                "For maps in millimetres give scale=1000"
            )


class Segmentation:
    """Mean intersection over union of the classes that occur or are predicted, and pixel accuracy.

    A head of one channel separates foreground (1) from background (0) at a probability of one half; its score is the
    intersection over union of the foreground.
    """

    def __init__(self, classes: int, ignore: int = IGNORE) -> None:
        if classes < 1:
            raise DataError(f"classes={classes}: at least one class is needed")
        self.channels, self.classes, self.ignore = classes, max(classes, 2), ignore
        self.rows: list[Tensor] = []  # per image (3, classes): intersections, predicted pixels, labelled pixels

    def labels(self, prediction: Tensor) -> Tensor:
        """(B, K, H, W) -> (B, H, W), the predicted class of every pixel."""
        if prediction.shape[1] != self.channels:
            raise ModelError(f"the head gives {prediction.shape[1]} classes, but {self.channels} were expected")
        return prediction.argmax(1) if self.channels > 1 else (prediction[:, 0] > 0).long()

    def add(self, prediction: Tensor, target: Tensor) -> None:
        """Add predicted maps (B, K, h, w), which are resized to the targets (B, H, W)."""
        found = self.labels(fitted(prediction, target))
        for p, t in zip(found, target.to(found), strict=True):
            counted = t != self.ignore
            self._add_image(p[counted], t[counted])

    def _add_image(self, p: Tensor, t: Tensor) -> None:
        """Add predicted and true classes of an image's labelled pixels, (pixels,) each."""
        require_classes(t, self.classes, self.ignore)
        counts = (torch.bincount(x, minlength=self.classes).cpu() for x in (t[p == t], p, t))
        self.rows.append(torch.stack(list(counts)))

    def estimates(self) -> dict[str, Estimate]:
        if not self.rows or not any(bool(row[2].any()) for row in self.rows):
            raise DataError(f"no pixel has a label: all targets are {self.ignore}")
        both, predicted, labelled = torch.stack(self.rows, 1)  # (N, classes) each
        either = predicted + labelled - both
        first = 0 if self.channels > 1 else 1  # with one channel, only the foreground counts
        return {
            "miou": pooled(both[:, first:], either[:, first:]),
            "pixel_accuracy": pooled(both.sum(1, keepdim=True), labelled.sum(1, keepdim=True)),
        }


MapMetric: TypeAlias = Depth | Segmentation  # sums per image


class MapScore:
    """Scores against label maps, and against the dense model's own maps, as far as there are such.

    A Metric of evaluate.run. `truth` and `likeness` are None until something was compared.
    """

    def __init__(self, task: str, ignore: int = IGNORE) -> None:
        self.task, self.ignore = task, ignore
        self.truth: MapMetric | None = None
        self.likeness: MapMetric | None = None

    def add(self, output: Tensor, reference: Tensor | None = None, target: Tensor | None = None) -> None:
        if target is not None:
            self.truth = self.truth or self._metric(output.shape[1], self.ignore)
            self.truth.add(output, target)
        if reference is not None and reference is not output:
            if reference.shape[1:] != output.shape[1:]:
                raise ModelError(f"maps {tuple(output.shape[1:])} differ from the dense {tuple(reference.shape[1:])}")
            self.likeness = self.likeness or self._metric(output.shape[1], NOTHING)
            metric = self.likeness
            own = metric.labels(reference) if isinstance(metric, Segmentation) else reference[:, 0]
            metric.add(output, own)

    def _metric(self, channels: int, ignore: int) -> MapMetric:
        return Depth() if self.task == DEPTH else Segmentation(channels, ignore)


def fitted(prediction: Tensor, target: Tensor) -> Tensor:
    """The maps (B, K, H', W') in float32, resized bilinearly to the targets' size."""
    size = (target.shape[-2], target.shape[-1])
    if prediction.shape[-2:] == size:
        return prediction.float()
    return nn.functional.interpolate(prediction.float(), size=size, mode="bilinear", align_corners=False)
