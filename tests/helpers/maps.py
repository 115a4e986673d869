"""Scores of a model's maps against label maps."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from corp.evaluate.dense import MapMetric, MapScore
from corp.evaluate.heads import IGNORE
from corp.evaluate.run import judged


def scored(model: nn.Module, pairs: Iterable[tuple[Tensor, Tensor]], task: str, ignore: int = IGNORE) -> MapMetric:
    """The sums over all pairs of images (B, 3, H, W) and maps (B, H', W')."""
    (score,) = judged([model], lambda: MapScore(task, ignore), pairs)
    assert score.truth is not None
    return score.truth
