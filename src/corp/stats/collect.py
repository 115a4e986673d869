"""Hooks on sites: while the dense model runs, add what passes by to the sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from corp.errors import StatisticsError
from corp.sites import AttentionSite, MLPSite, Site
from corp.stats.grams import Grams
from corp.stats.moments import Moments
from corp.stats.statistics import Statistics


@contextmanager
def collect(model: nn.Module, sites: Iterable[Site], into: Statistics) -> Iterator[None]:
    """While this context is open, every forward pass of `model` adds to `into`."""
    handles: list[RemovableHandle] = []
    try:
        for site in sites:
            if isinstance(site, MLPSite):
                handles += _watch_mlp(model, site, into.moments.setdefault(site.name, Moments(site.width)))
            else:
                handles += _watch_attention(
                    model, site, into.grams.setdefault(site.name, Grams(site.heads, site.width))
                )
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch_mlp(model: nn.Module, site: MLPSite, moments: Moments) -> list[RemovableHandle]:
    def before_down(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        moments.update(args[0].reshape(-1, site.width))
        _require_finite(moments, site)

    return [model.get_submodule(site.down).register_forward_pre_hook(before_down)]


def _watch_attention(model: nn.Module, site: AttentionSite, grams: Grams) -> list[RemovableHandle]:
    """Queries and keys may come out of one projection or of two; the sums need both."""
    seen: dict[str, Tensor] = {}

    def after(module: str, output: Tensor) -> None:
        for side, rows in (("q", site.q), ("k", site.k)):
            if rows.module == module:
                seen[side] = output[..., rows.start : rows.stop]
        if len(seen) == 2:
            q, k = seen.pop("q"), seen.pop("k")
            grams.update(_as_batch(q), _as_batch(k))
            _require_finite(grams, site)

    def hook(module: str) -> RemovableHandle:
        return model.get_submodule(module).register_forward_hook(lambda _m, _args, output: after(module, output))

    return [hook(module) for module in dict.fromkeys((site.q.module, site.k.module))]


def _as_batch(x: Tensor) -> Tensor:
    """(B, n, C); an unbatched (n, C) is one sample."""
    return x[None] if x.dim() == 2 else x


def _require_finite(sums: Moments | Grams, site: Site) -> None:
    if not sums.finite:
        raise StatisticsError(
            f"NaN or Inf in the activations of site {site.name!r}; check the weights and the input, "
            "or calibrate in float32 (half precision overflows above 65504)"
        )
