"""A pruned model against the dense one on the same batches: agreement, divergence and speed in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from corp.calibration.batches import Forward, evaluating, feed, placement, size_of
from corp.errors import DataError
from corp.io.tables import Tabular
from corp.measure.closeness import Reference
from corp.measure.intervals import Interval
from corp.measure.timing import Ratio, complete, interleave, speed_up

ROUNDS = 9  # of timing: enough for a 95 % interval of the median


@dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """How close the pruned model is to the dense one, and how much faster, with 95 % intervals."""

    samples: int
    what: str  # what agreement means for this model
    agreement: Interval
    divergence: Interval  # KL from the dense distribution in nats; for features the relative squared error
    speed_up: Ratio  # on the first batch

    def table(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        rows = [
            (self.what, *_cells(self.agreement)),
            ("divergence from the dense model", *_cells(self.divergence)),
            ("times as fast", *_cells(self.speed_up)),
        ]
        return f"pruned against dense on {self.samples} samples", ("", "value", "low", "high"), rows


def compare(dense: nn.Module, pruned: nn.Module, batches: Sequence[Any], forward: Forward | None) -> Comparison:
    """Compare the outputs on all batches, and the time of the first, round by round in turn."""
    if not batches:
        raise DataError("nothing to compare: `batches` was empty (an iterator can be used only once)")
    found = Reference(dense, batches, forward).compare(pruned)
    with torch.inference_mode(), evaluating(dense), evaluating(pruned):
        models = [(model, placement(model)[0]) for model in (dense, pruned)]
        calls = [complete(partial(feed, model, batches[0], forward), device) for model, device in models]
        times = interleave(calls, rounds=ROUNDS)
    samples = sum(map(size_of, batches))
    return Comparison(samples, found.what, found.agreement(), found.divergence(), speed_up(*times))


def _cells(interval: Interval | Ratio) -> tuple[str, ...]:
    return tuple("" if end is None else f"{end:.3f}" for end in (interval.value, interval.low, interval.high))
