"""Hooks on sites: while the dense model runs, add what passes by to the sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from corp.errors import StatisticsError
from corp.sites import AttentionSite, MLPSite, Site
from corp.stats.grams import Grams
from corp.stats.moments import Moments, shift_of
from corp.stats.site_sums import AnySums, SiteSums, Sums

GOLDEN = 0.6180339887498949  # the fraction whose multiples spread most evenly


@dataclass
class Cursor:
    """Where in the data the forward pass under way is: set before each batch, read by the hooks."""

    sample: int = 0  # index of the batch's first sample among all
    held: bool = False  # is this batch kept apart?


@dataclass
class Collector:
    """The sums of a set of sites, and how many tokens of a sample each MLP takes (0: all)."""

    sites: list[Site]
    tokens: dict[str, int]

    def __post_init__(self) -> None:
        self.cursor = Cursor()
        self.sums: dict[str, AnySums] = {site.name: _empty(site) for site in self.sites}
        for site in self.sites:
            if isinstance(site, AttentionSite) and site.out is not None:
                self.sums[site.out] = SiteSums(Moments(site.out_width), Moments(site.out_width))

    def _current(self, name: str, kind: type[Sums]) -> Sums:
        """The sums that the batch under way belongs to."""
        sums = self.sums[name]
        current = sums.held if self.cursor.held else sums.fit
        assert isinstance(current, kind)
        return current

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """While this context is open, every forward pass of `model` adds to the sums."""
        with _removed_later() as handles:
            for site in self.sites:
                if isinstance(site, MLPSite):
                    handles.append(self._watch_input(model, site.name, site.down))
                    continue
                handles += self._watch_attention(model, site)
                if site.out is not None:
                    handles.append(self._watch_input(model, site.out, site.out))
            yield

    @contextmanager
    def finding_shifts(self, model: nn.Module) -> Iterator[None]:
        """While this context is open, a forward pass only sets the shifts: one batch for all workers to share."""
        with _removed_later() as handles:
            for site in self.sites:
                if isinstance(site, MLPSite):
                    handles.append(_before(model, site.down, self._set_shift(site.name)))
                elif site.out is not None:
                    handles.append(_before(model, site.out, self._set_shift(site.out)))
            yield

    def _watch_input(self, model: nn.Module, name: str, linear: str) -> RemovableHandle:
        """The input of a linear layer, into the moments called `name`."""
        tokens = self.tokens.get(name, 0)

        def see(x: Tensor) -> None:
            moments = self._current(name, Moments)
            first = self.sums[name].fit
            if moments.shift is None and isinstance(first, Moments) and first.shift is not None:
                moments.shift = first.shift.clone()  # held-out sums about the fitted ones' shift, alone or with others
            moments.update(x.reshape(-1, x.shape[-1]), choose_tokens(x, tokens, self.cursor.sample))
            _require_finite(moments, name)

        return _before(model, linear, see)

    def _set_shift(self, name: str) -> Callable[[Tensor], None]:
        def see(x: Tensor) -> None:
            sums: Any = self.sums[name]
            sums.fit.shift = shift_of(x.reshape(-1, x.shape[-1]))
            sums.held.shift = sums.fit.shift.clone()  # a file wants every tensor in memory of its own

        return see

    def _watch_attention(self, model: nn.Module, site: AttentionSite) -> list[RemovableHandle]:
        """Queries and keys may come out of one projection or of two; the sums need both."""
        seen: dict[str, Tensor] = {}

        def after(module: str, output: Tensor) -> None:
            for side, rows in (("q", site.q), ("k", site.k)):
                if rows.module == module:
                    seen[side] = output[..., rows.start : rows.stop]
            if len(seen) == 2:
                grams = self._current(site.name, Grams)
                grams.update(_as_batch(seen.pop("q")), _as_batch(seen.pop("k")))
                _require_finite(grams, site.name)

        def hook(module: str) -> RemovableHandle:
            return model.get_submodule(module).register_forward_hook(lambda _m, _args, output: after(module, output))

        return [hook(module) for module in dict.fromkeys((site.q.module, site.k.module))]


def choose_tokens(x: Tensor, tokens: int, first_sample: int) -> Tensor | None:
    """(B, n, D) -> (m, D): `tokens` of every sample's, spread evenly, shifted from sample to sample; None means all.

    Which ones depends on the sample's index alone, not on how samples are batched or shared out to workers.
    """
    if x.dim() != 3 or tokens == 0 or tokens >= x.shape[1]:
        return None
    B, n, D = x.shape
    offset = torch.arange(first_sample, first_sample + B, dtype=torch.float64)[:, None] * GOLDEN % 1  # (B, 1)
    position = (torch.arange(tokens, dtype=torch.float64) + offset) * (n / tokens)  # (B, m), in [0, n)
    flat = (torch.arange(B)[:, None] * n + position.long().clamp_(max=n - 1)).reshape(-1)
    return x.reshape(B * n, D)[flat.to(x.device)]


def _empty(site: Site) -> AnySums:
    if isinstance(site, MLPSite):
        return SiteSums(Moments(site.width), Moments(site.width))
    return SiteSums(Grams(site.heads, site.width), Grams(site.heads, site.width))


@contextmanager
def _removed_later() -> Iterator[list[RemovableHandle]]:
    handles: list[RemovableHandle] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


def _before(model: nn.Module, linear: str, see: Callable[[Tensor], None]) -> RemovableHandle:
    return model.get_submodule(linear).register_forward_pre_hook(lambda _m, args: see(args[0]))


def _as_batch(x: Tensor) -> Tensor:
    """(B, n, C); an unbatched (n, C) is one sample."""
    return x[None] if x.dim() == 2 else x


def _require_finite(sums: Moments | Grams, name: str) -> None:
    if not sums.finite:
        raise StatisticsError(
            f"NaN or Inf in the activations of site {name!r}; check the weights and the input, "
            "or calibrate in float32 (half precision overflows above 65504)"
        )
