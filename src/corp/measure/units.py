"""What one unit of a site's width costs: pruning is linear in it, so the cost of any widths follows from one pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from corp.batches import evaluating, run
from corp.sites import AttentionSite, MLPSite, Rows, Site
from corp.stats.masks import bound
from corp.surgery.linear import projection_at, rows_of


@dataclass(frozen=True)
class Unit:
    """Of one hidden channel, or of one dimension of all heads together."""

    macs: int
    params: int


@dataclass(frozen=True)
class _Seen:
    """Tokens that came out of a layer in one pass over a batch, and how many of them a sequence has."""

    tokens: int
    length: int


def unit_costs(model: nn.Module, sites: Iterable[Site], batch: Any | None) -> dict[str, Unit]:
    """By site; multiply-accumulates are those of one pass over `batch`, 0 without one."""
    sites = list(sites)
    seen = {} if batch is None else _watch(model, sites, batch)
    return {site.name: _unit(model, site, seen) for site in sites}


def _unit(model: nn.Module, site: Site, seen: dict[str, _Seen]) -> Unit:
    nothing = _Seen(0, 0)
    if isinstance(site, AttentionSite):
        q, k = (seen.get(rows.module, nothing) for rows in (site.q, site.k))
        q, k = (seen.get(f"{site.name} {side}", known) for side, known in (("q", q), ("k", k)))
        parts = [(site.q, site.heads, q), (site.k, site.groups, k)]
        macs = site.heads * q.tokens * k.length  # the logits
    elif isinstance(site, MLPSite):
        parts = [(rows, 1, seen.get(rows.module, nothing)) for rows in site.up]
        macs = 0
    else:
        v = seen.get(f"{site.attention} k", seen.get(site.v.module, nothing))
        out = seen.get(f"{site.attention} q", seen.get(site.down, nothing))
        parts = [(site.v, site.groups, v)]
        macs = site.heads * out.tokens * v.length  # their average
    params = 0
    for rows, count, passed in parts:
        layer = rows_of(model, rows)
        macs += count * passed.tokens * layer.weight.shape[1]
        params += count * (layer.weight.shape[1] + (layer.bias is not None))
    if not isinstance(site, AttentionSite):
        columns = 1 if isinstance(site, MLPSite) else site.heads
        outputs = len(projection_at(model, site.down).weight)
        tokens = out.tokens if not isinstance(site, MLPSite) else seen.get(site.down, nothing).tokens
        macs += columns * tokens * outputs
        params += columns * outputs
    return Unit(macs, params)


def _watch(model: nn.Module, sites: list[Site], batch: Any) -> dict[str, _Seen]:
    """What passes the layers of the sites; nn.MultiheadAttention, which calls none, by its inputs."""
    seen: dict[str, _Seen] = {}

    def note(name: str, x: Tensor) -> None:
        seen[name] = _Seen(x.numel() // x.shape[-1], x.shape[-2] if x.dim() > 1 else 1)

    def hook(name: str) -> Any:
        return lambda _module, _args, output: note(name, output)

    def multihead(name: str, module: Any) -> Any:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = bound(module, args, kwargs)
            for side, x in (("q", call["query"]), ("k", call["key"])):
                first = module.batch_first or x.dim() == 2
                note(f"{name} {side}", x if first else x.transpose(0, 1))

        return before

    handles = []
    layers: dict[str, None] = {}
    for site in sites:
        rows = _rows(site)
        if rows[0].weight == "weight":
            layers |= dict.fromkeys(part.module for part in rows)
            layers |= dict.fromkeys([] if isinstance(site, AttentionSite) else [site.down])
        else:
            module = model.get_submodule(rows[0].module)
            handles.append(module.register_forward_pre_hook(multihead(rows[0].module, module), with_kwargs=True))
    handles += [model.get_submodule(name).register_forward_hook(hook(name)) for name in layers]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), evaluating(model):
            run(model, batch)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()
    return seen


def _rows(site: Site) -> tuple[Rows, ...]:
    if isinstance(site, AttentionSite):
        return (site.q, site.k)
    return site.up if isinstance(site, MLPSite) else (site.v,)
