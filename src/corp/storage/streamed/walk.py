"""The walk over the blocks: calibrate, plan, apply and refit one, write it, and continue with its hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from corp.calibration.batches import Forward, count_samples, enumerate_batches, feed, size_of
from corp.calibration.collector import Collector, Cursor
from corp.calibration.holdout import HoldOut
from corp.calibration.hooks import block_of
from corp.calibration.settings import Settings
from corp.calibration.statistics import Statistics
from corp.io.observer import SILENT, Observer
from corp.numerics.place import Place
from corp.planning.plan import Plan
from corp.recipe import Recipe
from corp.sites import Site, Sites
from corp.steps.allocation.allocator import Allocation
from corp.steps.allocation.curves import Curve, site_curves
from corp.steps.plan import plan_sites
from corp.steps.run import Dense
from corp.storage.streamed.passing import Manners, through, up_to
from corp.storage.streamed.presence import Presence
from corp.storage.streamed.streams import DENSE, FIRST, PRUNED, Store
from corp.surgery.apply import narrowed_copy
from corp.surgery.refit.recording import Recorder, samples_wanted
from corp.surgery.refit.repair import Repair
from corp.surgery.refit.replay import Block, Enough, Passage, inside
from corp.surgery.self_check import require_agreement, verify


@dataclass(frozen=True)
class Walk:
    """Everything that stays the same from block to block."""

    presence: Presence
    dense: Dense  # with all sites
    blocks: Sequence[Block]
    manners: Manners
    recipe: Recipe
    found: Allocation
    batches: Iterable[Any]
    settings: Settings
    store: Store
    observer: Observer
    forward: Forward | None
    refits: bool
    origin: dict[str, Any]
    place: Place

    @property
    def model(self) -> nn.Module:
        return self.presence.model

    def sites_of(self, block: Block) -> Sites:
        """The sites of this block."""
        own = [site for site in self.dense.sites if block_of(inside(site)) == block.name]
        return Sites(own, adapter=self.dense.sites.adapter)

    def curves(self) -> dict[str, Curve]:
        """The error of every site at every width, from a first walk, for a budget over all blocks."""
        found: dict[str, Curve] = {}
        with self.observer.stage("error curves block by block", len(self.blocks), "blocks") as advance:
            for number, block in enumerate(self.blocks):
                if (known := self.store.read_curves(number)) is None:
                    with self.presence.held(block.name):
                        known = self._curves(number, block)
                found |= known
                advance(1)
        return found

    def _curves(self, number: int, block: Block) -> dict[str, Curve]:
        sites = self.sites_of(block)
        stats = self.dense._replace(sites=sites).placed(self._calibrate(number, block, sites, FIRST), None, SILENT)
        made = site_curves(self.model, sites, stats, self.recipe, SILENT)
        self.store.write_curves(number, made)
        return made

    def run(self) -> None:
        """Prune every block that is not done yet."""
        with self.observer.stage("pruning block by block", len(self.blocks), "blocks") as advance:
            for number, block in enumerate(self.blocks):
                if self.store.record(number) is None:
                    with self.presence.held(block.name):
                        self._prune(number, block)
                else:
                    self.store.forget(number, DENSE, PRUNED)  # a kill may have come between the record and this
                advance(1)

    def _prune(self, number: int, block: Block) -> None:
        sites = self.sites_of(block)
        stats = self._calibrate(number, block, sites)
        dense = self.dense._replace(sites=sites)
        plan = plan_sites(dense, dense.placed(stats, None, self.observer), self.recipe, self.found, self.observer)
        smaller = narrowed_copy(self.model, sites, plan, stats, within=block.name)
        require_agreement(verify(self.model, smaller, sites, stats, plan))
        record: dict[str, Any] = {"plan": plan.to_dict(), "samples": stats.samples, "inputs": stats.inputs}
        del stats, plan  # the refit has its own sums
        if self.refits:
            record |= self._refit(number, block, sites, smaller)
        self.store.finish(number, _tensors(smaller, block.name), record)

    def _calibrate(self, number: int, block: Block, sites: Sites, stream: str = DENSE) -> Statistics:
        """The sums of the block's sites; its output states are stored as the next block's input."""
        total, rule = count_samples(self.batches), HoldOut.of(self.batches)
        collector = Collector(list(sites), self.settings.per_sample(sites, total), causal=self.settings.causal)
        samples = 0
        with torch.no_grad(), collector.watching(self.model):
            for index, start, batch in enumerate_batches(self.batches, lambda _index: True):
                collector.cursor = Cursor(start, rule.holds(index), size_of(batch))
                hidden = None if block.starts else self._stream(stream, number, index)
                behind = through(self.model, block.name, self.manners, self._runs(batch), hidden)
                self.store.write_stream(stream, number + 1, index, behind)
                samples += size_of(batch)
        return Statistics(collector.sums, samples, self.dense.weights, None, self.origin)

    def _refit(self, number: int, block: Block, sites: Sites, smaller: nn.Module) -> dict[str, Any]:
        """Refit the block's layers on the pruned stream; its output states are stored as the next block's input."""
        passages, indices = self._passages(block, sites)
        starts = [passage.starts.pop(block.name) for passage in passages]
        dense = starts if block.starts else [self._stream(DENSE, number, index) for index in indices]
        pruned = list(dense) if block.starts else [self._stream(PRUNED, number, index) for index in indices]
        del starts
        work = Repair(self.model, smaller, self.recipe, self.place)
        work.correct_block(block, passages, dense, pruned)
        for index, hidden in zip(indices, pruned, strict=True):
            self.store.write_stream(PRUNED, number + 1, index, hidden)
        return {"refit": work.corrected, "few": work.few, "refitted": sum(passage.samples for passage in passages)}

    def _passages(self, block: Block, sites: Sites) -> tuple[list[Passage], list[int]]:
        """How the block is called on the refit's batches, and which batches these are."""
        wanted = replace(self.recipe, sequential_samples=samples_wanted(self.recipe, self.blocks))
        recorder = Recorder(self.model, sites, [block], wanted, count_samples(self.batches) or 0)
        indices: list[int] = []
        with up_to(self.model, block.name, self.manners):
            for index, _, batch in enumerate_batches(self.batches, recorder.wants):
                recorder.record(batch, self._runs(batch))
                indices.append(index)
                if recorder.seen >= recorder.wanted:
                    break
        return recorder.passages, indices

    def _runs(self, batch: Any) -> Any:
        def run() -> None:
            with suppress(Enough):
                feed(self.model, batch, self.forward)

        return run

    def _stream(self, kind: str, number: int, index: int) -> Tensor:
        return self.store.read_stream(kind, number, index, self.presence.weights.device)


