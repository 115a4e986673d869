"""What corp eval measured of one model, images or texts alike: a line of a table, and an object of --json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from corp.measure.intervals import Interval

PERCENT = ("top1", "top5", "top1_difference", "agreement")
FORMATS = {"perplexity": ".3f", "perplexity_ratio": ".3f"}
Evaluated: TypeAlias = tuple[dict[str, Any], Callable[[], None]]  # what --json prints, and what shows it as tables


@dataclass
class Row:
    """A model, under the name it was given; `extra` is what is no number with an interval."""

    name: str
    params: int
    numbers: dict[str, Interval | None]
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        numbers = {name: found and found.to_dict() for name, found in self.numbers.items()}
        return {"model": self.name, "params": self.params, **numbers, **self.extra}

    def cells(self) -> list[str]:
        return [self.name, f"{self.params / 1e6:.3f} M", *(_cell(*number) for number in self.numbers.items())]


def _cell(name: str, found: Interval | None) -> str:
    if found is None:
        return "–"
    return f"{found.map(lambda end: 100 * end):.1f}" if name in PERCENT else format(found, FORMATS.get(name, ".4f"))


def known_of(intervals: Mapping[str, Interval | None], names: tuple[str, ...], known: tuple[str, ...]) -> Any:
    """The intervals under `names`; None for what is not `known`: that a model is like itself is no news."""
    return {name: intervals.get(name) if name in known else None for name in names}
