"""Which batches and samples are held out of a fit to evaluate it: one rule for all of corp."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from typing import Any

from corp.calibration.batches import enumerate_batches, size_of

EVERY = 8  # one batch in this many is held out; more if there are very few
FIRST = 1  # the index of the first held-out batch: of two batches, one is fitted and one is held out


@dataclass(frozen=True)
class HoldOut:
    """Every `every`-th batch (or sample) by its index, so that every run of the same data holds out the same."""

    every: int = EVERY

    @classmethod
    def of(cls, batches: Iterable[Any]) -> HoldOut:
        """The rule for this data: one batch in EVERY, or one of every few."""
        count = batch_count(batches)
        return cls(EVERY if count is None or count >= 2 * EVERY else max(2, count // 2))

    def holds(self, index: int) -> bool:
        return index % self.every == FIRST


@dataclass
class HeldBatches:
    """Held-out batches that are kept during calibration, until they have `samples` samples in total."""

    rule: HoldOut
    samples: int
    batches: list[Any] = field(default_factory=list)
    last: int = -1  # index of the last batch kept

    def wants(self, index: int) -> bool:
        return self.rule.holds(index) and index > self.last and sum(map(size_of, self.batches)) < self.samples

    def offer(self, index: int, batch: Any) -> None:
        """Keep the batch if it is needed; a second pass over the data offers it again."""
        if self.wants(index):
            self.batches.append(batch)
            self.last = index

    def collect(self, batches: Iterable[Any]) -> None:
        """Read the needed batches, if there is no calibration pass."""
        for index, _, batch in enumerate_batches(batches, self.wants):
            self.offer(index, batch)


def batch_count(batches: Iterable[Any]) -> int | None:
    """How many batches there are; None if that is unknown before they are read."""
    samples, size = getattr(batches, "samples", None), getattr(batches, "batch_size", None)
    if isinstance(samples, int) and isinstance(size, int) and size > 0:
        return -(-samples // size)
    return len(batches) if isinstance(batches, Sized) else None
