"""Which tokens of a vision transformer are merged: a small record that is part of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from corp.errors import PlanError


@dataclass(frozen=True)
class Merging:
    """What is merged in a model: `schedule[i]` tokens in block i of the container called `blocks`.

    The first `prefix` tokens are never merged. With `read`, the last block computes the first `read` tokens only,
    which is exact where the model reads no others. With `unmerge`, every patch gets the value of its group at the end,
    for models that read patches: shapes are then those of the dense model.
    """

    blocks: str
    schedule: tuple[int, ...]
    prefix: int
    read: int | None = None
    unmerge: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", tuple(self.schedule))  # a file has a list
        for name, value in (("prefix", self.prefix), ("read", self.read), *(("schedule", r) for r in self.schedule)):
            least = 1 if name == "read" else 0
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise PlanError(f"merging: {name} has {value!r}, which is not a whole number >= {least}")
        if not isinstance(self.blocks, str) or not isinstance(self.unmerge, bool) or not self.schedule:
            raise PlanError("merging: blocks is a module's name, unmerge True or False, schedule a number per block")
        if self.read is not None and (self.unmerge or self.read > self.prefix or self.schedule[-1]):
            raise PlanError(
                f"merging: a last block that computes {self.read} tokens has nothing to merge or unmerge; with read, "
                f"schedule ends in 0, unmerge is False and read is at most prefix ({self.prefix})"
            )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "schedule": list(self.schedule)}

    @classmethod
    def from_dict(cls, raw: object) -> Merging:
        known = {f.name for f in fields(cls)}
        if not isinstance(raw, Mapping) or not {"blocks", "schedule", "prefix"} <= set(raw) <= known:
            raise PlanError(f"merging is a JSON object with {', '.join(sorted(known))}, not {raw!r}")
        if not isinstance(raw["schedule"], list | tuple):
            raise PlanError(f"merging: schedule is a list of numbers, not {raw['schedule']!r}")
        return cls(**raw)
