"""Reading the weights that sites point at."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from corp.errors import ModelError
from corp.sites.found import Sites
from corp.sites.kinds import AttentionSite, QKNorm, Rows


def fingerprint(model: nn.Module) -> str:
    """A hash of all parameters and their names, by which statistics and plans of other weights are refused."""
    return fingerprint_of(model.named_parameters())


def fingerprint_of(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """The fingerprint of a model with these parameters, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in parameters:
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        if parameter.device.type != "meta":
            try:
                raw = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                digest.update(raw.numpy().data)
            except (RuntimeError, TypeError) as error:
                raise ModelError(
                    f"the weight {name} cannot be read here ({error}); gather a sharded model (FSDP), or load it "
                    "without quantisation, before pruning"
                ) from error
    return digest.hexdigest()


class Projection(NamedTuple):
    """Weight (out, in) and bias (out,) of a linear map."""

    weight: Tensor
    bias: Tensor | None


def site_devices(model: nn.Module, sites: Sites) -> dict[str, torch.device]:
    """The device of every site's weights, by the names that its statistics have."""
    found: dict[str, torch.device] = {}
    for site in sites:
        if isinstance(site, AttentionSite):
            found[site.name] = found[site.plain_name] = rows_of(model, site.q).weight.device
        else:
            found[site.name] = projection_at(model, site.down).weight.device
    if sites.output is not None:
        found[sites.output.name] = projection_at(model, sites.output.name).weight.device
    return found


def is_transposed(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D: a linear layer with a weight (in, out) that always has a bias."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_pointwise(module: object) -> bool:
    """Whether this is a convolution of one position, which maps the channels of every position like a linear layer."""
    if type(module) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return False
    conv: Any = module
    alone = {*conv.kernel_size, *conv.stride} == {1} and conv.groups == 1
    return alone and (isinstance(conv.padding, str) or not any(conv.padding))


def features_last(module: nn.Module, x: Tensor) -> Tensor:
    """A view of a module's input or output with features last; convolutions have them after the samples."""
    channels_first = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.modules.batchnorm._BatchNorm)
    return x.movedim(1, -1) if channels_first and x.dim() > 1 else x


def projection_at(model: nn.Module, name: str) -> Projection:
    """Weight (out, in) and bias of the linear layer called `name`; only this function knows how they are stored."""
    return projection_of(model.get_submodule(name))


def projection_of(module: Any) -> Projection:
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()
    if is_pointwise(module):
        return Projection(weight.flatten(1), bias)
    return Projection(weight.mT if is_transposed(module) else weight, bias)


def rows_of(model: nn.Module, rows: Rows) -> Projection:
    """The part of a linear map that `rows` points at."""
    whole = _at(model.get_submodule(rows.module), rows)
    return Projection(whole.weight[rows.index], None if whole.bias is None else whole.bias[rows.index])


def gains_of(model: nn.Module, norm: QKNorm) -> tuple[Tensor, Tensor]:
    """The gains (d,) of the norms of queries and of keys for every dimension of a head, in float32 at least."""
    modules: list[Any] = [model.get_submodule(name) for name in (norm.q, norm.k)]
    weights = [module.weight.detach() for module in modules]
    q, k = (w.to(torch.promote_types(w.dtype, torch.float32)) + norm.shift for w in weights)
    return q, k


def _at(module: nn.Module, rows: Rows) -> Projection:
    if rows.weight == "weight":
        return projection_of(module)
    bias = getattr(module, rows.bias)  # bare parameters of nn.MultiheadAttention
    return Projection(getattr(module, rows.weight).detach(), None if bias is None else bias.detach())
