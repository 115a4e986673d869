"""The data pass without its mathematics: groups of sites that fit in memory, checkpoints, several workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from corp.calibration.batches import (
    Forward,
    count_samples,
    describe,
    enumerate_batches,
    move,
    run,
    size_of,
    takes_places,
)
from corp.calibration.checkpoint import Checkpoint, prepare_folder, publish, read_groups, read_progress
from corp.calibration.collector import Collector, Cursor
from corp.calibration.holdout import HeldBatches, HoldOut
from corp.calibration.hooks import input_of, removing, uncompiled, with_input
from corp.calibration.memory import free_bytes, human, passes
from corp.calibration.offload import offloaded
from corp.calibration.settings import Settings
from corp.calibration.site_sums import Entry
from corp.calibration.statistics import MANIFEST, Statistics, read_entries, write_manifest, write_site
from corp.calibration.threads import here
from corp.calibration.workers import Workers
from corp.errors import DataError, StatisticsError
from corp.io.files import lock_folder, refuse_existing, write_text
from corp.io.observer import SILENT, Advance, Observer
from corp.sites import OutputHead, Site


class Recording(Protocol):
    """Records the model on some batches while they run; implemented in refit.recording."""

    def wants(self, index: int) -> bool: ...

    def record(self, batch: Any, run_model: Callable[[], None]) -> None: ...


@dataclass
class Job:
    """One calibration: the model, its sites, the data, and the other workers."""

    model: nn.Module
    sites: list[Site | OutputHead]
    batches: Iterable[Any]
    settings: Settings
    origin: dict[str, Any]
    weights: str
    forward: Forward | None = None
    observer: Observer = SILENT
    held: HeldBatches | None = None  # gets some of the held-out batches, for trials
    workers: Workers = field(default_factory=Workers)
    recording: Recording | None = None  # records the passes that it needs, so that they need not run again

    def __post_init__(self) -> None:
        if not self.sites:
            raise StatisticsError(
                "this model has no site to calibrate; corp.find_sites(model).refused gives the reason for every place"
            )
        first = next(self.model.parameters(), torch.empty(0))
        self.device = first.device if self.settings.offload is None else torch.device(self.settings.device)
        self.dtype = first.dtype
        self.total = count_samples(self.batches)
        self.rule = HoldOut.of(self.batches)
        self.progress: Advance = lambda _samples: None
        if not self.settings.causal:
            self.origin = {**self.origin, "causal": False}
        self.inputs: Any = None
        self.tokens = self.settings.per_sample(self.sites, self.total)

    def groups(self, record: Path | None = None) -> list[list[Site | OutputHead]]:
        """Sites per pass over the data, announced if it takes more than one.

        The first worker decides for all, and a continued run uses the recorded groups, because free memory differs
        between workers and changes over time.
        """
        decided: list[list[str]] = []

        def decide() -> None:
            if record is not None and record.is_file():
                decided.extend(read_groups(record, {site.name for site in self.sites}))
                return
            budget = free_bytes(self.device) if self.settings.memory is None else self.settings.memory
            groups = passes(self.sites, self.total, budget)
            if len(groups) > 1:
                self.observer.note(
                    f"the sums do not fit into {human(budget)} at once: {len(groups)} passes over the data"
                )
            decided.extend([site.name for site in group] for group in groups)
            if record is not None:
                write_text(record, json.dumps(decided))

        self._on_first_worker(decide)
        by_name = {site.name: site for site in self.sites}
        return [[by_name[name] for name in group] for group in self.workers.gather(decided)[0]]

    def run(self, out: Path | None) -> Statistics:
        """All passes, with the weights placed according to the settings."""
        with ExitStack() as stack:
            if self.settings.offload is not None:
                stack.enter_context(offloaded(self.model, self.settings.offload, self.device))
            self.progress = stack.enter_context(
                self.observer.stage(f"calibrating on {self.device}", self.total, "samples")
            )
            return self.run_in_memory() if out is None else self.run_in_folder(out)

    def run_in_memory(self) -> Statistics:
        """Collect all sums in memory, in one pass."""
        groups = self.groups()
        if len(groups) > 1:
            raise StatisticsError(
                f"the sums need {len(groups)} passes within the memory allowed, and a folder to keep finished ones "
                "in: pass out=... (or more memory)"
            )
        collector, samples = self._pass(groups[0], None)
        sums = {name: self.workers.share(self.workers.add_up(part)) for name, part in collector.sums.items()}
        return Statistics(sums, samples, self.weights, self.inputs, self.origin)

    def run_in_folder(self, out: Path) -> Statistics:
        """Write finished sites to disk; a killed run continues from its last checkpoint."""
        partial = out.with_name(f".{out.name}.partial")

        def prepare() -> None:
            refuse_existing(out, overwrite=False)
            prepare_folder(partial, self._identity(), fresh=self.settings.fresh)

        self._on_first_worker(prepare)
        with lock_folder(partial, f"rank-{self.workers.rank}"):
            if not self.workers.gather((partial / MANIFEST).is_file())[0]:  # else it was killed after the last pass
                self._finish_all(partial)
            self._on_first_worker(lambda: publish(partial, out))
        return Statistics.load(out)

    def _finish_all(self, partial: Path) -> None:
        """Run every pass and write the manifest, which marks the run as complete."""
        entries: dict[str, Entry] = {}
        samples = 0
        for number, group in enumerate(self.groups(partial / "passes.json")):
            samples = self._finish_group(partial, number, group, entries)
        if self.workers.rank == 0:
            header = Statistics({}, samples, self.weights, self.inputs, self.origin)
            write_manifest(partial, header, entries)

    def _on_first_worker(self, action: Callable[[], None]) -> None:
        """Rank 0 acts and the others wait; if it fails, all fail."""
        with self.workers.agreeing():
            if self.workers.rank == 0:
                action()

    def _finish_group(
        self, partial: Path, number: int, group: list[Site | OutputHead], entries: dict[str, Entry]
    ) -> int:
        """The sums of one group, from an earlier run's files or from the data; returns the samples seen."""
        done = partial / f"pass-{number}.json"
        known = self.workers.gather(done.is_file())[0]
        if known:
            raw = read_progress(done, "samples")
            entries.update(read_entries(done, raw["sites"]))
            self.inputs = raw.get("inputs")
            self.progress(int(raw["samples"]))
            return int(raw["samples"])
        collector, samples = self._pass(
            group, Checkpoint(partial, f"{number}-{self.workers.rank}", self.settings.checkpoint_seconds)
        )
        mine: dict[str, Entry] = {}
        for name in list(collector.sums):
            sums = self.workers.add_up(collector.sums.pop(name))
            if self.workers.rank == 0:
                mine[name] = write_site(partial, len(entries) + len(mine), sums)
        if self.workers.rank == 0:
            content = {"samples": samples, "inputs": self.inputs, "sites": {n: vars(e) for n, e in mine.items()}}
            write_text(done, json.dumps(content))
        entries.update(mine)
        return samples

    def _pass(self, group: list[Site | OutputHead], checkpoint: Checkpoint | None) -> tuple[Collector, int]:
        """One pass over the data for the sites of a group; an error on any worker is an error on all."""
        collector = Collector(group, self.tokens, causal=self.settings.causal)
        with self.workers.agreeing():
            samples = self._feed(collector, checkpoint)
        self.inputs = next((found for found in self.workers.gather(self.inputs) if found), None)  # shards may be empty
        total = sum(self.workers.gather(samples))
        if total == 0:
            raise DataError("no calibration data: `batches` was empty (an iterator can be used only once)")
        return collector, total

    def _feed(self, collector: Collector, checkpoint: Checkpoint | None) -> int:
        samples, first_batch = 0, 0
        if checkpoint and (found := checkpoint.restore(collector, self.device)):
            samples, first_batch = found
            self.progress(samples)

        def mine(index: int) -> bool:
            return index >= first_batch and self.workers.takes(index)

        def wanted(index: int) -> bool:
            return mine(index) or (self.held is not None and self.held.wants(index))

        with torch.no_grad():
            self._share_shifts(collector, needed=first_batch == 0)
            with collector.watching(self.model):
                for index, start, batch in enumerate_batches(self.batches, wanted):
                    kept = self.held if self.held is not None and self.held.offer(index, batch) else None
                    if not mine(index):
                        continue
                    count = size_of(batch)
                    collector.cursor = Cursor(start, self.rule.holds(index), count)
                    with nullcontext() if kept is not None else self._without_logits(batch):
                        output = self._recorded(index, batch)
                    if kept is not None:
                        kept.ran(output)
                    samples += count
                    self.progress(count)
                    if checkpoint:
                        checkpoint.maybe_write(collector, samples, index + 1)
        return samples

    def _share_shifts(self, collector: Collector, *, needed: bool) -> None:
        """Share the shift of the first batch between workers, so that their sums add without rounding."""
        if self.workers.world == 1 or not needed:
            return
        for _, _, batch in enumerate_batches(self.batches, lambda i: i == 0):
            collector.cursor = Cursor(size=size_of(batch))
            with collector.finding_shifts(self.model):
                self._run(batch)
            break

    def _recorded(self, index: int, batch: Any) -> Any:
        """Run the model on the batch, recorded if the batch is wanted for that."""
        if self.recording is None or not self.recording.wants(index):
            return self._run(batch)
        outputs: list[Any] = []
        self.recording.record(batch, lambda: outputs.append(self._run(batch)))
        return outputs[0]

    def _without_logits(self, batch: Any) -> AbstractContextManager[None]:
        """Make the output head compute one logit vector per sequence, if the model allows it: nothing reads the others.

        The hook comes after those that read the head's input, so they see every token.
        """
        head = next((site for site in self.sites if isinstance(site, OutputHead)), None)
        if head is None or self.forward is not None or not takes_places(self.model, batch):
            return nullcontext()

        def shorten(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = input_of(args, kwargs)
            return with_input(args, kwargs, x[:, :1]) if x.dim() == 3 else None

        return removing(
            [self.model.get_submodule(head.name).register_forward_pre_hook(here(shorten), with_kwargs=True)]
        )

    def _run(self, batch: Any) -> Any:
        moved = batch if self.forward is not None else move(batch, self.device, self.dtype)
        if self.inputs is None and self.forward is None:
            self.inputs = describe(moved)
        with uncompiled():
            return run(self.model, moved, self.forward)

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a killed run to be continued."""
        return {
            "weights": self.weights,
            "tokens": self.settings.tokens,
            "causal": self.settings.causal,
            "memory": "what is free" if self.settings.memory is None else self.settings.memory,
            "workers": self.workers.world,
            "samples in the data": self.total,
            "sites": [site.name for site in self.sites],
            **self.origin,
        }
