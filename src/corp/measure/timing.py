"""How much faster one callable is than another, with an interval: interleaved rounds and their ratios.

The speed of a shared machine varies by more than pruning gains. Callables are therefore timed in turn, round after
round, and compared within each round; the result is the median of those ratios and its interval.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from corp.errors import RecipeError

CONFIDENCE = 0.95
MIN_ROUNDS = 6  # below six the two extremes enclose the median in fewer than 95 % of cases: 1 - 2 / 2^5 = 0.94
WARM_UP = 3  # discarded rounds, in which allocators, kernel choice and caches settle
FAR_MORE, LITTLE = 1.5, 0.5  # launch-bound at batch 1: above this time ratio, below this share of the gain
Rounds: TypeAlias = list[list[float]]  # seconds per call, by round


class Ratio(NamedTuple):
    """A speed-up over the baseline (2: twice as fast), with the interval that contains its median in 95 % of cases."""

    value: float
    low: float
    high: float

    @property
    def within_noise(self) -> bool:
        return self.low <= 1 <= self.high

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "within_noise": self.within_noise}


class Summary(NamedTuple):
    """Seconds per call: median, 95th percentile, and the distance of the quartiles of the rounds over the median."""

    p50: float
    p95: float
    spread: float


@dataclass(frozen=True)
class Times:
    """One model's calls at batch 1 and at `batch`."""

    batch: int
    single: Rounds
    batched: Rounds

    @property
    def alone(self) -> float:
        """Median seconds of a single sample."""
        return summarize(self.single).p50

    @property
    def together(self) -> float:
        """Median seconds per sample in a batch."""
        return summarize(self.batched).p50 / self.batch

    def to_dict(self) -> dict[str, Any]:
        single, batched = summarize(self.single), summarize(self.batched)
        return {
            "latency_ms": {"p50": 1e3 * single.p50, "p95": 1e3 * single.p95, "spread": single.spread},
            "throughput": {"p50": 1 / self.together, "spread": batched.spread},
        }


@dataclass(frozen=True)
class Gain:
    """One model against the baseline; `ideal` is the speed-up if time followed MACs."""

    latency: Ratio
    throughput: Ratio
    ideal: float

    @property
    def reached(self) -> float | None:
        return share_reached(self.throughput.value, self.ideal)

    def to_dict(self) -> dict[str, Any]:
        ratios = {"latency": self.latency.to_dict(), "throughput": self.throughput.to_dict()}
        return {**ratios, "ideal": self.ideal, "reached": self.reached}


def interleave(
    calls: Sequence[Callable[[], object]],
    *,
    rounds: int,
    repeats: int = 1,
    warm_up: int = WARM_UP,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Rounds]:
    """Seconds of every call, [callable][round][repeat]; each round times all of them, each `repeats` times in a row.

    The order changes from round to round, so that what a callable leaves in caches affects all of them alike.
    """
    if rounds < MIN_ROUNDS:
        raise RecipeError(f"{rounds} rounds give no {CONFIDENCE:.0%} interval of a median; use {MIN_ROUNDS} or more")
    timed: list[Rounds] = [[] for _ in calls]
    with _no_collection():
        for number in range(-warm_up, rounds):
            for position in range(len(calls)):
                which = (position + number) % len(calls)
                seconds = [seconds_of(calls[which], clock) for _ in range(repeats)]
                if number >= 0:
                    timed[which].append(seconds)
    return timed


def complete(call: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """The call, which returns only when the device has finished its work."""
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)

    def complete_call() -> None:
        call()
        wait()

    return complete_call


def summarize(rounds: Rounds) -> Summary:
    calls = [seconds for one in rounds for seconds in one]
    first, _, third = statistics.quantiles(_medians(rounds), n=4, method="inclusive")
    p95 = statistics.quantiles(calls, n=20, method="inclusive")[-1]
    median = statistics.median(calls)
    return Summary(median, p95, (third - first) / median)


def speed_up(baseline: Rounds, other: Rounds) -> Ratio:
    """Time of the baseline over time of the other, round by round; their median and its interval."""
    pairs = zip(_medians(baseline), _medians(other), strict=True)
    return median_ratio([dense / pruned for dense, pruned in pairs])


def gain(baseline: Times, other: Times, *, ideal: float) -> Gain:
    return Gain(speed_up(baseline.single, other.single), speed_up(baseline.batched, other.batched), ideal)


def launch_bound(times: Times, gain: Gain) -> bool:
    """Whether batch 1 is launch-bound: a single sample costs far more than one in a batch, and gained little."""
    reached = share_reached(gain.latency.value, gain.ideal)
    return times.alone > FAR_MORE * times.together and reached is not None and reached < LITTLE


def median_ratio(values: Sequence[float]) -> Ratio:
    """The median, with order statistics around it: exact for independent rounds, whatever their distribution."""
    ordered = sorted(values)
    tail = tail_rank(len(ordered))
    return Ratio(statistics.median(ordered), ordered[tail], ordered[-1 - tail])


def tail_rank(count: int) -> int:
    """How many of `count` sorted values to cut off at either end so that the rest holds the median in 95 % of cases.

    A value is below the median with probability 1/2, so the number of those below is binomial, and the rest misses
    the median if at most r are: the largest r with P(Bin(count, 1/2) <= r) <= (1 - CONFIDENCE) / 2; -1 if none.
    """
    allowed, misses, rank = (1 - CONFIDENCE) / 2 * 2**count, 1, -1
    while misses <= allowed:
        rank += 1
        misses += math.comb(count, rank + 1)
    return rank


def share_reached(measured: float, ideal: float) -> float | None:
    """The share of the ideal gain that was reached: (measured - 1) / (ideal - 1); None if there is no ideal gain.

    Not measured / ideal: that would report "95 % reached" for a model that gained nothing of an ideal 1.05.
    """
    return None if ideal < 1.01 else (measured - 1) / (ideal - 1)


def _medians(rounds: Rounds) -> list[float]:
    return [statistics.median(seconds) for seconds in rounds]


def seconds_of(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """How long the call takes."""
    start = clock()
    call()
    return clock() - start


@contextmanager
def _no_collection() -> Iterator[None]:
    """Turn off Python's garbage collector, which would slow down some of the callables and not others."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
