"""A budget of time: what narrower sites save is measured on this machine, not counted.

Copies of the model whose sites of one kind are narrower are timed against the dense model, interleaved. Time depends on
shapes alone, so they need no compensation. The time is interpolated linearly between the measured widths, and divided
among the sites of a kind in proportion to their operations.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from corp.calibration.batches import evaluating, placement, run
from corp.measure.timing import Ratio, complete, interleave, speed_up
from corp.measure.units import unit_costs
from corp.planning.plan import Plan
from corp.planning.site_plan import SitePlan
from corp.planning.widths import multiple_of, narrowed, rotated_part
from corp.recipe import COORDINATES, FAST, KINDS, ROUNDING_KEYS, Recipe
from corp.sites import MLPSite, Site, Sites, ValueSite
from corp.steps.allocation.budget import Budget, Sample
from corp.surgery.apply import shrink

PARTS = 1_000_000  # of the dense time: budgets are whole numbers
SHARES = (0.25, 0.5, 0.75)  # removed where the table is measured
ROUNDS, REPEATS = 10, 3
NOTHING = 0.01  # of the dense time: a kind is not pruned if removing half of it saves less

Timer = Callable[[nn.Module, nn.Module], Ratio]  # how many times as fast the second is as the first


class Time(NamedTuple):
    """Relative to the dense model, with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class LatencyBudget(Budget):
    """Costs are millionths of the dense time; `times` (D + 1,) is what a site costs at width 0, 1 … D."""

    times: Mapping[str, Tensor] = field(default_factory=dict)

    def saved(self, site: Site, width: int) -> int:
        times = self.times[site.name]
        return int(times[-1] - times[width])

    def price(self, site: Site) -> float | Tensor:
        return self.times[site.name]


class Clock:
    """The table of times of one model, measured once."""

    def __init__(self, model: nn.Module, sites: Sites, sample: Sample, recipe: Recipe) -> None:
        self.model, self.sites, self.recipe = model, sites, recipe
        self.sample = sample
        self.table = {kind: self._measure(kind) for kind in KINDS if any(site.kind == kind for site in sites)}
        units = unit_costs(model, sites, *sample)
        weights = {site.name: units[site.name].macs * site.width for site in sites}
        self.times = {}
        for site in sites:
            of_kind = sum(weights[other.name] for other in sites if other.kind == site.kind)
            share = weights[site.name] / of_kind if of_kind else 0.0
            self.times[site.name] = (PARTS * share * _by_width(self.table[site.kind], site.width)).round()

    def without_idle(self, recipe: Recipe) -> Recipe:
        """The recipe without kinds of sites whose pruning saves no time, as where kernels pad narrow heads."""
        idle = {kind: 0.0 for kind, rows in self.table.items() if _saved_at_half(rows) <= NOTHING}
        return replace(recipe, overrides={"**": idle, **recipe.overrides}) if idle else recipe  # the recipe's own win

    def budget(self, share: float) -> LatencyBudget:
        return LatencyBudget("latency", share, PARTS, {}, times=self.times)

    def predicted(self, widths: Mapping[str, int]) -> float:
        return self.budget(1.0).cost(self.sites, widths) / PARTS

    def time(self, widths: Mapping[str, int]) -> Time:
        """The time of a model with these widths, relative to the dense one."""
        ratio = compare_times(self.sample, self.model, narrow_copy(self.model, self.sites, widths, self.recipe))
        return Time(1 / ratio.value, 1 / ratio.high, 1 / ratio.low)

    def record(self) -> dict[str, Any]:
        """What was measured, and where."""
        device = placement(self.model)[0]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or device.type
        saved = {
            kind: [{"removed": 1 - kept, "saved": gain} for kept, gain in rows] for kind, rows in self.table.items()
        }
        return {"device": f"{device.type} ({name}), {torch.get_num_threads()} threads", "batch": 1, "table": saved}

    def _measure(self, kind: str) -> list[tuple[float, float]]:
        """Rows of (share kept, share of the dense time saved) for all sites of the kind, from the dense width down."""
        rows = [(1.0, 0.0)]
        if kind == "vo" and self.recipe.equal_heads:
            return rows  # values are as wide as queries and keys, and timed with them
        multiples = {site.name: self._multiple(site) for site in self.sites if site.kind == kind}
        for removed in SHARES:
            widths = {
                site.name: narrowed(site, removed, multiples[site.name]) for site in self.sites if site.kind == kind
            }
            if self.recipe.equal_heads and kind == "attn":
                widths |= {s.name: min(s.width, widths.get(s.attention, s.width)) for s in self.sites.values}
            own = [site for site in self.sites if site.kind == kind]
            kept = sum(widths[site.name] for site in own) / sum(site.width for site in own)
            if kept < rows[-1][0]:
                # A narrower site is slower only because of noise or odd kernels, which should not influence a plan.
                rows.append((kept, max(rows[-1][1], 1 - self.time(widths).value)))
        return rows

    def _multiple(self, site: Site) -> int:
        """The multiple that fills kernel tiles, if it leaves enough widths to choose from."""
        multiple = FAST[ROUNDING_KEYS[site.kind]]
        while multiple > 1 and 4 * multiple > site.width:
            multiple //= 2
        return max(multiple, multiple_of(site, self.recipe))


