"""Narrower linear layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from corp.numerics.affine import Folded
from corp.sites import MLPSite, Rows


class Projection(NamedTuple):
    """Weight (out, in) and bias (out,) of a linear map."""

    weight: Tensor
    bias: Tensor | None


def rows_of(model: nn.Module, rows: Rows) -> Projection:
    """The part of a linear layer that `rows` points at."""
    linear = linear_at(model, rows.module)
    bias = None if linear.bias is None else linear.bias.detach()[rows.start : rows.stop]
    return Projection(linear.weight.detach()[rows.start : rows.stop], bias)


def linear_at(model: nn.Module, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear), name  # adapters point at nothing else
    return module


def make_linear(like: nn.Linear, weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with these parameters, in the dtype and with the flags of `like`."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    linear.weight = _parameter(weight, like)
    if bias is not None:
        linear.bias = _parameter(bias, like)
    return linear.train(like.training)


def _parameter(values: Tensor, like: nn.Linear) -> nn.Parameter:
    # A copy, never a view: the pruned model must not keep the dense storage alive or share it.
    fresh = values.detach().to(like.weight.device, like.weight.dtype, copy=True).contiguous()
    return nn.Parameter(fresh, requires_grad=like.weight.requires_grad)


def shrink_mlp(model: nn.Module, site: MLPSite, kept: Tensor, folded: Folded | None, *, bias: bool) -> None:
    """Keep the hidden channels `kept` (S,): rows of what makes them, columns of what consumes them.

    `folded` replaces the second layer's parameters; without it they are only sliced. `bias` says
    whether the second layer has a bias afterwards (compensation may give it one).
    """
    for module in dict.fromkeys(rows.module for rows in site.up):
        linear = linear_at(model, module)
        # Packed gate and up lose the same channels of each half, so that chunk(2) still halves it.
        index = torch.cat([rows.start + kept for rows in site.up if rows.module == module])
        index = index.to(linear.weight.device)
        kept_bias = None if linear.bias is None else linear.bias[index]
        model.set_submodule(module, make_linear(linear, linear.weight[index], kept_bias))

    down = linear_at(model, site.down)
    index = kept.to(down.weight.device)
    weight = down.weight[:, index] if folded is None else folded.W
    new_bias: Tensor | None = None
    if bias:
        old = down.weight.new_zeros(down.out_features) if down.bias is None else down.bias
        new_bias = old if folded is None else folded.b
    model.set_submodule(site.down, make_linear(down, weight, new_bias))
