"""The evaluation loop: several models and the dense one, side by side over the same batches.

It does not depend on images or texts: the metric defines what is measured, and the batches what a model takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from corp.calibration.batches import evaluating, feed, size_of
from corp.errors import DataError
from corp.evaluate.features import Features, Sink, tapped

M = TypeVar("M", bound="Metric")


class Metric(Protocol):
    """Sums over samples, so that no outputs are kept."""

    def add(self, output: Any, reference: Any = None, target: Tensor | None = None) -> None:
        """Add one batch: the model's output, the dense model's, and the target; each may be None if there is none."""


@dataclass
class Contender:
    """A model and its metric."""

    model: nn.Module
    metric: Metric | None = None
    features: Features | None = None


def side_by_side(
    dense: nn.Module | None,
    contenders: Sequence[Contender],
    batches: Iterable[Any],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Run everything over the data once, adding to the contenders' metrics; the dense model may be one of them.

    A batch is inputs, or (inputs, targets).
    """
    models = [entry.model for entry in contenders] + ([] if dense is None else [dense])
    with torch.no_grad(), ExitStack() as stack:
        for model in models:
            stack.enter_context(evaluating(model))
        count = 0
        for batch in batches:
            _one_batch(dense, contenders, batch)
            count += size_of(batch)
            if progress:
                progress(size_of(batch))
    if count == 0:
        raise DataError("nothing was evaluated: there were no batches (a generator can be used only once)")


def judged(
    models: Sequence[nn.Module],
    metric: Callable[[], M],
    batches: Iterable[Any],
    dense: nn.Module | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[M]:
    """The metric of every model, compared with the dense one if there is one, in one pass over the batches."""
    metrics = [metric() for _ in models]
    side_by_side(dense, [Contender(*pair) for pair in zip(models, metrics, strict=True)], batches, progress)
    return metrics


def _one_batch(dense: nn.Module | None, contenders: Sequence[Contender], batch: Any) -> None:
    target = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
    taps: dict[str, Tensor] = {}  # of the dense model, for this batch only; the others are compared on the fly
    wanted = any(entry.features is not None for entry in contenders)
    reference = None if dense is None else _forward(dense, batch, taps.__setitem__ if wanted else None)
    for entry in contenders:
        output = reference if entry.model is dense else _forward(entry.model, batch, _against(taps, entry.features))
        if entry.metric is not None:
            entry.metric.add(output, reference, target)


def _against(taps: dict[str, Tensor], features: Features | None) -> Sink | None:
    if features is None:
        return None
    return lambda part, value: features.add(part, taps.get(part), value)


def _forward(model: nn.Module, batch: Any, sink: Sink | None) -> Any:
    with nullcontext() if sink is None else tapped(model, sink):
        return feed(model, batch)
