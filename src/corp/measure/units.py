"""The cost of one unit of a site's width: costs are linear in widths, so one pass gives the cost of any widths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from corp.calibration.batches import Forward, evaluating, run
from corp.calibration.hooks import removing, without_fast_path
from corp.calibration.masks import bound
from corp.calibration.threads import here
from corp.sites import AttentionSite, MLPSite, Site, ValueSite, features_last, layers_of, projection_at, rows_of


@dataclass(frozen=True)
class Unit:
    """The cost of one hidden channel, or of one dimension of all heads together."""

    macs: int
    params: int


@dataclass(frozen=True)
class _Seen:
    """The tokens that a layer returned in one pass over a batch, and the number per sequence."""

    tokens: int
    length: int


def unit_costs(
    model: nn.Module, sites: Iterable[Site], batch: Any | None, forward: Forward | None = None
) -> dict[str, Unit]:
    """The unit cost of every site; multiply-accumulates are those of one pass over `batch`, 0 without one."""
    sites = list(sites)
    seen = _watch(model, sites, batch, forward)
    return {site.name: _unit(model, site, seen) for site in sites}


def tokens_at(model: nn.Module, sites: Iterable[Site], batch: Any, forward: Forward | None = None) -> dict[str, int]:
    """The number of tokens at every site in one pass over `batch`; for attention, the number of queries."""
    sites = list(sites)
    seen = _watch(model, sites, batch, forward)
    return {site.name: seen[_read(site)].tokens for site in sites}


def _read(site: Site) -> str:
    """The name under which the site's tokens are recorded."""
    if isinstance(site, MLPSite):
        return site.down
    return _values(site)[1] if isinstance(site, ValueSite) else _queries(site)[0]


def _unit(model: nn.Module, site: Site, seen: dict[str, _Seen]) -> Unit:
    columns = 0  # of the layer that consumes the site
    macs = 0
    if isinstance(site, MLPSite):
        makers = [(rows, 1, seen[rows.module]) for rows in site.up]
        columns, consumed = 1, seen[site.down]
    elif isinstance(site, ValueSite):
        v, consumed = (seen[name] for name in _values(site))
        makers, columns = [(site.v, site.groups, v)], site.heads
        macs = 0 if site.padded else site.heads * consumed.tokens * v.length  # their average
    else:
        q, k = (seen[name] for name in _queries(site))
        makers = [(site.q, site.heads, q), (site.k, site.groups, k)]
        macs = 0 if site.padded else site.heads * q.tokens * k.length  # the logits
    params = 0
    for name in site.between if isinstance(site, MLPSite) else ():
        module = model.get_submodule(name)
        params += sum(p.numel() for p in module.parameters()) // site.width
        macs += seen[name].tokens * sum(p[0].numel() for p in module.parameters() if p.dim() > 1)  # a convolution's
    for rows, count, made in makers:
        layer = rows_of(model, rows)
        macs += count * made.tokens * layer.weight.shape[1]
        params += count * (layer.weight.shape[1] + (layer.bias is not None))
    if not isinstance(site, AttentionSite):
        outputs = columns * len(projection_at(model, site.down).weight)
        macs += consumed.tokens * outputs
        params += outputs
    return Unit(macs, params)


def _queries(site: AttentionSite) -> tuple[str, str]:
    """The names under which queries and keys are recorded."""
    return (f"{site.name} q", f"{site.name} k") if site.q.bare else (site.q.module, site.k.module)


def _values(site: ValueSite) -> tuple[str, str]:
    """Likewise for values, which share the keys' input, and for the input of the output projection."""
    return (f"{site.attention} k", f"{site.attention} q") if site.v.bare else (site.v.module, site.down)


def _watch(model: nn.Module, sites: list[Site], batch: Any | None, forward: Forward | None) -> dict[str, _Seen]:
    """The tokens at the layers of the sites; for nn.MultiheadAttention, which calls none, those of its inputs."""
    seen: dict[str, _Seen] = defaultdict(lambda: _Seen(0, 0))
    if batch is None:
        return seen

    def note(name: str, x: Tensor) -> None:
        seen[name] = _Seen(x.numel() // x.shape[-1], x.shape[-2] if x.dim() > 1 else 1)

    def watch(name: str) -> RemovableHandle:
        module: Any = model.get_submodule(name)
        if not isinstance(getattr(module, "in_proj_weight", None), Tensor):
            handle: RemovableHandle = module.register_forward_hook(
                here(lambda module, _args, output: note(name, features_last(module, output)))
            )
            return handle

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = bound(module, args, kwargs)
            for side, x in (("q", call["query"]), ("k", call["key"])):
                note(f"{name} {side}", x if module.batch_first or x.dim() == 2 else x.transpose(0, 1))

        handle = module.register_forward_pre_hook(here(before), with_kwargs=True)
        return handle

    handles = [watch(name) for name in dict.fromkeys(name for site in sites for name in layers_of(site))]
    with torch.no_grad(), evaluating(model), without_fast_path(), removing(handles):
        run(model, batch, forward)
    return seen
