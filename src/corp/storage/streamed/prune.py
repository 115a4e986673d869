"""prune_streamed: from a folder of weights to a folder of smaller ones, with one block in memory at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from corp.adapters.registry import find_sites
from corp.adapters.shell import placeholder, replace_parameters
from corp.calibration import workers
from corp.calibration.batches import Forward, count_samples, feed, first_batch, first_samples, without_cache
from corp.calibration.checkpoint import prepare_folder
from corp.calibration.memory import human
from corp.calibration.settings import Settings
from corp.calibration.statistics import Statistics
from corp.errors import DataError, ModelError, PlanError
from corp.io.files import lock_folder, new_folder, refuse_existing, tensor_header, writing
from corp.io.observer import SILENT, Bars, Observer
from corp.measure.cost import count_macs, count_params
from corp.numerics.place import Place
from corp.planning.plan import Plan
from corp.planning.report import Report
from corp.planning.widths import not_as_requested, require_prunable
from corp.recipe import GAIN, SHARED, Recipe
from corp.sites import Sites
from corp.steps.allocation.allocator import Allocation, Allocator
from corp.steps.count import sample_of
from corp.steps.plan import warn_of_notes
from corp.steps.result import Result
from corp.steps.run import Dense, Run, to_try
from corp.storage.folder import WEIGHTS, compact_manifest, describe_result, places_of
from corp.storage.streamed.memory import Need, needed
from corp.storage.streamed.passing import manners_of
from corp.storage.streamed.presence import Presence, open_folder
from corp.storage.streamed.streams import PRUNED, Store
from corp.storage.streamed.walk import Walk, joined, unplaced
from corp.storage.streamed.weights import Weights, contents
from corp.storage.tying import saved_state
from corp.surgery.apply import match, set_history, shrink
from corp.surgery.refit.repair import EXAMINED, find_blocks, require_whole, warn_of_few
from corp.surgery.refit.replay import Block, refusal
from corp.surgery.stand_in import sharing_copy


def prune_streamed(
    folder: str | Path,
    batches: Iterable[Any],
    recipe: Recipe,
    out: str | Path,
    *,
    forward: Forward | None = None,
    settings: Settings | None = None,
    origin: dict[str, Any] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: bool = False,
    observer: Observer | None = None,
) -> Report:
    """Prune the model in `folder` block by block into the folder `out`, which corp.load opens.

    For models larger than memory: only the weights of one block, of the embeddings and of the head are held; hidden
    states go to disk. `folder` is one of transformers' save_pretrained or of timm, with safetensors. `batches` are read
    once per block, so they must be a list or a loader that gives the same batches every time. The result is
    bit-identical to that of `prune` if `prune` runs no trials; a target under allocate="gain" takes two walks.
    settings.memory limits the memory. A killed run continues at its block when it is called again (settings.fresh
    starts over).
    """
    opened = open_folder(folder, device=device, dtype=dtype)
    run = Run(batches, forward, settings, origin, observer or (Bars() if progress else SILENT))
    return prune_opened(opened, run, recipe, Path(out))


def prune_opened(
    opened: Presence,
    run: Run,
    recipe: Recipe,
    target: Path,
    *,
    command: str | None = None,
    companions: Sequence[str | Path] = (),
) -> Report:
    """prune_streamed, for a model that is open already."""
    model, observer = opened.model, run.observer
    refuse_existing(target, overwrite=False)
    partial = target.with_name(f".{target.name}.partial")
    with without_cache(model):
        walk = _prepared(opened, run, recipe, Store(partial))
        _announce(need_of(walk), walk.settings.memory, observer)
        prepare_folder(partial, _identity(walk), fresh=walk.settings.fresh)
        with lock_folder(partial, "rank-0"):
            walk = _with_widths(walk)
            walk.run()
            result, smaller = _assembled(walk)
            with observer.stage(f"writing {target}", None, ""), new_folder(target) as folder:
                write_streamed(folder / WEIGHTS, smaller.model, smaller.weights)
                places = places_of([str(place) for place in companions], model, walk.origin)
                describe_result(result, folder, target, compact_manifest(result, target, command), places)
    shutil.rmtree(partial, ignore_errors=True)
    observer.finished(result.report.gained())
    return result.report


def estimate_opened(opened: Presence, run: Run, recipe: Recipe) -> Need:
    """The peak memory of prune_opened."""
    with without_cache(opened.model):
        return need_of(_prepared(opened, run, recipe, Store(Path())))


def need_of(walk: Walk) -> Need:
    """The peak memory of the walk."""
    sites = [list(walk.sites_of(block)) for block in walk.blocks]
    return needed(walk.presence, walk.blocks, sites, walk.batches, walk.recipe, walk.refits)


def _require_streamable(recipe: Recipe, batches: Iterable[Any] | None) -> None:
    """Refuse, before any work, what needs the whole model or all statistics at once."""
    if isinstance(batches, Iterator):
        raise DataError("block by block, data is read once per block: give a list or a loader, not an iterator")
    if workers.current().world > 1:
        raise PlanError("pruning block by block runs in one process; start it without torchrun")
    reasons = {
        "min_agreement": (recipe.min_agreement is not None, "tries whole models; give shares"),
        "target_latency": (recipe.target_latency is not None, "times whole models; give shares or target_macs"),
        "tokens": (recipe.tokens is not None, "is fitted on the whole model; leave it out"),
        "output": (bool(recipe.output), "factors the output head, which is no block; give output=0"),
        "rotary='shared'": (recipe.rotary == SHARED, "looks at all layers before the first; give rotary='free'"),
    }
    for name, (asked, reason) in reasons.items():
        if asked:
            raise PlanError(f"a model cannot be pruned block by block under this recipe: {name} {reason}")


def _prepared(presence: Presence, run: Run, recipe: Recipe, store: Store) -> Walk:
    """Everything that must be known before the first block: sites, blocks, widths, fingerprint."""
    _require_streamable(recipe, run.batches)
    model, weights, forward, first = presence.model, presence.weights, run.forward, run.first()
    if run.batches is None or first is None:
        raise DataError("no calibration data: `batches` was empty")
    presence.load_resident()
    few, some = (first, first) if forward else (first_samples(first, EXAMINED), to_try(first))
    with run.observer.stage("looking at the model", None, ""), presence.visiting():
        sites = find_sites(model, some, forward)
        require_prunable(sites, recipe)
        blocks = _blocks(model, sites, recipe, [few], forward)
        manners = manners_of(model, list(sites), [b.name for b in blocks], lambda: feed(model, few, forward))
    dense = Dense(model, sites, weights.fingerprint(model))
    presence.keep_only([block.name for block in blocks])
    unknown, settings, place = Allocation({}, {}), run.settings or Settings(), Place.on(weights.device)
    return Walk(
        presence, dense, blocks, manners, recipe, unknown, run.batches, settings, store, run.observer,
        forward, recipe.refits, dict(run.origin or {}), place,
    )  # fmt: skip


def _blocks(model: nn.Module, sites: Sites, recipe: Recipe, batches: list[Any], forward: Forward | None) -> list[Block]:
    try:
        blocks = find_blocks(model, sites, recipe, batches, forward)
        if fed := next((block.name for block in blocks if block.fed), None):
            raise refusal(f"{fed} takes something from earlier blocks that is not their unchanged output")
    except PlanError as error:
        reason = str(error).removeprefix("this model cannot be refitted: ")
        raise ModelError(f"this model cannot be pruned block by block: {reason}; prune it whole") from error
    return blocks


def _with_widths(walk: Walk) -> Walk:
    """The walk with the width of every site; a budget over all blocks takes a walk of its own."""
    recipe, model, sites = walk.recipe, walk.model, walk.dense.sites
    curves = walk.curves() if recipe.has_target and recipe.allocate == GAIN else {}
    empty = Statistics({}, 0, walk.dense.weights, None, {})
    sample = sample_of(model, first_batch(walk.batches), walk.forward)
    with walk.presence.visiting():
        found = Allocator(model, sites, empty, recipe, walk.observer, sample, curves).allocate(recipe)
    outside = [site for site in unplaced(sites, walk.blocks) if found.widths[site.name] < site.width]
    if outside:
        raise PlanError(f"{outside[0].name} is in no block of the model; leave it alone with skip=[...]")
    return replace(walk, found=found)


def _announce(need: Need, allowed: int | None, observer: Observer) -> None:
    """Announce the memory; refuse more than is allowed."""
    if allowed is not None and need.total > allowed:
        raise PlanError(
            f"{need.line()}; {human(allowed)} are allowed: give more, smaller batches or fewer sequential_samples"
        )
    observer.note(need.line())


def _identity(walk: Walk) -> dict[str, Any]:
    """What must be the same for a killed run to be continued."""
    return {
        "weights": walk.dense.weights,
        "recipe": walk.recipe.to_dict(),
        "tokens": walk.settings.tokens,
        "causal": walk.settings.causal,
        "samples in the data": count_samples(walk.batches),
        "dtype": str(walk.presence.weights.dtype),
        **walk.origin,
    }


def _assembled(walk: Walk) -> tuple[Result, Presence]:
    """The result, whose model is a shell, and the location of its weights; it must reproduce the end of the refit."""
    store, count = walk.store, len(walk.blocks)
    records = [record for number in range(count) if (record := store.record(number)) is not None]
    plan = joined(records, walk.recipe, walk.dense.sites, walk.blocks if walk.refits else [])
    plan = plan.noting(*not_as_requested(walk.dense.sites, walk.recipe))
    if walk.recipe.searches:
        plan = plan.noting("no models were tried: block by block, fixed rules divide the budget between heads and MLPs")
    warn_of_notes(plan)
    warn_of_few([name for record in records for name in record.get("few", [])])
    smaller = pruned_shell(walk.presence, walk.dense.sites, plan, [store.shard(number) for number in range(count)])
    first = first_batch(walk.batches)
    sample, models = sample_of(walk.model, first, walk.forward), (walk.model, smaller.model)
    with smaller.visiting():
        if walk.refits:
            end = store.read_stream(PRUNED, count, 0, walk.presence.weights.device)
            require_whole(smaller.model, walk.blocks, end, lambda: feed(smaller.model, first, walk.forward))
        with walk.presence.visiting():  # operations are counted as the dense model's blocks come and go
            dense, pruned = (count_macs(model, *sample) for model in models)
    report = Report(plan, (count_params(walk.model), count_params(smaller.model)), (dense, pruned))
    return Result(smaller.model, plan, report, walk.origin), smaller


def pruned_shell(dense: Presence, sites: Sites, plan: Plan, shards: Sequence[Path]) -> Presence:
    """The smaller model: all outside the blocks is the dense one's, blocks are read from shards when they run."""
    smaller = sharing_copy(dense.model)
    shared = {id(p): p for p in smaller.parameters()}
    dtype, device = dense.weights.dtype, dense.weights.device
    for group in match(sites, plan):  # one by one: a narrowed layer takes memory until it is a placeholder again
        shrink(smaller, sites, replace(plan, sites=tuple(site_plan for _, site_plan in group)))
        made = [p for p in smaller.parameters() if id(p) not in shared]
        replace_parameters(smaller, {id(p): placeholder(p, dtype, device) for p in made})
        shared |= {id(p): p for p in smaller.parameters()}
    held = contents(shards)
    places = {name: held.get(name) or dense.weights.places[name] for name in saved_state(smaller)}
    set_history(smaller, (plan,))
    presence = Presence(smaller, Weights(places, dtype, device), dense.units)
    presence.load_buffers()
    return presence


def write_streamed(path: Path, model: nn.Module, weights: Weights) -> None:
    """Write a safetensors file of the model's tensors, one by one; the same bytes as safetensors writes."""
    state = model.state_dict()
    kinds = {name: weights.dtype if state[name].is_floating_point() else state[name].dtype for name in weights.places}
    order, header = tensor_header({name: (kind, state[name].shape) for name, kind in kinds.items()})
    with writing(path), path.open("wb") as file:
        file.write(header)
        for _, tensor in weights.each(order):
            file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
