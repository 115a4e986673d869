"""Budget to token schedule: how many tokens every block merges, chosen by what the output does on held-out batches.

A schedule is a shape, the relative numbers of all blocks, and one factor that the budget decides. Shapes that are tried
are an even one, one that rises with depth, one from the curve of every block by itself, and one in every second block;
the best of them is then tilted towards early or late blocks as long as that helps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor, nn

from corp.calibration.batches import Forward, evaluating, inputs_of, size_of
from corp.calibration.threads import here
from corp.errors import DataError, PlanError
from corp.measure.closeness import Reference
from corp.measure.cost import count_macs
from corp.planning.merging import Merging
from corp.surgery.merged import block_macs, merge_tokens

SAMPLES = 64  # held-out samples that schedules are compared on
PROBE = 0.1  # of the tokens are merged in one block alone, to see how much the output minds there
RISE = 0.4  # the rising rule: from 0.4 to 1.6 times the mean, first block to last
TILT = 0.5  # a step of tilting multiplies the last block's number by exp(0.5), the first one's by exp(-0.5)
TILTS = 3  # steps at the most, in either direction
STEPS = 16  # bisections of the factor: finer than a token
POWER = 4  # by which a block's own curve is taken to rise with the number of its merged tokens
WIDTH_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of the merged model's operations that widths may leave

Cost: TypeAlias = Callable[[Merging], float]  # of a merging, relative to the dense model
Shape: TypeAlias = Sequence[float]  # relative numbers of merged tokens, by block


@dataclass(frozen=True)
class Chosen:
    """A schedule, what it costs relative to the dense model, how far the output moves, and what else was tried."""

    merging: Merging
    cost: float
    divergence: float
    tried: tuple[dict[str, Any], ...] = field(default=(), repr=False)


def choose_schedule(
    model: nn.Module,
    held: Sequence[Any],
    merging: Merging,
    share: float,
    *,
    cost: Cost | None = None,
    forward: Forward | None = None,
) -> Chosen:
    """The schedule within `share` of the dense model's cost that moves its output least on the batches `held`.

    `merging` says where the blocks are, which tokens are read and which never merge; its schedule is replaced. The cost
    is counted in multiply-accumulates unless another one is given, such as a measured time.
    """
    trial = _Trial(model, few(held), merging, share, cost or mac_share(model, held[0], merging, forward), forward)
    shape = min(starting_shapes(trial), key=trial.measure)
    for direction in (1, -1):
        for _ in range(TILTS):
            tilted = tilt(shape, direction * TILT)
            if trial.measure(tilted) >= trial.measure(shape):
                break
            shape = tilted
    return replace(trial.known[trial.fitting(shape).schedule], tried=tuple(trial.tried))


def starting_shapes(trial: _Trial) -> list[Shape]:
    """An even shape, one that rises with depth, one from every block's own curve, and one in every second block.

    The last costs as many operations in half as many kernels, which a budget of time will notice.
    """
    steps = _depths(len(trial.merging.schedule))
    rising = [RISE + 2 * (1 - RISE) * depth for depth in steps]
    second = [float(number % 2) for number in range(len(steps))]
    return [[1.0] * len(steps), rising, curve_shape(trial.probe(), len(steps)), second]


def curve_shape(moved: Sequence[float], blocks: int) -> Shape:
    """The shape that moves the output least at a given cost, if a block's part is c r^p and parts add up.

    A token merged in block i is saved in all blocks behind it, blocks - i of them, so c_i r_i^(p - 1) is in proportion
    to that. `moved` (blocks,) is what merging equally many in each block alone does; c_i is in proportion to it.
    """
    floor = max(moved) * 1e-3 or 1.0  # a block without effect must not take everything
    worth = [((blocks - i) / max(c, floor)) ** (1 / (POWER - 1)) for i, c in enumerate(moved)]
    mean = sum(worth) / blocks
    return [one / mean for one in worth]


def fitting(merging: Merging, shape: Shape, share: float, cost: Cost, tokens: int) -> Merging:
    """The fewest merged tokens in this shape that leave at most `share` of the dense model's cost."""
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
    """The shape with its last number times exp(by), its first times exp(-by), those between likewise."""
    return [r * math.exp(by * (2 * depth - 1)) for r, depth in zip(shape, _depths(len(shape)), strict=True)]


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
        """How far the output moves with the schedule of this shape that the budget asks for; infinitely without one."""
        try:
            merging = self.fitting(shape)
        except PlanError:
            return math.inf
        if merging.schedule not in self.known:
            moved = self.moved(merging)
            self.known[merging.schedule] = Chosen(merging, self.cost(merging), moved)
            self.tried.append({"schedule": list(merging.schedule), "divergence": moved})
        return self.known[merging.schedule].divergence

    def fitting(self, shape: Shape) -> Merging:
        return fitting(self.merging, shape, self.share, self.cost, self.tokens)

    def probe(self) -> list[float]:
        """How far the output moves when one block alone merges, for every block."""
        blocks, r = len(self.merging.schedule), max(1, round(PROBE * self.tokens))
        alone = [[float(i == block) for i in range(blocks)] for block in range(blocks)]
        return [self.moved(scaled(self.merging, shape, r, self.tokens)) for shape in alone]

    def moved(self, merging: Merging) -> float:
        return self.reference.compare(merged_copy(self.model, merging)).divergence().value


