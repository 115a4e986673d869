"""The time and memory that a run will need, stage by stage, and what it did need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from corp.calibration.batches import count_samples, placement
from corp.calibration.holdout import HoldOut, batch_count
from corp.calibration.memory import free_bytes
from corp.calibration.settings import Settings
from corp.calibration.statistics import Statistics
from corp.io.observer import Clock
from corp.measure.cost import count_params
from corp.measure.estimate import Estimate, Load, Machine, estimate_stages, measure_machine, summed
from corp.measure.footprint import resident_bytes
from corp.recipe import GAIN, Recipe
from corp.sites import AttentionSite
from corp.steps.allocation.search import samples_needed, usual_trials
from corp.steps.allocation.sensitivity import samples_alone, tried_alone
from corp.steps.run import Dense, Run
from corp.surgery.refit.layer import share_summed
from corp.surgery.refit.recording import samples_wanted
from corp.surgery.refit.replay import Block


def estimate_run(dense: Dense, run: Run, recipe: Recipe, stats: Statistics | None, blocks: list[Block]) -> Estimate:
    """The stages of a run with their time and memory; no stages if the number of samples is unknown."""
    model, sites, batches = dense.model, dense.sites, run.batches
    name = (run.origin or (stats.origin if stats else {})).get("model", type(model).__name__)
    what = f"pruning {name} ({count_params(model) / 1e6:.3f} M parameters, {placement(model)[0]}) {recipe.goal()}"
    samples = count_samples(batches) if batches is not None else stats and stats.samples
    if not samples or isinstance(batches, Iterator):
        return Estimate(f"{what}, from samples whose number is unknown", ())
    load, machine = _load(dense, run, recipe, samples, stats, blocks)
    stages = estimate_stages(model, sites, recipe, load, machine)
    tokens = max(load.tokens.values(), default=0)  # 0 with statistics, without data
    data = f"on {samples} samples of {tokens} tokens" if tokens else f"from the statistics of {samples} samples"
    device = placement(model)[0]
    return Estimate(f"{what} {data}", stages, resident_bytes(device), free_bytes(device))


def _load(
    dense: Dense, run: Run, recipe: Recipe, samples: int, stats: Statistics | None, blocks: list[Block]
) -> tuple[Load, Machine]:
    """The work of a run, and the speed of the machine."""
    model, sites, batches = dense.model, dense.sites, run.batches
    machine, tokens = measure_machine(model, sites, run.first(), run.forward)
    settings = run.settings or Settings()
    linear = [site.name for site in summed(sites) if not isinstance(site, AttentionSite)]
    taken = settings.per_sample(summed(sites), samples)
    counted = {name: min(tokens[name], n or tokens[name]) for name, n in taken.items()}
    rule, single = HoldOut.of(batches or ()), batches is None or (batch_count(batches) or 2) < 2
    fitted = {name: int(counted[name] * samples * (1 - rule.share)) for name in linear}
    alone = [site for site in sites if not isinstance(site, AttentionSite) and not recipe.skips(site.name)]
    searches = not single and recipe.min_agreement is None and recipe.has_target and recipe.allocate == GAIN
    tried = min(samples_needed(recipe, run.answers(sites)), int(samples * rule.share))
    refitted = min(samples, samples_wanted(recipe, blocks)) if blocks else 0
    return Load(
        samples,
        tokens,
        counted,
        calibrates=stats is None,
        trials=0 if single else usual_trials(recipe, sites, fitted),
        tried=tried,
        curves=recipe.has_target and recipe.allocate == GAIN,
        alone=min(tried, samples_alone(sites, tokens)) if searches else 0,
        tried_alone=frozenset(tried_alone(alone)),
        refitted=refitted,
        refit_share=max((share_summed(block, refitted) for block in blocks), default=1.0),
    ), machine


def outcome(watch: Clock, model: nn.Module) -> dict[str, Any] | None:
    """Measured times of the stages and peak memory, with the estimates; None without an estimate."""
    if watch.estimated is None:
        return None
    known = {stage.name: stage.seconds for stage in watch.estimated.stages}
    names = dict.fromkeys([*known, *watch.seconds])
    stages = [{"stage": n, "estimated": known.get(n, 0.0), "seconds": watch.seconds.get(n, 0.0)} for n in names]
    peak = resident_bytes(placement(model)[0], peak=True)
    return {"stages": stages, "memory": {"estimated": watch.estimated.memory, "peak": peak}}
