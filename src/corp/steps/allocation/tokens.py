"""From a budget to a token schedule: how many tokens every block merges, chosen by trials on held-out batches.

A schedule is a shape, the relative numbers of all blocks, times a factor that the budget determines. Trial shapes
rise with depth, steeply, gently or not at all. The sensitivities of single blocks are misleading, because merging in
one block removes the pairs that the next would merge.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from corp.calibration.batches import Forward, evaluating, move, placement, size_of
from corp.calibration.hooks import input_of, removing
from corp.calibration.threads import here
from corp.errors import DataError, PlanError
from corp.measure.closeness import Reference
from corp.measure.cost import count_macs
from corp.planning.merging import Merging
from corp.surgery.merged import merge_tokens
from corp.surgery.merging_block import block_macs

SAMPLES = 64  # held-out samples that schedules are compared on
RISE = 0.45  # the rule: the last block merges exp(0.9) times as many tokens as the first
TILT = 0.45  # a step of tilting multiplies the last block's number by exp(0.45), the first one's by exp(-0.45)
TILTS = 3  # the most steps in either direction
STEPS = 16  # bisections of the factor: enough to resolve one token

Cost: TypeAlias = Callable[[Merging], float]  # of a merging, relative to the dense model
Shape: TypeAlias = Sequence[float]  # relative numbers of merged tokens, by block


@dataclass(frozen=True)
class Chosen:
    """A schedule, its cost relative to the dense model, how far the output moves, and what else was tried."""

    merging: Merging
    shape: Shape
    cost: float
    divergence: float
    tried: tuple[dict[str, Any], ...] = field(default=(), repr=False)


def choose_schedule(
    model: nn.Module, held: Sequence[Any], merging: Merging, share: float, forward: Forward | None = None
) -> Chosen:
    """The schedule within `share` of the dense model's cost that moves its output least on the batches `held`.

    `merging` says where the blocks are, which tokens are read and which are never merged; its schedule is replaced.
    The cost is counted in multiply-accumulates.
    """
    trial = _Trial(model, few(held), merging, share, mac_share(model, held[0], merging, forward), forward)
    shape = rising(len(merging.schedule))
    for direction in (1, -1):
        for _ in range(TILTS):
            tilted = tilt(shape, direction * TILT)
            if trial.measure(tilted) >= trial.measure(shape):
                break
            shape = tilted
    return replace(trial.known[trial.fitting(shape).schedule], tried=tuple(trial.tried))


def rising(blocks: int) -> Shape:
    """The shape to start from, which rises with depth: later blocks merge more tokens."""
    return tilt([1.0] * blocks, RISE)


def in_every_second(shape: Shape) -> Shape:
    """The shape that merges as many tokens in half as many blocks, so that fewer small kernels run."""
    return [0.0 if i % 2 == 0 else a + b for i, (a, b) in enumerate(zip([0.0, *shape], shape, strict=False))]


def fitting(merging: Merging, shape: Shape, share: float, cost: Cost, tokens: int) -> Merging:
    """The schedule of this shape with the fewest merged tokens that costs at most `share` of the dense model."""
    low, high = 0.0, float(tokens)
    if cost(scaled(merging, shape, high, tokens)) > share:
        raise PlanError(f"merging tokens cannot reach {share:.3f} of the dense model's cost; prune widths too")
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if cost(scaled(merging, shape, middle, tokens)) <= share else (middle, high)
    return scaled(merging, shape, high, tokens)


def scaled(merging: Merging, shape: Shape, factor: float, tokens: int) -> Merging:
    """The merging with `factor` times the shape as its schedule, for samples of `tokens` tokens.

    A block can merge half of the tokens that reach it, and none where it computes only those that are read.
    """
    schedule, left = [], tokens - merging.prefix
    for block, relative in enumerate(shape):
        last = block + 1 == len(shape)
        r = 0 if last and merging.read is not None else min(round(factor * relative), left // 2)
        schedule.append(r)
        left -= r
    return replace(merging, schedule=tuple(schedule))


def tilt(shape: Shape, by: float) -> Shape:
    """The shape with its last number times exp(by), its first times exp(-by), and those between interpolated."""
    last = max(1, len(shape) - 1)
    return [r * math.exp(by * (2 * (i / last) - 1)) for i, r in enumerate(shape)]


@dataclass
class _Trial:
    """Schedules of one model under one budget, each measured once."""

    model: nn.Module
    held: Sequence[Any]
    merging: Merging
    share: float
    cost: Cost
    forward: Forward | None
    known: dict[tuple[int, ...], Chosen] = field(default_factory=dict)
    tried: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reference = Reference(self.model, self.held, self.forward)
        self.tokens = tokens_of(self.model, self.merging, self.held[0], self.forward)

    def measure(self, shape: Shape) -> float:
        """How far the output moves with the schedule of this shape that meets the budget."""
        merging = self.fitting(shape)
        if merging.schedule not in self.known:
            moved = self.moved(merging)
            self.known[merging.schedule] = Chosen(merging, shape, self.cost(merging), moved)
            self.tried.append({"schedule": list(merging.schedule), "divergence": moved})
        return self.known[merging.schedule].divergence

    def fitting(self, shape: Shape) -> Merging:
        return fitting(self.merging, shape, self.share, self.cost, self.tokens)

    def moved(self, merging: Merging) -> float:
        return self.reference.compare(merged_copy(self.model, merging)).divergence().value


def merged_copy(model: nn.Module, merging: Merging) -> nn.Module:
    """A copy of `model` that merges its tokens."""
    merged = copy.deepcopy(model)
    merge_tokens(merged, merging)
    return merged


class Operations(NamedTuple):
    """Multiply-accumulates of the dense model for one sample: in total, and outside its blocks."""

    dense: int
    around: int
    tokens: int  # of a sample, where the blocks begin

    def share(self, model: nn.Module, merging: Merging) -> float:
        """The operations of a model with this merging, relative to the dense model's, computed without a run."""
        blocks = list(model.get_submodule(merging.blocks).children())
        total, left = self.around, self.tokens
        for number, (block, r) in enumerate(zip(blocks, merging.schedule, strict=True)):
            total += block_macs(block, left, r, merging.prefix, merging.read if number + 1 == len(blocks) else None)
            left -= r
        return total / self.dense

    def fit(self, model: nn.Module, merging: Merging, shape: Shape, share: float) -> Merging:
        """The schedule of this shape with the fewest merged tokens that needs at most `share` of the operations."""
        return fitting(merging, shape, share, partial(self.share, model), self.tokens)