def unplaced(sites: Sites, blocks: Sequence[Block]) -> list[Site]:
    """Sites outside of all blocks."""
    names = {block.name for block in blocks}
    return [site for site in sites if block_of(inside(site)) not in names]


def _tensors(model: nn.Module, name: str) -> dict[str, Tensor]:
    """The saved state of one module, under the model's names."""
    state = model.get_submodule(name).state_dict()
    return {f"{name}.{key}": tensor.detach().cpu().contiguous() for key, tensor in state.items()}


def joined(records: Sequence[dict[str, Any]], recipe: Recipe, order: Sites, refits: Sequence[Block]) -> Plan:
    """The plan of the whole model, from those of its blocks, with sites in the model's order."""
    plans = [Plan.from_dict(record["plan"]) for record in records]
    why: dict[str, Any] = dict(plans[0].why)
    notes = list(dict.fromkeys(note for plan in plans for note in plan.notes))
    if refits:
        layers = {name: found for record in records for name, found in record["refit"].items()}
        read = {block.name: block.read for block in refits if block.ends}
        why |= {"refit": {"samples": records[0]["refitted"], "read": read, "layers": layers}}
    planned = {site.name: site for plan in plans for site in plan.sites}
    sites = tuple(planned[site.name] for site in order if site.name in planned)
    made = Plan(recipe, sites, plans[0].weights, plans[0].samples, {k: v for k, v in why.items() if k != "notes"})
    return made.noting(*notes)
