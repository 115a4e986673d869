"""Changes of a model that leave its function as it is: channels and head dimensions reordered, rotated or scaled."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import corp
from corp.sites import AttentionSite, MLPSite, Rows, Site, Sites, ValueSite
from tests.helpers.site_outputs import parameters_of

Map = Callable[[int], Tensor]  # width -> matrix (width, width) that maps one group's dimensions to new ones


def permutation(generator: torch.Generator) -> Map:
    return lambda width: torch.eye(width, dtype=torch.float64)[torch.randperm(width, generator=generator)]


def rotation(generator: torch.Generator) -> Map:
    def draw(width: int) -> Tensor:
        return torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q

    return draw


def changed(model: nn.Module, kinds: str, draw: Map) -> tuple[nn.Module, dict[str, list[Tensor]]]:
    """A copy with the dimensions of every group of these kinds mapped by `draw`, and the maps by site.

    The maps are orthogonal: what consumes the new dimensions takes them back by the transpose.
    """
    made, maps = copy.deepcopy(model), {}
    for site in _of(corp.find_sites(model), kinds):
        maps[site.name] = [draw(site.width) for _ in range(getattr(site, "groups", 1))]
        _change(made, site, maps[site.name])
    return made, maps


def scaled(model: nn.Module, by: Callable[[int], Tensor]) -> nn.Module:
    """A copy whose hidden channels are `by` (D,) times as large, and the columns that consume them as much smaller.

    Of a gated MLP the linear half is scaled; otherwise the activation has to be a ReLU.
    """
    made = copy.deepcopy(model)
    for site in corp.find_sites(model).mlp:
        factors = by(site.width)
        _map_rows(made, site.up[-1], [factors.diag()])
        _map_columns(made, site.down, [factors.reciprocal().diag()])
    return made


def _of(sites: Sites, kinds: str) -> list[Site]:
    return [site for site in sites if site.kind in kinds.split()]


def _change(model: nn.Module, site: Site, maps: list[Tensor]) -> None:
    if isinstance(site, AttentionSite):
        _map_rows(model, site.k, maps)
        _map_rows(model, site.q, _repeated(maps, site.heads))
        return
    for rows in site.up if isinstance(site, MLPSite) else (site.v,):
        _map_rows(model, rows, maps)
    _map_columns(model, site.down, _repeated(maps, site.heads) if isinstance(site, ValueSite) else maps)


def _repeated(maps: list[Tensor], heads: int) -> list[Tensor]:
    """One map per query head, of groups of heads that share theirs."""
    return [m for m in maps for _ in range(heads // len(maps))]


def _map_rows(model: nn.Module, rows: Rows, maps: list[Tensor]) -> None:
    whole = torch.block_diag(*maps)
    for tensor in parameters_of(model, rows):
        if tensor is not None:
            tensor[rows.index] = (whole @ tensor[rows.index].double()).to(tensor.dtype)


def _map_columns(model: nn.Module, down: str, maps: list[Tensor]) -> None:
    weight, _ = parameters_of(model, Rows(down, 0, 0))
    weight.copy_((weight.double() @ torch.block_diag(*maps).T).to(weight.dtype))
