"""Models that merge tokens: blocks merge between attention and MLP, and their container passes the sizes along.

log(size) is added to the logits of later attentions, so that a token that stands for three patches counts three times.
Blocks keep their places, weights and names, so sites and hooks find them as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from corp.errors import ModelError, PlanError
from corp.planning.merging import Merging
from corp.surgery.merging import rows
from corp.surgery.merging_block import merging_block


def merge_tokens(model: nn.Module, merging: Merging) -> None:
    """Make `model` (in place) merge tokens; its blocks keep their weights and names. Earlier merging is replaced."""
    blocks: Any = model.get_submodule(merging.blocks)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList) or not len(blocks):
        raise ModelError(f"{merging.blocks} is a {type(blocks).__name__}, not a sequence of blocks")
    if len(blocks) != len(merging.schedule):
        raise PlanError(f"the schedule has {len(merging.schedule)} entries, {merging.blocks} {len(blocks)} blocks")
    made, before = [], 0
    for number, (block, r) in enumerate(zip(blocks.children(), merging.schedule, strict=True)):
        where = f"{merging.blocks}.{number}"
        last = number + 1 == len(blocks)
        made.append(merging_block(block, where, r, merging, weighted=before > 0, read=merging.read if last else None))
        before += r
    container = MergedSequence if isinstance(blocks, nn.Sequential) else MergedList
    model.set_submodule(merging.blocks, container(made, unmerge=merging.unmerge).train(blocks.training))


class MergedSequence(nn.Sequential):
    """Blocks that the model calls as one sequence (timm).

    Code that calls them one by one (features of several blocks) gets the value of every patch's group if patches are
    unmerged, and the dense blocks' outputs otherwise.
    """

    def __init__(self, blocks: Iterable[nn.Module], *, unmerge: bool) -> None:
        super().__init__(*blocks)
        self.unmerge = unmerge

    def __iter__(self) -> Iterator[Any]:
        return one_by_one(self.children()) if self.unmerge else super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        """A block, or a sequence of some."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        some = list(self.children())[index]
        return MergedSequence(some, unmerge=True) if self.unmerge and not index.start else nn.Sequential(*some)

    def forward(self, x: Tensor) -> Tensor:
        return run_blocks(self.children(), x, unmerge=self.unmerge)


class MergedList(nn.ModuleList):
    """Blocks that the model calls one by one (transformers): iteration yields one callable that runs them all."""

    def __init__(self, blocks: Iterable[nn.Module], *, unmerge: bool) -> None:
        super().__init__(blocks)
        self.unmerge = unmerge

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((self,))

    def __getitem__(self, index: Any) -> Any:
        """A block, or an ordinary list of some."""
        return nn.ModuleList(list(self.children())[index]) if isinstance(index, slice) else super().__getitem__(index)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        # A traced graph gets a mask that hides nothing, but its values cannot be read.
        if attention_mask is not None and not torch.compiler.is_compiling() and _hides(attention_mask):
            raise ModelError("merged tokens take no attention mask: leave it out, or use the model without merging")
        return run_blocks(self.children(), x, unmerge=self.unmerge)


def _hides(mask: Tensor) -> bool:
    """Whether a mask (True: visible) or a bias (0: visible) hides any token."""
    return not bool((mask if mask.dtype == torch.bool else mask == 0).all())


def run_blocks(blocks: Iterable[nn.Module], x: Tensor, *, unmerge: bool) -> Tensor:
    """Run the blocks one after the other, passing sizes and groups along."""
    sizes, groups = x.new_ones(x.shape[:2]), start_groups(x) if unmerge else None
    for block in blocks:
        x, sizes, groups = block(x, sizes=sizes, groups=groups)
    return x if groups is None else rows(x, groups)


def one_by_one(blocks: Iterable[nn.Module]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Functions that run one block each, pass sizes and groups along, and return all patches."""
    given = merged = sizes = groups = None

    def step(block: nn.Module, x: Tensor) -> Tensor:
        nonlocal given, merged, sizes, groups
        if merged is None:
            merged, sizes, groups = x, x.new_ones(x.shape[:2]), start_groups(x)
        elif x is not given:
            raise ModelError("merged blocks need the unchanged output of the last block; use the model without merging")
        merged, sizes, groups = block(merged, sizes=sizes, groups=groups)
        given = rows(merged, groups)
        return given

    for block in blocks:
        yield partial(step, block)


def start_groups(x: Tensor) -> Tensor:
    """The group (B, N) of each of the tokens x (B, N, C) before any merge: its own index."""
    return torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
