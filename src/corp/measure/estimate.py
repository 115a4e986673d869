"""The estimated time and memory of a run, stage by stage, from shapes and a short test of the machine.

Every formula counts multiply-accumulates of the largest terms; the speed of the machine is measured. The factors
say how much longer a step takes than one product of that size, and were fitted on runs of many shapes
(benchmarks/estimate.py recomputes them). D is the width of a site's input, d that of a head, N the number of samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from corp.calibration.batches import Forward, evaluating, feed, first_samples, move, placement, size_of
from corp.calibration.grams import CAUSAL_BLOCKS, folds_after
from corp.calibration.memory import human, site_bytes, working_bytes
from corp.io.observer import duration
from corp.io.tables import Tabular
from corp.measure.footprint import weight_bytes
from corp.measure.timing import seconds_of
from corp.measure.units import tokens_at
from corp.recipe import SUBSPACE, Recipe
from corp.sites import AttentionSite, LinearSite, MLPSite, OutputHead, Site, Sites, projection_at

FIT, SKETCH, ELIMINATE, VALUES = 2.6, 1.8, 3.0, 12.0  # D^3, float64: plan a layer, plan it for a trial, choose inputs
CURVE = 8.0  # D^3: eliminate all inputs, of which the last hundreds take time that is not arithmetic
TOUCH = 1300.0  # D^2: the reads and writes of a fit, in products that take the same time
HEADS = {SUBSPACE: (55.0, 1.5)}  # N d^3 of a head: to plan it, and for a trial
COORDINATES = (22.0, 10.0)
ROTATED = 60.0  # d^3 of a head
SUMS = 1.3  # times float32 products: the sums of calibration and refit
ATTENDED = 2.6  # likewise: the small products of keys under the attention of single queries
CHECK = 1.0  # D^3: the self-check of a layer
STREAMS = 8  # hidden states that the refit holds per sample, including the input of a block's last layer
REPLAYS = 1.8  # dense blocks that take as long as what the refit runs: the dense one, and the narrower one in parts
SOLVES = 7.0  # D^3: a layer's refit
BEHIND = 0.6  # of a pass: to measure a sensitivity, earlier blocks do not run again
JUDGED = 0.6  # of a pass over the held-out samples: trials are narrower, and end early if they are worse
SITE = 0.012  # seconds that a step takes at the smallest site
TEST_SECONDS = 0.4  # the most that is spent on timing a forward pass
COSTLY = 30.0  # seconds: a longer stage that also takes longer than the data pass is mentioned


class Machine(NamedTuple):
    """The measured speed: multiply-accumulates per second in float32 and float64, and seconds per sample."""

    single: float
    double: float
    forward: float


class Load(NamedTuple):
    """The work of a run: samples, and how many of them trial models and the refit use."""

    samples: int
    tokens: Mapping[str, int]  # of one sample, at every site
    counted: Mapping[str, int]  # how many of them are summed, or queries whose attention is computed
    calibrates: bool = True  # False if statistics are given
    trials: int = 0
    tried: int = 0  # samples on which every trial model is compared
    curves: bool = False  # whether errors at every width are needed
    alone: int = 0  # samples on which every model with one narrower site is compared
    tried_alone: frozenset[str] = frozenset()  # the sites that are narrowed alone
    refitted: int = 0
    refit_share: float = 1.0  # of the tokens of those samples that the refit sums


class Stage(NamedTuple):
    """One stage of a run, under the name that the observer receives."""

    name: str
    seconds: float
    memory: int  # bytes in addition to the model
    avoid: str = ""  # what makes it cheaper


@dataclass(frozen=True, repr=False)
class Estimate(Tabular):
    """What will be done, on which data, with how much time and memory; stages are empty if that is unknown."""

    what: str
    stages: tuple[Stage, ...]
    base: int = 0  # bytes that the process holds before the run
    free: int | None = None  # bytes that it may use in addition, if known

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def memory(self) -> int:
        """The peak of the process, in bytes."""
        return self.base + max((stage.memory for stage in self.stages), default=0)

    def line(self) -> str:
        """What will be done and how long that takes, in one line."""
        if not self.stages:
            return f"{self.what}; the time is unknown, because the number of samples is unknown"
        return f"{self.what}: about {duration(self.seconds)}, {human(self.memory)} of memory"

    def advice(self) -> list[str]:
        """A sentence on every stage that costs far more than the data pass, with the option that avoids it."""
        data = max(COSTLY, *(s.seconds for s in self.stages if not s.avoid))
        return self._too_large() + [
            f"about {duration(stage.seconds)} of that is for {stage.name}; {stage.avoid}"
            for stage in self.stages
            if stage.seconds > data and stage.avoid
        ]

    def _too_large(self) -> list[str]:
        if self.free is None or self.memory - self.base <= self.free:
            return []
        there = human(self.base + self.free)
        return [f"that is more than the available {there}; corp.prune_streamed holds one block at a time"]

    def table(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        rows = [(s.name, duration(s.seconds), human(self.base + s.memory)) for s in self.stages]
        return self.what, ("stage", "time", "memory"), [*rows, ("all", duration(self.seconds), human(self.memory))]

    def to_dict(self) -> dict[str, Any]:
        stages = [{"stage": s.name, "seconds": s.seconds, "memory": self.base + s.memory} for s in self.stages]
        return {"what": self.what, "seconds": self.seconds, "memory": self.memory, "stages": stages}


def estimate_stages(model: nn.Module, sites: Sites, recipe: Recipe, load: Load, machine: Machine) -> tuple[Stage, ...]:
    """The stages of a run of `corp.prune`, in order."""
    own = [site for site in sites if not recipe.skips(site.name)]
    linear = [site for site in own if not isinstance(site, AttentionSite)]
    weights, sums = weight_bytes(model), sum(site_bytes(site, load.samples) for site in summed(sites))
    solving = sums + 64 * max((site.inputs for site in linear), default=0) ** 2  # eight matrices per site
    known, found = load.curves, []
    if load.calibrates:
        seconds = load.samples * machine.forward + sum(sum_seconds(site, load, machine) for site in summed(sites))
        memory = sums + working_bytes(summed(sites), load.samples)
        found.append(Stage(f"calibrating on {placement(model)[0]}", seconds, memory))
    if load.curves:
        seconds = sum(curve_seconds(site, machine) for site in linear)
        found.append(Stage("error curves", seconds, solving, "allocate='uniform' skips it"))
    if load.alone:
        tried = [site for site in linear if site.name in load.tried_alone]
        each = [plan_seconds(site, recipe, load, machine, trial=True, known=known) for site in tried]
        seconds = sum(each) + (1 + BEHIND * len(each)) * load.alone * machine.forward
        found.append(Stage("sensitivities", seconds, solving + weights, "allocate='uniform' skips it"))
    if load.trials:
        sketches = sum(plan_seconds(site, recipe, load, machine, trial=True, known=known) for site in own)
        seconds = load.trials * (sketches + JUDGED * load.tried * machine.forward)
        found.append(
            Stage(
                "trying widths",
                seconds,
                solving + weights,
                "rank='combined' tries fewer models, allocate='uniform' none",
            )
        )
    seconds = sum(plan_seconds(site, recipe, load, machine, known=known) for site in own)
    found.append(Stage("planning", seconds, solving + weights, _cheaper(own, recipe)))
    checked = sum(_cube(site.inputs, CHECK) for site in linear if _pruned(site, recipe)) / machine.double
    found.append(Stage("checking", checked + SITE * len(own), solving + 2 * weights))
    if load.refitted:
        wide = max((projection_at(model, site.down).weight.shape[0] for site in linear), default=0)
        held = sums + 2 * weights + STREAMS * 4 * load.refitted * max(load.tokens.values()) * wide
        if not load.calibrates:  # otherwise calibration computes it on the way
            found.append(Stage("recording for the refit", load.refitted * machine.forward, held))
        seconds = load.refitted * REPLAYS * machine.forward + sum(refit_seconds(s, load, machine) for s in linear)
        found.append(Stage("refitting", seconds, held, "sequential=False skips it"))
    return tuple(found)


def sum_seconds(site: Site | OutputHead, load: Load, machine: Machine) -> float:
    """The time for the sums of one site: D^2 / 2 per token, or for queries and keys d^2 per token and head.

    Rotary heads take d^2 more for every key that one of the counted queries attends to.
    """
    if isinstance(site, AttentionSite):
        seen = load.tokens[site.name] / 2 if site.causal else load.tokens[site.name]
        rotated = ATTENDED * load.counted[site.name] * seen * site.rotary_dims**2
        plain = SUMS * load.tokens[site.name] * site.width**2
        return load.samples * site.heads * (plain + rotated) / machine.single
    return SUMS * load.samples * load.counted[site.name] * site.inputs**2 / 2 / machine.single


def curve_seconds(site: Site, machine: Machine) -> float:
    """The time for an error curve: elimination of an MLP's channels, or basis and fits of values."""
    if isinstance(site, AttentionSite):
        return 0.0
    factor = CURVE if isinstance(site, MLPSite) else VALUES + 8 * SKETCH / 2
    return SITE + _cube(site.inputs, factor) / machine.double


