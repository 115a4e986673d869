"""Everything calibration leaves behind: one set of sums per site, and where they came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from corp.errors import StatisticsError
from corp.stats.grams import Grams
from corp.stats.moments import Moments


@dataclass
class Statistics:
    """Sums per site name. Two of them add: workers, machines, a resumed run.

    `weights` is the fingerprint of the dense weights they were taken with; `inputs` describes one
    sample of the data (shapes and dtypes), enough to count a model's operations later.
    """

    moments: dict[str, Moments] = field(default_factory=dict)
    grams: dict[str, Grams] = field(default_factory=dict)
    samples: int = 0
    weights: str = ""
    inputs: Any = None

    def __add__(self, other: Statistics) -> Statistics:
        if self.weights != other.weights:
            raise StatisticsError("these statistics were taken with different weights; they do not add")
        if self.moments.keys() != other.moments.keys() or self.grams.keys() != other.grams.keys():
            raise StatisticsError("these statistics cover different sites; they do not add")
        return Statistics(
            moments={name: sums + other.moments[name] for name, sums in self.moments.items()},
            grams={name: sums + other.grams[name] for name, sums in self.grams.items()},
            samples=self.samples + other.samples,
            weights=self.weights,
            inputs=self.inputs,
        )

    def to(self, device: torch.device) -> None:
        for moments in self.moments.values():
            moments.to(device)
        for grams in self.grams.values():
            grams.to(device)

    def of(self, name: str) -> Moments | Grams:
        """The sums of one site."""
        found = self.moments.get(name) or self.grams.get(name)
        if found is None:
            raise StatisticsError(f"no statistics of site {name!r}; calibrate this model with it included")
        return found
