"""One run in several processes: which process takes which batch or site, and adding up results (torch.distributed)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from corp.calibration.site_sums import AnySums, added, entry_of
from corp.errors import CorpError, StatisticsError
from corp.numerics.place import HOST, Place

Item = TypeVar("Item")
Made = TypeVar("Made")


@contextmanager
def _reached() -> Iterator[None]:
    """Report a killed worker: its connections close, which the others notice at once."""
    try:
        yield
    except RuntimeError as error:
        first, _, _ = str(error).partition("\n")
        raise CorpError(
            f"another worker ended or cannot be reached ({first}); nothing is half-written: run the same command again"
        ) from error


class Workers:
    """This process among `world` of them. A single process has world = 1, and needs no torch.distributed."""

    def __init__(self, rank: int = 0, world: int = 1, group: Any = None) -> None:
        self.rank, self.world, self._group = rank, world, group

    def takes(self, batch: int) -> bool:
        """Whether this worker takes the batch; they take turns, so shards differ by at most one batch."""
        return batch % self.world == self.rank

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """For work that may fail on any worker: at its end all workers know, and raise the same error."""
        problem = None
        try:
            yield
        except CorpError as error:
            if self.world == 1:
                raise
            problem = str(error)
        failed = [f"worker {rank}: {text}" for rank, text in enumerate(self.gather(problem)) if text]
        if failed:
            raise StatisticsError(f"the run failed on {len(failed)} of {self.world} workers; {failed[0]}")

    def gather(self, value: Any) -> list[Any]:
        """One small value from every worker, in order of rank."""
        if self.world == 1:
            return [value]
        values = [None] * self.world
        with _reached():
            dist.all_gather_object(values, value, group=self._group)
        return list(values)

    def map(self, work: Callable[[Item], Made], items: Sequence[Item], cost: Callable[[Item], float]) -> list[Made]:
        """work(item) of all items, in order, on every worker; distributed by predicted cost, the highest first.

        One worker processes each item and sends its tensors to the others: the same bits as in a single process.
        """
        if self.world == 1:
            return [work(item) for item in items]
        owners = dealt([cost(item) for item in items], self.world)
        with self.agreeing():
            mine = {number: work(item) for number, item in enumerate(items) if owners[number] == self.rank}
        every = self.gather(mine)
        return [every[owner][number] for number, owner in enumerate(owners)]

    def share(self, sums: AnySums) -> AnySums:
        """The sums of rank 0, on every worker."""
        if self.world == 1:
            return sums
        if self.rank != 0:
            return entry_of(sums, "").build(self._receive(0))
        for other in range(1, self.world):
            self._send(sums, other)
        return sums

    def add_up(self, sums: AnySums) -> AnySums:
        """The sum over all workers on rank 0, added in order of rank for reproducible bits; others keep theirs."""
        if self.world == 1:
            return sums
        sums = sums.at(Place(HOST, torch.float64))
        if self.rank != 0:
            self._send(sums, 0)
            return sums
        entry = entry_of(sums, "")
        for source in range(1, self.world):
            sums = added(sums, entry.build(self._receive(source)))
        return sums

    @_reached()
    def _send(self, sums: AnySums, to: int) -> None:
        tensors = {name: t.cpu().contiguous() for name, t in sums.tensors().items()}
        header = [(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
        dist.send_object_list([header], dst=to, group=self._group)
        for tensor in tensors.values():
            if tensor.numel():
                dist.send(tensor, dst=to, group=self._group)

    @_reached()
    def _receive(self, source: int) -> dict[str, Tensor]:
        box: list[Any] = [None]
        dist.recv_object_list(box, src=source, group=self._group)
        tensors = {}
        for name, shape, dtype in box[0]:
            tensors[name] = torch.empty(shape, dtype=dtype)
            if tensors[name].numel():
                dist.recv(tensors[name], src=source, group=self._group)
        return tensors


def dealt(costs: Sequence[float], workers: int) -> list[int]:
    """The worker of every item: the most expensive items first, each to the least loaded worker."""
    load, owners = [0.0] * workers, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owners[number] = load.index(min(load))
        load[owners[number]] += costs[number]
    return owners


def current() -> Workers:
    """The workers of the current process group, or this process alone.

    Sums are added on the host through gloo, whatever the backend of the user's own group, as they are few and float64.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Workers()
    group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    return Workers(dist.get_rank(), dist.get_world_size(), group)


@contextmanager
def launched() -> Iterator[Workers]:
    """Join the group that torchrun describes in the environment; without torchrun, this process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        yield current()
        return
    try:
        dist.init_process_group("gloo")
    except (RuntimeError, ValueError) as error:
        raise CorpError(f"the workers cannot reach each other: {error}") from error
    try:
        yield current()
    finally:
        dist.destroy_process_group()
