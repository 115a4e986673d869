"""Batches that calibration does not see, so that what is made from it can be measured on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from corp.calibration.batches import count_samples, enumerate_batches, size_of

EVERY = 8  # one batch in so many is held out, fewer of very many, more of very few
FIRST = 1  # its index: with two batches there is one to calibrate on and one to measure on


class HoldOut:
    """The batches less those held out, which are kept in `kept` once the data was read.

    By index, so that every run of the same data holds out the same; about `samples` are enough.
    """

    def __init__(self, batches: Iterable[Any], samples: int) -> None:
        self.batches = batches
        self.kept: list[Any] = []
        self.every = stride(_length(batches), count_samples(batches), samples)
        self._read = False
        total = count_samples(batches)
        held = sum(size_of(b) for i, b in enumerate(batches) if self.holds(i)) if isinstance(batches, list) else None
        if total is not None:
            self.samples = total - (round(total / self.every) if held is None else held)

    def __getattr__(self, name: str) -> Any:
        """Anything else is asked of the data itself: its fingerprint, what it could not read."""
        if name in ("batches", "samples"):
            raise AttributeError(name)
        return getattr(self.batches, name)

    def holds(self, index: int) -> bool:
        return index % self.every == FIRST

    def indexed(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, int, Any]]:
        """(index among those left, index of its first sample in all the data, batch) of the wanted batches."""
        first = not self._read
        if first:
            self.kept = []  # a pass that was broken off left some
        for index, start, batch in enumerate_batches(self.batches, lambda i: self._needs(i, wanted, first)):
            if self.holds(index):
                self.kept.append(batch)
            else:
                yield self._left(index), start, batch
        self._read = True

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, _, batch in self.indexed(lambda _: True))

    def _needs(self, index: int, wanted: Callable[[int], bool], first: bool) -> bool:
        return first if self.holds(index) else wanted(self._left(index))

    def _left(self, index: int) -> int:
        """The index of a batch once those held out before it are gone."""
        return index - (index + self.every - 1 - FIRST) // self.every


def stride(batches: int | None, total: int | None, samples: int) -> int:
    """One batch in how many is held out: EVERY where nothing is known of the data."""
    if batches is not None and batches < 2 * EVERY:
        return max(2, batches // 2)
    return max(EVERY, total // samples) if total is not None else EVERY


def _length(batches: Iterable[Any]) -> int | None:
    """How many batches there are, where that can be told."""
    samples, size = getattr(batches, "samples", None), getattr(batches, "batch_size", None)
    if isinstance(samples, int) and isinstance(size, int) and size > 0:
        return -(-samples // size)
    return len(batches) if isinstance(batches, Sized) else None