def plan_seconds(
    site: Site, recipe: Recipe, load: Load, machine: Machine, *, trial: bool = False, known: bool = False
) -> float:
    """The time to choose, fit and predict at one site; a trial only fits, and `known` elimination paths are reused."""
    if not _pruned(site, recipe):
        return 0.0
    if isinstance(site, AttentionSite):
        return _head_seconds(site, recipe, load, machine, trial=trial)
    factor = SKETCH if trial else FIT
    if isinstance(site, MLPSite):
        factor += ELIMINATE if recipe.rank == "exact" and not known else 0.0
    else:
        factor += VALUES if recipe.vo_basis == SUBSPACE else 0.0
    return SITE + _cube(site.inputs, factor) / machine.double


def refit_seconds(site: LinearSite, load: Load, machine: Machine) -> float:
    """The time for the sums of one layer's input, D^2 per token, and its solves."""
    tokens = load.refitted * load.tokens[site.name] * load.refit_share
    return SITE + SUMS * tokens * site.inputs**2 / machine.single + _cube(site.inputs, SOLVES) / machine.double


def _head_seconds(site: AttentionSite, recipe: Recipe, load: Load, machine: Machine, *, trial: bool) -> float:
    """The time of conjugate gradients over the Grams of N entries, N d^3 a step, or their folded sum, d^5 / 2."""
    d = site.plain_width
    entries = load.samples * (CAUSAL_BLOCKS if site.causal else 1)
    entries = d * d // 2 if entries > folds_after(d) else entries
    factor = HEADS.get(recipe.attn_basis, COORDINATES)[trial]
    work = factor * entries * d**3 + ROTATED * site.rotary_dims**3
    return SITE + site.heads * ((0.0 if trial else SITE) + work / machine.double)


