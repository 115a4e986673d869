"""Which batches the refit uses, and recording the dense model's blocks on them, during calibration or by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from corp.calibration.batches import Forward, enumerate_batches, move, placement, run, size_of, without_cache
from corp.calibration.memory import free_bytes, human
from corp.errors import PlanError
from corp.io.observer import Advance
from corp.recipe import Recipe
from corp.sites import Sites
from corp.surgery.refit.replay import Block, Passage, Run, record, refusal

SAMPLES, TOKENS = 256, 65_536  # that the streams hold where the recipe does not say: whichever is fewer
STREAMS = 4  # hidden states held of every sample, beside the outputs of a block's sites and the input of its last


def samples_wanted(recipe: Recipe, blocks: Sequence[Block]) -> int:
    """How many samples the refit takes, if there are that many."""
    return recipe.sequential_samples or min(SAMPLES, math.ceil(TOKENS / max(block.tokens for block in blocks)))


@dataclass
class Recorder:
    """Records the calls of a model's blocks on some batches, spread over all `available` samples."""

    model: nn.Module
    sites: Sites
    blocks: Sequence[Block]
    recipe: Recipe
    available: int
    passages: list[Passage] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        return samples_wanted(self.recipe, self.blocks)

    @property
    def seen(self) -> int:
        return sum(passage.samples for passage in self.passages)

    def wants(self, index: int) -> bool:
        return self.seen < self.wanted and index % max(1, self.available // self.wanted) == 0

    def record(self, batch: Any, run_model: Run) -> None:
        """Run the model on the batch, once, and record its blocks' calls."""
        passage = record(self.model, list(self.sites), run_model)
        if list(passage.calls) != [block.name for block in self.blocks]:
            raise refusal("its blocks run in another order from batch to batch")
        passage.first, passage.samples = self.seen, size_of(batch)
        self.passages.append(passage)
        if not passage.first:
            device, _ = placement(self.model)
            _require_memory(passage, self.blocks, min(self.wanted, self.available) / passage.samples, device)


def record_batches(
    model: nn.Module,
    sites: Sites,
    batches: Iterable[Any],
    blocks: Sequence[Block],
    recipe: Recipe,
    available: int,
    forward: Forward | None = None,
    advance: Advance = lambda _samples: None,
) -> list[Passage]:
    """Run the dense model over some batches, spread over all `available` samples, and record its blocks' calls."""
    recorder, (device, dtype) = Recorder(model, sites, blocks, recipe, available), placement(model)
    for _, _, batch in enumerate_batches(batches, recorder.wants):
        given = batch if forward is not None else move(batch, device, dtype)
        with without_cache(model):
            recorder.record(batch, lambda given=given: run(model, given, forward))  # type: ignore[misc]
        advance(recorder.passages[-1].samples)
        if recorder.seen >= recorder.wanted:
            break
    return recorder.passages


def _require_memory(passage: Passage, blocks: Sequence[Block], batches: float, device: torch.device) -> None:
    outputs = max(len(block.sites) + _widest(block) for block in blocks)
    size = max(x.numel() * x.element_size() for x in passage.starts.values())
    need, free = int(size * batches * (STREAMS + outputs)), free_bytes(device)
    if need > free:
        raise PlanError(
            f"the hidden states of the refit need {human(need)}, {human(free)} are free; "
            "give it fewer samples with sequential_samples"
        )


def _widest(block: Block) -> float:
    """The input of the block's last layer, in hidden states."""
    return block.sites[-1].inputs / len(block.scales[-1]) if block.sites else 0.0
