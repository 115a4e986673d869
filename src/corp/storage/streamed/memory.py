"""The peak memory of a streamed run, announced before it starts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from corp.calibration.batches import count_samples, first_batch, size_of
from corp.calibration.memory import human, site_bytes, working_bytes
from corp.measure.estimate import STREAMS
from corp.recipe import Recipe
from corp.sites import AttentionSite, Site
from corp.storage.streamed.presence import Presence
from corp.surgery.refit.recording import samples_wanted
from corp.surgery.refit.replay import Block

MATRICES = 64  # bytes per D^2: eight matrices of a site in float64, as measure.estimate counts a fit
LOOSE = 300 * 2**20  # freed memory that the allocator retains (benchmarks/streamed.py)
WIDE = 6  # hidden states of the MLP's width that a block holds for one batch while it runs


class Need(NamedTuple):
    """Additional memory in bytes: embeddings and head, a block, its sums and fits, streams, a batch."""

    resident: int
    block: int
    sums: int
    refit: int
    batch: int

    @property
    def total(self) -> int:
        """The total; sums and fits are released before the refit begins."""
        return LOOSE + self.resident + self.block + self.batch + max(self.sums, self.refit)

    def line(self) -> str:
        """The memory, in one line."""
        return (
            f"block by block, about {human(self.total)} of memory in addition to the program: {human(self.resident)} "
            f"for embeddings and head, {human(self.block)} for a block and its smaller copy, {human(self.sums)} for "
            f"its statistics and fits, or {human(self.refit)} for its refit, {human(self.batch)} for a batch, "
            f"{human(LOOSE)} in reserve"
        )


def needed(
    presence: Presence,
    blocks: Sequence[Block],
    sites: Sequence[Sequence[Site]],
    batches: Iterable[Any],
    recipe: Recipe,
    refits: bool,
) -> Need:
    """The memory of a run, which the largest block determines; `sites` are those of each block."""
    samples, item = count_samples(batches), presence.weights.dtype.itemsize
    pairs = list(zip(blocks, sites, strict=True))
    batch = size_of(first_batch(batches))
    refitted = min(samples or 10**9, max(batch, samples_wanted(recipe, blocks)))
    return Need(
        _bytes(presence, presence.resident),
        2 * max(_bytes(presence, names) for names in presence.units.values()),
        max(_sums(own, samples) for own in sites),
        max(_refit(block, refitted, item) for block, _ in pairs) if refits else 0,
        max(_batch(block, own, batch) for block, own in pairs),
    )


def _bytes(presence: Presence, names: Sequence[str]) -> int:
    item = presence.weights.dtype.itemsize
    return sum(math.prod(presence.weights.places[name].shape) * item for name in names)


def _sums(sites: Sequence[Site], samples: int | None) -> int:
    if not sites:
        return 0
    return sum(site_bytes(site, samples) for site in sites) + max(working_bytes(sites, samples), _solving(sites))


def _solving(sites: Sequence[Site]) -> int:
    return MATRICES * max((site.inputs for site in sites if not isinstance(site, AttentionSite)), default=0) ** 2


def _refit(block: Block, samples: int, item: int) -> int:
    """Streams of hidden states, and the sums and systems of the widest layer."""
    width = len(block.scales[0]) if block.scales else 0
    return STREAMS * item * samples * block.tokens * width + _solving(block.sites)


def _batch(block: Block, sites: Sequence[Site], samples: int) -> int:
    """Hidden states of one batch inside a block, in float32."""
    wide = max((site.inputs for site in sites if not isinstance(site, AttentionSite)), default=0)
    return WIDE * 4 * samples * block.tokens * wide
