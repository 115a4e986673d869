"""Observers of a run: they receive stages with their progress, notes, and how long each stage took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

Advance: TypeAlias = Callable[[int], None]


class Observer:
    """A silent observer. Subclasses show progress and notes."""

    @contextmanager
    def stage(self, name: str, total: int | None, unit: str) -> Iterator[Advance]:
        """Follow a stage of at most `total` units (None: unknown); yields a function to call with the units done."""
        yield lambda _done: None

    def note(self, message: str) -> None:
        """Receive one sentence that a user should read."""

    def estimate(self, make: Callable[[], Any]) -> Any:
        """Receive an estimate of the run: `make` computes it, and is called only if it is wanted.

        The returned value, a `corp.measure.estimate.Estimate` or None, is shown beside the outcome in the report.
        """

    def finished(self, gained: str) -> None:
        """Receive one line that says what the run gained."""

    def found(self, sites: Any) -> None:
        """Receive the `corp.sites.Sites` of the model, before any long work."""

    def calibrated(self, stats: Any) -> Any:
        """Receive the `corp.Statistics` of the data pass; the returned statistics are used for planning."""
        return stats


class Bars(Observer):
    """Progress bars with the time left, in a terminal or a notebook; silent elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self.console = console or Console(stderr=True)

    @contextmanager
    def stage(self, name: str, total: int | None, unit: str) -> Iterator[Advance]:
        from rich import progress as rich

        rate, left = rich.TextColumn("{task.fields[rate]}"), rich.TimeRemainingColumn()
        ends = (rich.MofNCompleteColumn(), rate, left) if total else (rich.TimeElapsedColumn(),)
        visible = self.console.is_terminal or self.console.is_jupyter
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), *ends)
        with rich.Progress(*columns, console=self.console, disable=not visible) as bars:
            task = bars.add_task(name, total=total, rate="")

            def advance(done: int) -> None:
                speed = bars.tasks[0].speed
                bars.update(task, advance=done, rate=f"{speed:.1f} {unit}/s" if speed else "")

            yield advance
            bars.update(task, total=bars.tasks[0].completed)  # the total may be a bound: the stage is over

    def estimate(self, make: Callable[[], Any]) -> Any:
        made = make()
        for line in (made.line(), *made.advice()):
            self.note(line)
        return made

    def finished(self, gained: str) -> None:
        self.note(gained)

    def note(self, message: str) -> None:
        self.console.print(message, style="dim", markup=False, soft_wrap=True)


class Clock(Observer):
    """Forwards everything to another observer, and records how long every stage took, without stages inside it."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.seconds: dict[str, float] = {}
        self.estimated: Any = None  # the first estimate
        self._inside = [0.0]  # seconds of finished stages inside the current ones, outermost first

    @contextmanager
    def stage(self, name: str, total: int | None, unit: str) -> Iterator[Advance]:
        start = time.perf_counter()
        self._inside.append(0.0)
        try:
            with self.observer.stage(name, total, unit) as advance:
                yield advance
        finally:
            took = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + took - self._inside.pop()
            self._inside[-1] += took

    def note(self, message: str) -> None:
        self.observer.note(message)

    def estimate(self, make: Callable[[], Any]) -> Any:
        if self.estimated is None:
            self.estimated = self.observer.estimate(make)
        return self.estimated

    def finished(self, gained: str) -> None:
        self.observer.finished(gained)

    def found(self, sites: Any) -> None:
        self.observer.found(sites)

    def calibrated(self, stats: Any) -> Any:
        return self.observer.calibrated(stats)


def duration(seconds: float) -> str:
    """A duration in the usual unit: 40 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


SILENT = Observer()
_seconds: ContextVar[dict[str, float] | None] = ContextVar("seconds", default=None)


@contextmanager
def timing() -> Iterator[dict[str, float]]:
    """Within this context, the seconds of every step are added to the yielded dictionary."""
    seconds: dict[str, float] = {}
    token = _seconds.set(seconds)
    try:
        yield seconds
    finally:
        _seconds.reset(token)


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Count the time spent in this context as that of `step`, if it is being measured."""
    seconds, start = _seconds.get(), time.perf_counter()
    try:
        yield
    finally:
        if seconds is not None:
            seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - start
