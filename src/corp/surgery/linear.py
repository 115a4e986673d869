"""Narrower linear layers, in any layout of their weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from corp.calibration.threads import has_hooks
from corp.numerics.affine import Folded
from corp.sites import LinearSite, MLPSite, Projection, is_pointwise, is_transposed, projection_at


def why_not_linear(module: object) -> str | None:
    """Why a layer cannot be narrowed; None if it can: exactly nn.Linear or Conv1D, with nothing attached.

    A subclass or a wrapper may compute something else, a hook may change inputs or outputs, and a weight that
    is computed from other parameters (weight_norm, pruning masks) would be recomputed.
    """
    plain = isinstance(module, nn.Module) and (type(module) is nn.Linear or is_transposed(module))
    if not plain or not isinstance(module, nn.Module):
        remedy = "; merge the adapter into the model first (merge_and_unload() in peft)" if is_extended(module) else ""
        return f"is a {type(module).__module__}.{type(module).__name__}, not a plain linear layer{remedy}"
    return what_changes_it(module)


def is_extended(module: object) -> bool:
    """Whether a module wraps a layer and adds to it, as the adapters of peft do."""
    return isinstance(module, nn.Module) and isinstance(getattr(module, "base_layer", None), nn.Module)


def what_changes_it(module: nn.Module) -> str | None:
    """What makes a layer compute more than its class and weight imply; None if nothing does."""
    if torch.nn.utils.parametrize.is_parametrized(module):
        return f"is a {type(module).__module__}.{type(module).__name__}, not a plain linear layer"
    if has_hooks(module):
        return "has forward hooks, which may change what it computes; remove them before pruning"
    if odd := sorted({name for name, _ in module.named_parameters(recurse=False)} - {"weight", "bias"}):
        names = ", ".join(odd)
        return f"computes its weight from {names}; remove that (torch.nn.utils.remove_weight_norm …) before pruning"
    return None


def make_linear(like: Any, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """A layer of the same class as `like` with weight (out, in) and bias, in its dtype and with its flags."""
    out_features, in_features = weight.shape
    linear: Any
    if is_pointwise(like):
        linear = type(like)(in_features, out_features, 1, bias=bias is not None, device="meta")
        weight = weight.reshape(linear.weight.shape)
    elif is_transposed(like):
        with torch.device("meta"):
            linear = type(like)(out_features, in_features)
        weight = weight.mT
        bias = weight.new_zeros(out_features) if bias is None else bias
    else:
        linear = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    linear.weight = new_parameter(weight, like.weight)
    if bias is not None:
        linear.bias = new_parameter(bias, like.weight)
    made: nn.Module = linear.train(like.training)
    return made


def new_parameter(values: Tensor, like: Tensor) -> nn.Parameter:
    # A copy, never a view: the pruned model must not keep the dense storage alive or share it.
    fresh = values.detach().to(like.device, like.dtype, copy=True).contiguous()
    return nn.Parameter(fresh, requires_grad=like.requires_grad)


def fuse(like: Tensor, parts: list[Projection]) -> Projection:
    """Several linear maps of one input as one (one matrix product), in the dtype of `like`."""
    biases = [part.bias.to(like) for part in parts if part.bias is not None]
    return Projection(
        torch.cat([part.weight.to(like) for part in parts]), torch.cat(biases) if len(biases) == len(parts) else None
    )


def unfuse(whole: Projection, rows: Sequence[int]) -> list[Projection]:
    """The inverse of `fuse`: parts with the given numbers of rows."""
    biases = [None] * len(rows) if whole.bias is None else whole.bias.split(list(rows))
    return [Projection(*part) for part in zip(whole.weight.split(list(rows)), biases, strict=True)]


def refill(model: nn.Module, name: str, folded: Folded, *, bias: bool) -> None:
    """Give the linear layer called `name` other parameters of the same shape; `bias` may be new to it."""
    module: Any = model.get_submodule(name)
    if bias and module.bias is None:
        model.set_submodule(name, make_linear(module, folded.W, folded.b))
        return
    with torch.no_grad():
        module.weight.copy_(folded.W.mT if is_transposed(module) else folded.W.view_as(module.weight))
        if bias:
            module.bias.copy_(folded.b)


def shrink_mlp(model: nn.Module, site: MLPSite, kept: Tensor, folded: Folded | None, *, bias: bool) -> None:
    """Keep the hidden channels `kept` (S,): rows of what makes them, columns of what consumes them.

    `folded` replaces the second layer's parameters; without it they are only sliced. `bias` says
    whether the second layer has a bias afterwards (compensation may give it one).
    """
    for module in dict.fromkeys(rows.module for rows in site.up):
        up = projection_at(model, module)
        # Packed gate and up lose the same channels of each half, so that chunk(2) still halves it.
        index = torch.cat([torch.tensor(rows.positions)[kept] for rows in site.up if rows.module == module])
        index = index if len(site.up) == 1 or not site.up[0].period else index.sort().values  # neighbours stay so
        index = index.to(up.weight.device)
        kept_bias = None if up.bias is None else up.bias[index]
        model.set_submodule(module, make_linear(model.get_submodule(module), up.weight[index], kept_bias))
    for name in site.between:
        model.set_submodule(name, _some_channels(model.get_submodule(name), site.width, kept))
    shrink_down(model, site, kept, folded, bias=bias)


def _some_channels(dense: nn.Module, width: int, kept: Tensor) -> nn.Module:
    """A module that treats every one of `width` channels alone, for the channels `kept` (S,)."""
    made: Any = copy.copy(dense)
    for kind in ("_parameters", "_buffers"):
        tensors = {name: t for name, t in getattr(dense, kind).items() if t is not None and t.shape[:1] == (width,)}
        some = {name: new_parameter(t[kept.to(t.device)], t) for name, t in tensors.items()}
        narrow = some if kind == "_parameters" else {name: part.data for name, part in some.items()}
        setattr(made, kind, {**getattr(dense, kind), **narrow})
    for name in ("in_channels", "out_channels", "groups", "num_features"):
        if hasattr(made, name):
            setattr(made, name, len(kept))
    return made  # type: ignore[no-any-return]


def shrink_down(model: nn.Module, site: LinearSite, kept: Tensor, folded: Folded | None, *, bias: bool) -> None:
    """Keep the inputs `kept` (S,) of the layer that consumes the site's channels or values; see shrink_mlp."""
    down = projection_at(model, site.down)
    weight = down.weight[:, kept.to(down.weight.device)] if folded is None else folded.W
    new_bias: Tensor | None = None
    if bias:
        old = down.weight.new_zeros(len(down.weight)) if down.bias is None else down.bias
        new_bias = old if folded is None else folded.b
    model.set_submodule(site.down, make_linear(model.get_submodule(site.down), weight, new_bias))
