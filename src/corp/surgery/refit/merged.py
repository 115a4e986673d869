"""Merged models side by side with their dense originals: finds what can be merged, and refits layers.

The merged model's tokens stand for groups of the dense model's. After every layer each dense token is compared with
its group, so a refitted layer corrects errors of pruned widths and of merging, and groups are weighted by their size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from corp.calibration.batches import Forward, evaluating, run
from corp.calibration.holdout import HoldOut
from corp.calibration.hooks import input_of, removing
from corp.calibration.moments import shift_of
from corp.calibration.threads import here
from corp.errors import ModelError
from corp.numerics.affine import Folded
from corp.planning.merging import Merging
from corp.recipe import Recipe
from corp.sites import Sites, ValueSite, at_site, projection_at
from corp.surgery.merged import merge_tokens, start_groups
from corp.surgery.merging import rows
from corp.surgery.refit.gaps import TokenSums
from corp.surgery.refit.layer import added, correct_layer, read_share, split_rows
from corp.surgery.refit.readout import tensors_in, tokens_read
from corp.surgery.refit.replay import Block, Enough, Passage, blocks_of, close, drive, watching

SHAKE = 1.0  # noise that is added to an image to find the tokens that depend on it


def find_merging(model: nn.Module, sites: Sites, batch: Any, forward: Forward | None = None) -> Merging:
    """Where tokens of `model` can be merged, with an empty schedule; a model in which they cannot is refused.

    The prefix is what does not change with the image. If only prefix tokens are read, the last block will compute
    those alone; otherwise every patch gets its group's value at the end.
    """
    names = blocks_of(list(sites))
    parents = {name.rpartition(".")[0] for name in names}
    if len(parents) != 1:
        raise ModelError(f"tokens are merged in one sequence of blocks; this model has {len(parents)}")
    path = parents.pop()
    if names != [f"{path}.{number}" for number in range(len(names))]:
        raise ModelError(f"tokens are merged in blocks that are numbered from 0; this model's first is {names[0]}")
    tokens, prefix = _prefix(model, f"{path}.0", batch, forward)
    blocks = [Block(name, number == 0, (), (), tokens, True) for number, name in enumerate(names)]
    read = tokens_read(model, blocks, lambda: run(model, batch, forward))[0].read
    found = Merging(path, (0,) * len(names), prefix, *((read, False) if read <= prefix else (None, True)))
    _require_outputs(model, found, batch, forward)
    return found


def _prefix(model: nn.Module, first: str, batch: Any, forward: Forward | None) -> tuple[int, int]:
    """The tokens of a sample at the first block, and how many of the leading ones do not depend on the image."""
    seen: list[Tensor] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(input_of(args, kwargs))

    handle = model.get_submodule(first).register_forward_pre_hook(here(before), with_kwargs=True)
    with torch.no_grad(), evaluating(model), removing([handle]):
        run(model, batch, forward)
        run(model, _shaken(batch), forward)
    if len(seen) != 2:
        raise ModelError(f"{first} runs {len(seen) // 2} times in a forward pass, so its tokens cannot be merged")
    same = [close(*pair) for pair in zip(*(x.transpose(0, 1) for x in seen), strict=True)]
    prefix = same.index(False) if False in same else len(same)
    if len(same) - prefix < 2:
        raise ModelError(f"of the {len(same)} tokens of {first} fewer than two depend on an image: nothing to merge")
    return len(same), prefix


def _shaken(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        noise = torch.randn(batch.shape, generator=torch.Generator().manual_seed(0))
        return batch + SHAKE * noise.to(batch) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: _shaken(value) for key, value in batch.items()}
    return type(batch)(map(_shaken, batch)) if type(batch) in (tuple, list) else batch


def _require_outputs(model: nn.Module, found: Merging, batch: Any, forward: Forward | None) -> None:
    """Merging nothing must change nothing; merging one token per block must change the output but not its shape."""
    one = tuple(int(number + 1 < len(found.schedule)) for number in range(len(found.schedule)))
    with torch.no_grad(), evaluating(model):
        dense = list(tensors_in(run(model, batch, forward)))
        for merging in (found, replace(found, schedule=one)):
            trial = copy.deepcopy(model)
            merge_tokens(trial, merging)
            outputs = list(tensors_in(run(trial, batch, forward)))
            shapes = [x.shape for x in dense] == [x.shape for x in outputs]
            if not shapes or (merging is found and not all(map(close, dense, outputs))):
                raise ModelError(
                    f"the output of {type(model).__name__} is not read from the end of {found.blocks} alone (hidden "
                    "states of other blocks, or attention weights), so its tokens cannot be merged"
                )
    if any(one) and all(map(torch.equal, dense, outputs)):
        raise ModelError(
            f"{type(model).__name__} calls the blocks of {found.blocks} one by one, where merging is not used, so its "
            "tokens cannot be merged"
        )


class Stream(NamedTuple):
    """The merged model's tokens (B, n, C), their sizes (B, n), and the group of each dense token (B, N)."""

    x: Tensor
    sizes: Tensor
    groups: Tensor


