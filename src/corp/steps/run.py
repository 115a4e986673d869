"""The objects of one run: the dense model with its sites and weights, the data, and the observer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from corp.adapters.registry import find_sites, require_module
from corp.calibration.batches import (
    Forward,
    describe,
    first_batch,
    first_samples,
    inputs_of,
    move,
    placement,
)
from corp.calibration.holdout import HoldOut
from corp.calibration.settings import Settings
from corp.calibration.statistics import Statistics
from corp.errors import StatisticsError
from corp.io.observer import Observer
from corp.numerics.place import Place
from corp.planning.widths import require_prunable, require_recipe
from corp.recipe import Recipe
from corp.sites import Sites, fingerprint, site_devices
from corp.surgery.apply import history, set_history
from corp.surgery.dispatch import require_present, require_weights
from corp.surgery.opened import opened

TRIED_OUT, POSITIONS = 4, 1024  # samples on which sites are verified; fewer of long texts, but never one alone


class Dense(NamedTuple):
    """The dense model of one call: its sites are found once, and its weights are hashed once."""

    model: nn.Module
    sites: Sites
    weights: str

    @classmethod
    def of(cls, model: nn.Module, recipe: Recipe | None = None, run: Run | None = None) -> Dense:
        """The model with its sites, verified on the first batch of a run if there is one."""
        if recipe is not None:
            require_recipe(recipe)
        require_module(model)
        require_present(model)
        if run is not None:
            require_weights(model)
        apart = opened(model)
        if apart is not model:
            set_history(apart, history(model))
        some = None if run is None else run.first()
        some = some if run is None or run.forward is not None else to_try(some)
        sites = find_sites(apart) if run is None else find_sites(apart, some, run.forward)
        if recipe is not None:
            require_prunable(sites, recipe)  # before the long work
        return cls(apart, sites, fingerprint(apart))

    def covered(self, stats: Statistics) -> Dense:
        """Without sites that the calibration data did not reach."""
        missing = [s for s in self.sites if not {s.name, getattr(s, "plain_name", s.name)} & set(stats.sums)]
        return self._replace(sites=self.sites.refusing(missing, "nothing of the calibration data reached it"))

    def placed(self, stats: Statistics, device: torch.device | str | None, observer: Observer) -> Statistics:
        """The statistics, each site's on the device where it is processed: `device`, or that of the site's weights."""
        homes = site_devices(self.model, self.sites)
        places = {name: Place.on(home if device is None else torch.device(device)) for name, home in homes.items()}
        wanted = {str(home) for home in homes.values()} if device is None else {str(device)}
        if wanted != {"cpu"}:
            observer.note(f"fits run on {', '.join(sorted({str(place) for place in places.values()}))}")
        return stats.at(places)

    def require(self, claims: Mapping[str, str]) -> None:
        for what, weights in claims.items():
            if weights and weights != self.weights:
                raise StatisticsError(
                    f"the {what} belong to other weights than this model's; calibrate this model, or load those weights"
                )


class Run(NamedTuple):
    """What stays the same during a run: the data, how it is fed and collected, and the observer."""

    batches: Iterable[Any] | None
    forward: Forward | None
    settings: Settings | None
    origin: dict[str, Any] | None
    observer: Observer
    device: torch.device | str | None = None  # of the fits

    @property
    def can_try(self) -> bool:
        """Whether some batches can be held out, to try models on."""
        return self.batches is not None and HoldOut.of(self.batches).share > 0

    def first(self) -> Any:
        """The first batch; None if reading it would consume it."""
        if self.batches is None or isinstance(self.batches, Iterator):
            return None
        return first_batch(self.batches)

    def inputs(self, model: nn.Module) -> Any:
        """The shapes of one sample, as calibration will record them; None if they cannot be recorded."""
        first = self.first() if self.forward is None else None
        return None if first is None else describe(move(first, *placement(model)))

    def answers(self, sites: Sites) -> int:
        """How many answers the model gives for a sample: one, or one per token of a text."""
        first = inputs_of(self.first()) if sites.output is not None else None
        values = list(first.values()) if isinstance(first, Mapping) else [first]
        return next((x.shape[1] for x in values if isinstance(x, Tensor) and x.dim() > 1), 1)


def to_try(batch: Any) -> Any:
    """The first samples of a batch, enough to verify sites on."""
    inputs = inputs_of(batch)
    first = next(iter(inputs.values()), None) if isinstance(inputs, Mapping) else inputs
    positions = 1
    if isinstance(first, Tensor) and first.dim() == 2 and not first.is_floating_point():  # texts (samples, positions)
        positions = max(1, first.shape[1])
    return first_samples(batch, max(2, min(TRIED_OUT, POSITIONS // positions)))
