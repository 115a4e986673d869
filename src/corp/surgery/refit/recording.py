"""The choice of the refit's batches, and a recording of the dense blocks on them, during calibration or later."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from corp.calibration.batches import Forward, enumerate_batches, move, placement, run, size_of, without_cache
from corp.calibration.memory import free_bytes, human
from corp.errors import PlanError
from corp.io.observer import Advance
from corp.recipe import Recipe
from corp.sites import Sites
from corp.surgery.refit.replay import Block, Passage, Run, record, refusal

TOKENS, PER_INPUT = 49_152, 32  # least number of tokens in the streams by default, and tokens per layer input
READ_SAMPLES = 512  # if only some tokens are read, such as a class token: the most samples, for three times the tokens
STREAMS = 5  # hidden states held per sample, besides the outputs of a block's sites and the input of its last


def samples_wanted(recipe: Recipe, blocks: Sequence[Block]) -> int:
    """How many samples the refit uses, if there are that many."""
    if recipe.sequential_samples:
        return recipe.sequential_samples
    enough = math.ceil(tokens_wanted(blocks) / max(block.tokens for block in blocks))
    return min(READ_SAMPLES, 3 * enough) if any(block.read < block.tokens for block in blocks) else enough


def tokens_wanted(blocks: Sequence[Block]) -> int:
    """How many tokens a stable refit of the widest layer needs."""
    return max(TOKENS, PER_INPUT * max((site.inputs for block in blocks for site in block.sites), default=0))


@dataclass
class Recorder:
    """Records the calls of a model's blocks on some batches, spread over all `available` samples."""

    model: nn.Module
    sites: Sites
    blocks: Sequence[Block]
    recipe: Recipe
    available: int
    passages: list[Passage] = field(default_factory=list)
    tokens: int = 0
    affordable: float = math.inf  # samples that fit into half of the free memory, known once a batch was recorded

    @property
    def wanted(self) -> int:
        return samples_wanted(self.recipe, self.blocks)

    @property
    def seen(self) -> int:
        return sum(passage.samples for passage in self.passages)

    @property
    def full(self) -> bool:
        """Whether enough is recorded: fewer samples if they are longer than the first ones, or if memory is short."""
        if self.recipe.sequential_samples:
            return self.seen >= self.wanted
        return self.seen >= min(self.wanted, self.affordable) or self.tokens >= 3 * tokens_wanted(self.blocks)

    def wants(self, index: int) -> bool:
        return not self.full and index % max(1, self.available // self.wanted) == 0

    def record(self, batch: Any, run_model: Run) -> None:
        """Run the model on the batch, once, and record its blocks' calls."""
        passage = record(self.model, list(self.sites), run_model)
        if list(passage.calls) != [block.name for block in self.blocks]:
            raise refusal("its blocks run in a different order from batch to batch")
        passage.first, passage.samples = self.seen, size_of(batch)
        passage.batch = batch if any(block.fed for block in self.blocks) else None
        self.passages.append(passage)
        self.tokens += max(math.prod(x.shape[:2]) for x in passage.starts.values())
        if not passage.first:
            each, free = _bytes_held(passage, self.blocks) / passage.samples, free_bytes(placement(self.model)[0])
            self.affordable = free / 2 / each
            if self.recipe.sequential_samples:
                _require_memory(int(each * min(self.wanted, self.available)), free)


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
    with without_cache(model):
        for _, _, batch in enumerate_batches(batches, recorder.wants):
            given = batch if forward is not None else move(batch, device, dtype)
            recorder.record(batch, partial(run, model, given, forward))
            advance(recorder.passages[-1].samples)
            if recorder.full:
                break
    return recorder.passages


def _bytes_held(passage: Passage, blocks: Sequence[Block]) -> float:
    """The memory that the refit needs for one batch, in bytes."""
    outputs = max(len(block.sites) + _widest(block) for block in blocks)
    return max(x.numel() * x.element_size() for x in passage.starts.values()) * (STREAMS + outputs)


def _require_memory(need: int, free: int) -> None:
    if need > free:
        raise PlanError(
            f"the hidden states of the refit need {human(need)}, {human(free)} are free; "
            "give it fewer samples with sequential_samples"
        )


def _widest(block: Block) -> float:
    """The size of the input of the block's last layer, in hidden states."""
    return block.sites[-1].inputs / len(block.scales[-1]) if block.sites else 0.0