End: TypeAlias = tuple[Stream, Tensor]  # the end of a passage, and the input of its block's last layer


def repair_merged(
    dense: nn.Module,
    smaller: nn.Module,
    blocks: Sequence[Block],
    passages: Sequence[Passage],
    recipe: Recipe,
    progress: Callable[[int], None] | None = None,
) -> tuple[dict[str, dict[str, float]], Tensor]:
    """Refit the layers of `smaller` (in place) block after block.

    Returns each one's gap, before and after, and the final stream of the first passage.

    `smaller` merges tokens, and its last block computes all tokens that reach it. Its widths may be pruned or not.
    `blocks` and `passages` are the dense model's, as in sequential fitting.
    """
    corrected: dict[str, dict[str, float]] = {}
    ahead = [passage.starts[blocks[0].name] for passage in passages]
    behind = [Stream(x, x.new_ones(x.shape[:2]), start_groups(x)) for x in ahead]
    for block in blocks:
        targets, ahead = _targets(dense, block, passages, ahead)
        ends: list[End] = []
        change: Folded | None = None
        for number, site in enumerate(block.sites):
            if not recipe.skips(site.name):
                with at_site(site):
                    fit, held, ends = _observe(smaller, block, number, passages, behind, targets[number])
                    made = correct_layer(smaller, site, block.scales[number], fit, held)
                change = made and made.change
                corrected |= {site.name: made.record} if made else {}
        if ends:  # as in repair.py, the effect of the last layer's correction is added without another pass
            behind = [end if change is None else end._replace(x=added(end.x, x, *change)) for end, x in ends]
        else:
            behind = [_drive(smaller, block, stream) for stream in behind]
        if progress:
            progress(1)
    return corrected, behind[0].x


def _targets(
    dense: nn.Module, block: Block, passages: Sequence[Passage], ahead: Sequence[Tensor]
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The dense stream after every site of the block, [site][passage], and after the block."""
    targets: list[list[Tensor]] = [[] for _ in block.sites]
    after = []
    for passage, stream in zip(passages, ahead, strict=True):
        with watching(dense, block.sites) as seen:
            after.append(drive(dense, block.name, passage.calls[block.name], stream))
        for site, scale, found in zip(block.sites, block.scales, targets, strict=True):
            stream = stream + scale.to(stream) * seen[site.name].y
            found.append(stream)
    return targets, after


def _drive(smaller: nn.Module, block: Block, stream: Stream) -> Stream:
    module = smaller.get_submodule(block.name)
    with torch.no_grad(), evaluating(module):
        return Stream(*module(stream.x, sizes=stream.sizes, groups=stream.groups))


def _observe(
    smaller: nn.Module,
    block: Block,
    number: int,
    passages: Sequence[Passage],
    behind: Sequence[Stream],
    targets: Sequence[Tensor],
) -> tuple[TokenSums, TokenSums, list[End]]:
    """The sums of the input of a site's layer and of the gap after it, over dense tokens: fitted, held out.

    If the site is the block's last, the ends of all passages are returned too.
    """
    site = block.sites[number]
    inputs = projection_at(smaller, site.down).weight.shape[1]
    fit, held = (TokenSums(inputs, targets[0].shape[-1], read_share(block)) for _ in range(2))
    ends, rule = [], HoldOut(sum(passage.samples for passage in passages))
    for passage, stream, target in zip(passages, behind, targets, strict=True):
        early = isinstance(site, ValueSite)  # tokens merge after it
        after = stream
        with watching(smaller, block.sites, inputs=site.name, stop=early) as seen, suppress(Enough):
            after = _drive(smaller, block, stream)
        x, y = seen[site.name]
        assert x is not None  # it was requested
        now = stream.x + block.scales[number].to(stream.x) * y if early else after.x
        if number == len(block.sites) - 1 and not early:
            ends.append((after, x))
        gap = (target - rows(now, after.groups)).flatten(0, 1).float()
        fed = rows(x, after.groups).flatten(0, 1)
        if not passage.first:
            fit.shift_by(shift_of(fed))
            held.shift_by(shift_of(fed))
        for sums, chosen in zip((fit, held), split_rows(block, passage, target, rule), strict=True):
            sums.update(fed, gap, *chosen)
    return fit, held, ends