def count_operations(model: nn.Module, batch: Any, merging: Merging, forward: Forward | None = None) -> Operations:
    """Count the dense model once; the cost of its blocks with fewer tokens follows from the shapes of their weights."""
    one = first_sample(batch if forward is not None else move(batch, *placement(model)))
    tokens = tokens_of(model, merging, one, forward)
    with evaluating(model):
        dense = count_macs(model, one, forward)
    blocks = model.get_submodule(merging.blocks).children()
    return Operations(dense, dense - sum(block_macs(block, tokens) for block in blocks), tokens)


def mac_share(model: nn.Module, batch: Any, merging: Merging, forward: Forward | None = None) -> Cost:
    """A function that returns the multiply-accumulates with a merging, relative to the model without it."""
    return partial(count_operations(model, batch, merging, forward).share, model)


def tokens_of(model: nn.Module, merging: Merging, batch: Any, forward: Forward | None = None) -> int:
    """How many tokens a sample has where the blocks begin."""
    found: list[int] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(input_of(args, kwargs).shape[1])

    handle = model.get_submodule(f"{merging.blocks}.0").register_forward_pre_hook(here(before), with_kwargs=True)
    with removing([handle]):
        Reference(model, [batch], forward)
    return found[0]


def few(held: Sequence[Any]) -> list[Any]:
    """The first batches, as many as together have enough samples."""
    chosen: list[Any] = []
    for batch in held:
        if sum(map(size_of, chosen)) < SAMPLES:
            chosen.append(batch)
    if not chosen:
        raise DataError("a token schedule is chosen on held-out batches, and there are none")
    return chosen


def first_sample(batch: Any) -> Any:
    """A batch of the first sample alone."""
    if isinstance(batch, Tensor):
        return batch[:1]
    if isinstance(batch, Mapping):
        return {key: first_sample(value) for key, value in batch.items()}
    return type(batch)(map(first_sample, batch)) if type(batch) in (tuple, list) else batch
