"""Which batches and samples are held out of a fit to evaluate it: one rule for all of corp."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

from corp.calibration.batches import enumerate_batches, size_of

EVERY = 8  # one batch in this many is held out; more if there are very few
FIRST = 1  # the index of the first held-out batch if the number of batches is unknown
APART = 4  # this many held-out batches are two stretches; fewer are one


@dataclass(frozen=True)
class HoldOut:
    """The rule for `count` batches (or samples) in a row, so that every run of the same data holds out the same.

    Neighbours are often alike: frames of a video, images of a class, parts of a document. A batch between two fitted
    ones would not be unseen data, so the held-out ones are consecutive. Of enough of them there are two stretches, at
    the end of either half, in case the data has two sources. If the number is unknown, every eighth is held out.
    """

    count: int | None = None

    @classmethod
    def of(cls, batches: Iterable[Any]) -> HoldOut:
        return cls(batch_count(batches))

    def stretches(self) -> tuple[range, range]:
        """The indices that are held out: one in EVERY of a known number, at least two of four, none of one."""
        count = self.count or 0
        size = max(-(-count // EVERY), min(2, count // 2)) if count > 1 else 0
        first = size // 2 if size >= APART else 0
        return range(count // 2 - first, count // 2), range(count - size + first, count)

    def holds(self, index: int) -> bool:
        if self.count is None:
            return index % EVERY == FIRST
        return any(index in stretch for stretch in self.stretches())

    @property
    def share(self) -> float:
        """The share that is held out."""
        return sum(map(len, self.stretches())) / self.count if self.count else 1 / EVERY


class OutputReader(Protocol):
    """Reads what trials compare in the dense model's outputs; implemented in measure.closeness."""

    def read_if_possible(self, batch: Any, output: Any) -> Any: ...


@dataclass
class HeldBatches:
    """Held-out batches that are kept during calibration, until they have `samples` samples in total.

    If more are held out than are needed, those that are kept are spread evenly over them. With a `reader`, the dense
    model's outputs on them are kept too.
    """

    rule: HoldOut
    samples: int
    reader: OutputReader | None = None
    batches: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)  # one per batch; None if it was not read
    last: int = -1  # index of the last batch kept

    def wants(self, index: int) -> bool:
        return index > self.last and self.rule.holds(index) and self._short() and self._in_turn(index)

    def offer(self, index: int, batch: Any) -> bool:
        """Keep the batch if it is needed, and return whether; a second pass over the data offers it again."""
        needed = self.wants(index)
        if needed:
            self.batches.append(batch)
            self.outputs.append(None)
            self.last = index
        return needed

    def ran(self, output: Any) -> None:
        """Read the dense model's output on the batch that was kept last."""
        if self.reader is not None:
            self.outputs[-1] = self.reader.read_if_possible(self.batches[-1], output)

    def collect(self, batches: Iterable[Any]) -> None:
        """Read the needed batches, if there is no calibration pass."""
        for index, _, batch in enumerate_batches(batches, self.wants):
            self.offer(index, batch)

    def _short(self) -> bool:
        return sum(map(size_of, self.batches)) < self.samples

    def _in_turn(self, index: int) -> bool:
        """Whether it is the next of those that are spread over all held-out batches; the first tells their size."""
        first, second = self.rule.stretches()
        held = len(first) + len(second)
        if not held or not self.batches:
            return True
        needed = max(len(self.batches) + 1, -(-self.samples // max(1, size_of(self.batches[0]))))
        place = len(self.batches) * held // needed if needed < held else 0
        return index >= (first[place] if place < len(first) else second[place - len(first)])


def batch_count(batches: Iterable[Any]) -> int | None:
    """How many batches there are; None if that is unknown before they are read."""
    samples, size = getattr(batches, "samples", None), getattr(batches, "batch_size", None)
    if isinstance(samples, int) and isinstance(size, int) and size > 0:
        return -(-samples // size)
    return len(batches) if isinstance(batches, Sized) else None
