"""An observer that keeps what it is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from corp.io.observer import Advance, Observer
from corp.sites import Sites


class Recorder(Observer):
    """The notes, the sites, and every stage with how many units were done."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.stages: dict[str, int] = {}
        self.sites: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)

    def found(self, sites: Sites) -> None:
        self.sites = [site.name for site in sites]

    @contextmanager
    def stage(self, name: str, total: int | None, unit: str) -> Iterator[Advance]:
        self.stages[name] = 0

        def advance(done: int) -> None:
            self.stages[name] += done

        yield advance