def choose_split(
    model: nn.Module,
    held: Sequence[Any],
    merging: Merging,
    share: float,
    make: Callable[[Merging, float], nn.Module],
    *,
    shares: Iterable[float] = WIDTH_SHARES,
    forward: Forward | None = None,
) -> tuple[Chosen, float]:
    """One budget for tokens and widths: the schedule, and the share of the merged model that widths may leave.

    `make(merging, width_share)` gives the merged model with its widths pruned to `width_share` of its cost. Shares are
    tried from the first on, as long as the output comes nearer to the dense model's.
    """
    reference, best = Reference(model, few(held), forward), None
    for width_share in shares:
        try:
            chosen = choose_schedule(model, held, merging, min(1.0, share / width_share), forward=forward)
        except PlanError:
            continue  # tokens alone cannot give that much
        moved = reference.compare(make(chosen.merging, width_share)).divergence().value
        if best is not None and moved >= best[0]:
            break
        best = moved, replace(chosen, divergence=moved), width_share
    if best is None:
        raise PlanError(f"tokens and widths together cannot reach {share:.3f} of the dense model's operations")
    return best[1], best[2]


def merged_copy(model: nn.Module, merging: Merging) -> nn.Module:
    """A copy of `model` that merges its tokens."""
    merged = copy.deepcopy(model)
    merge_tokens(merged, merging)
    return merged


def mac_share(model: nn.Module, batch: Any, merging: Merging, forward: Forward | None = None) -> Cost:
    """A function that gives the multiply-accumulates of a merging relative to the model without.

    The model is counted once; what blocks cost with fewer tokens follows from the shapes of their weights.
    """
    one = first_sample(inputs_of(batch))
    tokens = tokens_of(model, merging, one, forward)
    blocks = list(model.get_submodule(merging.blocks).children())
    with evaluating(model):
        dense = count_macs(model, one, forward)
    around = dense - sum(block_macs(block, tokens, 0, 0, None) for block in blocks)

    def share(chosen: Merging) -> float:
        total, left = around, tokens
        for number, (block, r) in enumerate(zip(blocks, chosen.schedule, strict=True)):
            total += block_macs(block, left, r, chosen.prefix, chosen.read if number + 1 == len(blocks) else None)
            left -= r
        return total / dense

    return share


def tokens_of(model: nn.Module, merging: Merging, batch: Any, forward: Forward | None = None) -> int:
    """How many tokens a sample has where the blocks begin."""
    found: list[int] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args[0] if args else next(iter(kwargs.values()))).shape[1])

    handle = model.get_submodule(f"{merging.blocks}.0").register_forward_pre_hook(here(before), with_kwargs=True)
    try:
        Reference(model, [batch], forward)
    finally:
        handle.remove()
    return found[0]


def few(held: Sequence[Any], samples: int = SAMPLES) -> list[Any]:
    """The first batches that have so many samples together."""
    chosen: list[Any] = []
    for batch in held:
        if sum(map(size_of, chosen)) < samples:
            chosen.append(batch)
    if not chosen:
        raise DataError("a token schedule is chosen on held-out batches, and there are none")
    return chosen


def _depths(blocks: int) -> list[float]:
    """From 0 at the first block to 1 at the last."""
    return [i / max(1, blocks - 1) for i in range(blocks)]


def first_sample(batch: Any) -> Any:
    """A batch of the first sample alone."""
    if isinstance(batch, Tensor):
        return batch[:1]
    return {key: value[:1] if isinstance(value, Tensor) else value for key, value in batch.items()}