def _cube(width: int, factor: float = 1.0) -> float:
    """factor D^3, plus the cost of reading and writing D^2 numbers."""
    return factor * (width**3 + TOUCH / FIT * width**2)


def _pruned(site: Site, recipe: Recipe) -> bool:
    return recipe.has_target or recipe.sparsity(site.kind, site.name) > 0


def summed(sites: Sites) -> list[Site | OutputHead]:
    """Everything in the model whose inputs calibration sums."""
    return [*sites, *([sites.output] if sites.output else [])]


def _cheaper(sites: list[Site], recipe: Recipe) -> str:
    """The setting that makes planning of these sites cheaper."""
    widest = max(sites, key=lambda site: site.width)
    if isinstance(widest, MLPSite) and recipe.rank == "exact":
        return f"rank='combined' does not eliminate the {widest.width} channels of an MLP one by one"
    return "attn_basis='coordinates' is faster" if recipe.attn_basis == SUBSPACE else ""


def measure_machine(
    model: nn.Module, sites: Sites, batch: Any, forward: Forward | None
) -> tuple[Machine, dict[str, int]]:
    """The speed of products and of the model, and the tokens of one sample at every site; below a second.

    `batch` is the first one of the data; as many of its samples are run as fit into that time. It is None if there are
    only statistics.
    """
    single, double = (_products(dtype) for dtype in (torch.float32, torch.float64))
    if batch is None:
        return Machine(single, double, 0.0), dict.fromkeys([site.name for site in summed(sites)], 0)
    one = batch if forward is not None else first_samples(batch, 1)
    with torch.no_grad(), evaluating(model):
        moved = one if forward is not None else move(one, *placement(model))
        tokens = tokens_at(model, sites, moved, forward)  # the first pass is slow, so it is not timed
        seconds = seconds_of(lambda: feed(model, one, forward)) / size_of(one)
        count = min(size_of(batch), int(TEST_SECONDS / seconds))
        if forward is None and count > 1:
            some = first_samples(batch, count)
            seconds = seconds_of(lambda: feed(model, some)) / size_of(some)
    each = {name: -(-number // size_of(one)) for name, number in tokens.items()}
    if sites.output is not None:
        each[sites.output.name] = max(each.values())
    return Machine(single, double, seconds), each


def _products(dtype: torch.dtype) -> float:
    """Multiply-accumulates per second of a square matrix product, in the best of four runs."""
    a = torch.ones(512, 512, dtype=dtype)
    return float(512**3 / min(seconds_of(lambda: a @ a) for _ in range(4)))
