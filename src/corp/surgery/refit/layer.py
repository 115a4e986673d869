"""The correction of one layer: which tokens are fitted, the fit itself, and what it changes in the stream."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from corp.calibration.holdout import HoldOut
from corp.errors import PlanError
from corp.numerics.affine import Folded
from corp.numerics.place import Place, in_float64
from corp.numerics.refit import Correction, choose_ridge, fit_gap, gap_left, gap_of
from corp.sites import LinearSite, projection_at
from corp.surgery.linear import refill
from corp.surgery.refit.gaps import TokenSums
from corp.surgery.refit.replay import Block, Passage

READ = 0.5  # the total weight of the tokens that the model's output is read from
# Of tokens that are not read, if some are, at least this many are summed, or per input of the widest layer. On
# DeiT-Tiny half of them change the divergence by 0.0015 of 0.39.
OTHERS, OTHERS_PER_INPUT = 40_000, 32


class Corrected(NamedTuple):
    """How a layer was corrected."""

    change: Folded  # of what it adds to the stream, per input, rounded to the layer's dtype
    record: dict[str, float]  # the gap after the layer, before and after the correction


def correct_layer(
    smaller: nn.Module, site: LinearSite, scale: Tensor, fit: TokenSums, held: TokenSums, place: Place | None = None
) -> Corrected | None:
    """Add the correction to the layer's weights. It is computed in stream units, so divide by the layer scale."""
    layer = projection_at(smaller, site.down)
    bias = layer.bias is not None
    fix = correction(fit, held, bias, place or Place.on(layer.weight.device))
    if fix is None:
        return None
    W, b = in_float64(*layer)
    fix, scale = Correction(*(part.to(W) for part in fix)), scale.to(W)
    back = torch.where(scale == 0, 1.0, scale)
    made = Folded(W + fix.R / back[:, None], b + fix.c / back)
    rounded = (part.to(layer.weight.dtype).to(W) for part in made)
    dW, db = (new - old for new, old in zip(rounded, (W, b), strict=True))
    refill(smaller, site.down, made, bias=bias)
    there = (fit + held).moments(bias).at(Place.exactly(layer.weight.device))
    record = {"gap": gap_of(there), "left": gap_left(there, fix)}
    return Corrected(Folded(dW * scale[:, None], db * scale), record)


def correction(fit: TokenSums, held: TokenSums, intercept: bool, place: Place) -> Correction | None:
    """What the layer adds to its output, chosen on the held-out samples; None if nothing helps there."""
    both = fit + held
    if not fit.n or not held.n or both.square == 0:
        return None
    seen, unseen, whole = (part.moments(intercept).at(place) for part in (fit, held, both))
    ridge = choose_ridge(seen, unseen)
    return None if ridge is None else fit_gap(whole, ridge)


def added(output: Tensor, x: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """output (..., C) + x (..., D) W^T + b, multiplied in float32 at least."""
    y = tokens_of(output)
    return (y + tokens_of(x) @ W.mT.to(y) + b.to(y)).view_as(output).to(output.dtype)


def tokens_of(x: Tensor) -> Tensor:
    """The tokens (T, C), in float32 at least."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.dtype == torch.float64 else x.float()


def read_share(block: Block) -> float:
    """The total weight of the tokens that are read: half if there are others."""
    return READ if block.read < block.tokens else 1.0


def split_rows(block: Block, passage: Passage, hidden: Tensor, rule: HoldOut) -> list[tuple[Tensor, Tensor]]:
    """Which tokens of the flattened stream are fitted and which held out, each as (read, other), without padding.

    There may be more samples than the other tokens need. Then some of those are taken, at places that differ from
    sample to sample.
    """
    samples, tokens = hidden.shape[:2] if block.batch_first else hidden.shape[1::-1]
    apart = [rule.holds(passage.first + i) for i in range(samples)]
    held = torch.tensor(apart, device=hidden.device)[:, None].expand(samples, tokens)
    masks = [mask for site in block.sites if (mask := passage.masks.get(site.mask)) is not None]  # type: ignore[arg-type]
    real = masks[0].to(hidden.device) if masks else torch.ones_like(held)
    if real.shape != held.shape:
        raise PlanError(f"the mask has shape {tuple(real.shape)}, the hidden states {tuple(held.shape)}")
    whole = block.read == block.tokens  # of texts, whose length differs from batch to batch
    read = (torch.arange(tokens, device=hidden.device) < (tokens if whole else block.read)).expand(samples, tokens)

    number = torch.arange(passage.first, passage.first + samples, device=hidden.device)[:, None]
    taken = (torch.arange(tokens, device=hidden.device) + number) % _every(block, rule.count or 0) == 0

    def rows(chosen: Tensor) -> Tensor:
        return (chosen if block.batch_first else chosen.mT).reshape(-1)

    return [(rows(part & read), rows(part & ~read & taken)) for part in (real & ~held, real & held)]


def share_summed(block: Block, samples: int) -> float:
    """The share of all tokens that is summed, if the refit uses this number of samples."""
    return (block.read + (block.tokens - block.read) / _every(block, samples)) / block.tokens


def _every(block: Block, samples: int) -> int:
    """One in this many of the tokens that are not read is enough."""
    enough = max(OTHERS, OTHERS_PER_INPUT * max((site.inputs for site in block.sites), default=0))
    return max(1, samples * (block.tokens - block.read) // enough)
