"""The collector: while the dense model runs, hooks on its sites add activations to the sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from corp.calibration.grams import Grams
from corp.calibration.heads import Heads, lengths_of, normed, split_heads
from corp.calibration.hooks import block_of, input_of, removing, without_autocast, without_fast_path
from corp.calibration.kernel import Watched, watching_kernel
from corp.calibration.masks import Masks, bound
from corp.calibration.moments import Moments, shift_of
from corp.calibration.multihead import averages, is_causal, padding, project
from corp.calibration.pairs import SAMPLED_QUERIES, PairSums
from corp.calibration.site_sums import AnySums, Sums, empty_sums
from corp.calibration.threads import here
from corp.calibration.tokens import as_batch, as_samples, choose_tokens, fitting, of_same_samples, real_tokens
from corp.errors import StatisticsError
from corp.sites import AttentionSite, LinearSite, OutputHead, Site, ValueSite, features_last


class Cursor(NamedTuple):
    """The position of the current forward pass in the data: set before each batch, read by the hooks."""

    sample: int = 0  # index of the batch's first sample among all
    held: bool = False  # whether this batch is held out
    size: int = 1  # samples in the batch


@dataclass
class Collector:
    """The sums of a set of sites, and how many tokens of a sample each MLP uses (0: all), or rotary queries.

    Padding is excluded from all sums. `causal`: masked logits of causal attentions are left out, up to blocks.
    """

    sites: list[Site | OutputHead]
    tokens: dict[str, int]
    causal: bool = True

    def __post_init__(self) -> None:
        self.cursor = Cursor()
        self.masks = Masks()
        self.sums: dict[str, AnySums] = {name: sums for site in self.sites for name, sums in empty_sums(site).items()}

    def _current(self, name: str, kind: type[Sums]) -> Sums:
        """The sums that the current batch belongs to."""
        sums = self.sums[name]
        current = sums.held if self.cursor.held else sums.fit
        assert isinstance(current, kind)
        return current

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """While this context is open, every forward pass of `model` adds to the sums."""
        with self.hooks(model) as handles:
            for site in self.sites:
                if isinstance(site, AttentionSite):
                    handles += self.watch_queries(model, site)
                else:
                    handles.append(self._watch_input(model, site))
                    handles += self._watch_stream(model, site)
            yield

    @contextmanager
    def finding_shifts(self, model: nn.Module) -> Iterator[None]:
        """While this context is open, a forward pass only sets the shifts, which all workers share."""

        def see(name: str, x: Tensor, mask: Tensor | None) -> None:
            sums: Any = self.sums[name]
            sums.fit.shift = shift_of(real_tokens(x, mask))
            sums.held.shift = sums.fit.shift.clone()  # a file needs every tensor in separate memory

        with self.hooks(model) as handles:
            for site in self.sites:
                if not isinstance(site, AttentionSite):
                    handles.append(self.before(model, site, partial(see, site.name)))
            yield

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[list[RemovableHandle]]:
        """A list for hooks, removed at the end; until then the fast path of nn.MultiheadAttention is off."""
        handles = self.masks.watch(model, self.sites)
        kernels = [self._see_kernel(site) for site in self.sites if _read_at_kernel(site)]
        with without_fast_path(), removing(handles), watching_kernel(model, kernels):
            yield handles

    def _watch_input(self, model: nn.Module, site: LinearSite | OutputHead) -> RemovableHandle:
        """Add the input of the layer that consumes an MLP's channels, or an attention's values, to the moments."""
        name = site.name
        tokens = self.tokens.get(name, 0)

        def see(x: Tensor, mask: Tensor | None) -> None:
            moments = self._current(name, Moments)
            first = self.sums[name].fit
            if moments.shift is None and isinstance(first, Moments) and first.shift is not None:
                moments.shift = first.shift.clone()  # held-out sums use the shift of the fitted ones
            with without_autocast(x.device):
                moments.update(real_tokens(x, mask), choose_tokens(x, tokens, self.cursor.sample, mask))
            _require_finite(moments, name)

        return self.before(model, site, see)

    def _watch_stream(self, model: nn.Module, site: LinearSite | OutputHead) -> list[RemovableHandle]:
        """Add the output of the layer's block, the residual stream to which the layer adds, to the moments."""
        name = block_of(site.down)
        if name is None:
            return []
        layer: Any = model.get_submodule(site.down)
        either_way = layer.weight.shape[:2]  # (out, in), or (in, out) of a Conv1D

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            stream = output[0] if isinstance(output, tuple) and output else output
            stream = features_last(layer, stream) if isinstance(stream, Tensor) else stream
            if isinstance(stream, Tensor) and stream.shape[-1] in either_way:
                self._current(site.name, Moments).see_stream(real_tokens(*self._by_sample(site, stream)))

        return [model.get_submodule(name).register_forward_hook(here(after))]

    def before(
        self, model: nn.Module, site: LinearSite | OutputHead, see: Callable[[Tensor, Tensor | None], None]
    ) -> RemovableHandle:
        """Call `see` with the input of the linear layer as (B, n, D)."""
        if isinstance(site, ValueSite) and site.v.bare:
            return self._before_multihead(model, site, see)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            see(*self._by_sample(site, features_last(module, input_of(args, kwargs))))

        handle: RemovableHandle = model.get_submodule(site.down).register_forward_pre_hook(
            here(before), with_kwargs=True
        )
        return handle

    def _by_sample(self, site: LinearSite | OutputHead, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The tokens (B, n, D) at a site, and the mask (B, n) of the real ones."""
        mask = self.masks.of(site.mask)
        x = as_samples(x, mask, self.cursor.size, batch_first=site.batch_first)
        return x, fitting(mask, x, site.mask)

    def _before_multihead(
        self, model: nn.Module, site: ValueSite, see: Callable[[Tensor, Tensor | None], None]
    ) -> RemovableHandle:
        module: Any = model.get_submodule(site.attention)

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            z = averages(module, args, kwargs)
            z = as_batch(z if module.batch_first or z.dim() == 2 else z.transpose(0, 1))
            see(z, padding(site.name, bound(module, args, kwargs), z)[0])

        handle: RemovableHandle = module.register_forward_pre_hook(here(before), with_kwargs=True)
        return handle

    def watch_queries(self, model: nn.Module, site: AttentionSite) -> list[RemovableHandle]:
        """Hooks on the projections of queries and keys, one or two; the sums need both outputs."""
        if site.q.bare:
            return self._watch_multihead(model, site)
        if _read_at_kernel(site):
            return []
        seen: dict[str, Tensor] = {}
        angles: list[tuple[Tensor, Tensor]] = []

        def after(module: str, output: Tensor) -> None:
            nonlocal seen
            for side, rows in (("q", site.q), ("k", site.k)):
                if rows.module == module:
                    seen[side] = output[..., rows.index]
            if len(seen) == 1:  # the other one comes later, and this one may be scaled in place until then
                seen = {side: x.clone() for side, x in seen.items()}
            if len(seen) == 2:
                q, k = seen.pop("q"), seen.pop("k")
                q, k = of_same_samples(q, k, batch_first=site.batch_first)
                masks = self.masks.of(site.q_mask), self.masks.of(site.k_mask)
                features = lengths_of(site, q, k)
                if site.norm is not None:
                    q, k = normed(model, site, q, k)
                heads = split_heads(site, q, k, next(iter(angles), None))
                self.add(site, Heads(*heads, *masks, bool(site.causal), features))

        def hook(module: str) -> RemovableHandle:
            return model.get_submodule(module).register_forward_hook(
                here(lambda _m, _args, output: after(module, output))
            )

        handles = [hook(module) for module in dict.fromkeys((site.q.module, site.k.module))]
        if site.rotary and (argument := site.rotary.argument):
            attention = model.get_submodule(site.name)

            def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                angles[:] = [bound(attention, args, kwargs)[argument]]

            handles.append(attention.register_forward_pre_hook(here(before), with_kwargs=True))
        return handles

    def _see_kernel(self, site: AttentionSite) -> Watched:
        """Observe queries and keys (B, H, n, d) at the kernel; keys may have been repeated for their queries."""
        order = site.q.head_order

        def see(q: Tensor, k: Tensor, scale: float) -> None:
            k = k if k.shape[1] == site.groups else k[:, :: site.heads // site.groups]
            q, k = (x if order is None else x[..., order] for x in (q, k))
            q, k = Heads(q, k).joined()
            masks = self.masks.of(site.q_mask), self.masks.of(site.k_mask)
            self.add(replace(site, scale=scale), Heads(*split_heads(site, q, k), *masks, bool(site.causal)))

        return Watched(site, see)

    def _watch_multihead(self, model: nn.Module, site: AttentionSite) -> list[RemovableHandle]:
        """Hooks on nn.MultiheadAttention, which calls no projections: its inputs are projected again here."""
        module: Any = model.get_submodule(site.name)

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = bound(module, args, kwargs)
            query, key = call["query"], call["key"]
            if query.dim() == 3 and not module.batch_first:
                query, key = query.transpose(0, 1), key.transpose(0, 1)
            q, k = (project(module, rows, as_batch(x)) for rows, x in ((site.q, query), (site.k, key)))
            causal = is_causal(call, q.shape[1], k.shape[1])
            self.add(site, Heads(*split_heads(site, q, k), *padding(site.name, call, k), causal))

        return [module.register_forward_pre_hook(here(before), with_kwargs=True)]

    def add(self, site: AttentionSite, heads: Heads) -> None:
        """Add the products of rotated dimensions, and of the plain ones after them, to the sums."""
        with without_autocast(heads.q.device):
            self._add(site, heads)

    def _add(self, site: AttentionSite, heads: Heads) -> None:
        if site.rotary:
            causal = heads.causal and self.causal and heads.q.shape[2] == heads.k.shape[2]
            mask = fitting(heads.q_mask, heads.q.transpose(1, 2), site.q_mask)
            options: dict[str, Any] = {"scale": site.scale, "window": site.window, "features": heads.features}
            options["queries"] = self.tokens.get(site.name, SAMPLED_QUERIES)
            pairs = self._current(site.name, PairSums)
            pairs.update(heads.q, heads.k, causal=causal, mask=mask, **options)
            _require_finite(pairs, site.name)
        if site.plain_width:
            self._add_plain(site, heads)

    def _add_plain(self, site: AttentionSite, heads: Heads) -> None:
        q, k = heads.joined(site.rotary_dims)
        q_mask, k_mask = fitting(heads.q_mask, q, site.q_mask), fitting(heads.k_mask, k, site.k_mask)
        causal = heads.causal and self.causal and q.shape[1] == k.shape[1]
        if site.groups < site.heads:
            shared = site.heads // site.groups
            k = k.unflatten(-1, (site.groups, -1)).repeat_interleave(shared, dim=2).flatten(2)
        grams = self._current(site.plain_name, Grams)
        grams.update(q, k, window=site.window, q_mask=q_mask, k_mask=k_mask, causal=causal)
        _require_finite(grams, site.name)


def _read_at_kernel(site: Site | OutputHead) -> TypeGuard[AttentionSite]:
    """Whether the site is a rotary attention that does not get its angles as an argument."""
    return isinstance(site, AttentionSite) and site.rotary is not None and site.rotary.argument is None


def _require_finite(sums: Moments | Grams | PairSums, name: str) -> None:
    if not sums.finite:
        raise StatisticsError(
            f"NaN or Inf in the activations of site {name!r}; check the weights and the input, "
            "or calibrate in float32 (half precision overflows above 65504)"
        )