def compare_times(sample: Sample, dense: nn.Module, other: nn.Module) -> Ratio:
    """How many times as fast the second model is as the first, timed in turn."""
    calls = [complete(partial(run, model, *sample), placement(dense)[0]) for model in (dense, other)]
    with torch.no_grad(), evaluating(dense), evaluating(other):
        baseline, timed = interleave(calls, rounds=ROUNDS, repeats=REPEATS)
    return speed_up(baseline, timed)


def _saved_at_half(rows: Sequence[tuple[float, float]]) -> float:
    """The share of time saved by the narrowest width that keeps half or more."""
    return max(saved for kept, saved in rows if kept >= 0.5)


def narrow_copy(model: nn.Module, sites: Sites, widths: Mapping[str, int], recipe: Recipe) -> nn.Module:
    """A copy with these widths for timing; only its shapes are meaningful."""
    smaller = copy.deepcopy(model)
    plans = []
    for site in sites:
        keep = widths.get(site.name, site.width)
        if keep < site.width:
            kept = tuple([tuple(_first(site, keep))] * (1 if isinstance(site, MLPSite) else site.groups))
            plans.append(SitePlan(site.name, site.kind, site.width, 0.0, kept, False, (), 0.0, COORDINATES))
    shrink(smaller, sites, Plan(recipe, tuple(plans)))
    return smaller


def _first(site: Site, keep: int) -> Sequence[int]:
    """Some dimensions that may be kept together: whole pairs of rotated ones."""
    if isinstance(site, MLPSite | ValueSite) or not site.rotary:
        return range(keep)
    pairs = rotated_part(site, keep) // 2
    half = site.rotary_dims // 2
    plain = range(site.rotary_dims, site.rotary_dims + keep - 2 * pairs)
    return [*range(pairs), *range(half, half + pairs), *plain]


def _by_width(rows: Sequence[tuple[float, float]], width: int) -> Tensor:
    """The times (D + 1,) at width 0, 1 … D, from the savings at some shares kept; the time at width 0 is 0.

    Below the narrowest measured share, the last slope is extrapolated.
    """
    kept, saved = (list(column) for column in zip(*rows, strict=True))
    if len(rows) == 1:
        return torch.zeros(width + 1, dtype=torch.float64)
    slope = (saved[-1] - saved[-2]) / (kept[-2] - kept[-1])
    kept, saved = [*kept, 0.0], [*saved, saved[-1] + slope * kept[-1]]
    gained = np.interp(np.arange(width + 1) / width, kept[::-1], saved[::-1])
    return torch.from_numpy(gained[0] - gained)
