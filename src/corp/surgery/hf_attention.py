"""Attention in transformers' calling convention, with separate widths of queries and keys, and of values.

The dense module's class stays a base of the narrowed one, because transformers finds the modules whose weights it
returns (output_attentions) by class; its forward is not used. The library chooses the attention kernel:
the adapter passes in the function that looks it up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from corp.numerics.rotary import rotate
from corp.sites import Projection
from corp.surgery.attention import attend, attend_openly, equal_widths, split_heads
from corp.surgery.hf_names import Names
from corp.surgery.linear import fuse, make_linear

Lookup = Callable[[Any], Callable[..., tuple[Tensor, Tensor | None]]]


class NarrowAttention(nn.Module):
    """Takes and returns what the dense module did, and reuses everything of it except the narrowed projections."""

    config: Any
    layer_idx: int
    convention: ClassVar[type[NarrowAttention]]
    dense_class: ClassVar[type[nn.Module]]

    def __init__(
        self,
        dense: Any,
        q: Projection | None,
        k: Projection | None,
        v: Projection | None,
        *,
        names: Names,
        cross: bool,
        lookup: Lookup,
    ) -> None:
        nn.Module.__init__(self)  # not the dense class's: its layers would be made only to be replaced
        for key, value in vars(dense).items():
            vars(self)[key] = value.copy() if isinstance(value, dict) else value
        self.names, self.cross, self.lookup = names, cross, lookup
        self.qk_heads, self.kv_count = names.count_heads(dense)
        # Of the DENSE width: pruning must not change the temperature.
        self.qk_scale: float = getattr(dense, names.scale) if names.scale else attrgetter(names.head_dim)(dense) ** -0.5
        given = {"q": q, "k": k, "v": v}
        for name, letters in names.parts:
            own = names.split(dense, name, letters)
            parts = [given[letter] or own[letter] for letter in letters]
            if "q" in letters:
                self.qk_dim = len(parts[letters.index("q")].weight) // self.qk_heads
            if "v" in letters:
                self.v_dim = len(parts[letters.index("v")].weight) // self.kv_count
            if any(given[letter] for letter in letters) or names.by_head:
                linear = getattr(dense, name)
                setattr(self, name, make_linear(linear, *fuse(linear.weight, parts)))

    def extra_repr(self) -> str:
        return f"heads={self.qk_heads}, qk_dim={self.qk_dim}, v_dim={self.v_dim}"

    def __reduce__(self) -> tuple[Any, ...]:
        # The class itself is made at run time, so pickle and deepcopy must recreate it.
        return _blank, (self.convention, self.dense_class), vars(self)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        past_key_values: Any = None,
        key_value_states: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        # If both masks are arguments, attention_mask is that of the queries, even if the other is None.
        encoder_mask = kwargs.pop("encoder_attention_mask", attention_mask)
        if self.cross:
            source = encoder_hidden_states if key_value_states is None else key_value_states
            attention_mask = encoder_mask
            (q,) = self._project("q", hidden_states)
            k, v = self._from_encoder(source, past_key_values)
        else:
            q, k, v = self._project("qkv", hidden_states)
            past = getattr(past_key_values, "self_attention_cache", past_key_values)
            if past is not None:
                k, v = past.update(k, v, self.layer_idx)
        y, weights = self._attend(q, k, v, attention_mask, kwargs)  # (B, n, H, d)
        return self._finish(y), weights

    def _project(self, wanted: str, states: Tensor | None) -> tuple[Tensor, ...]:
        """Heads (B, H, n, width) of the requested ones of q, k and v, each projection run once."""
        widths = {"q": self.qk_dim, "k": self.qk_dim, "v": self.v_dim}
        heads = {"q": self.qk_heads, "k": self.kv_count, "v": self.kv_count}
        found: dict[str, Tensor] = {}
        for name, letters in self.names.parts:
            if set(letters) & set(wanted):
                split = getattr(self, name)(states).split([heads[one] * widths[one] for one in letters], dim=-1)
                found.update({one: split_heads(x, heads[one]) for one, x in zip(letters, split, strict=True)})
        return tuple(found[letter] for letter in wanted)

    def _from_encoder(self, source: Tensor | None, past: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of the other sequence; they never change, so a cache holds them after the first step."""
        if past is None:
            k, v = self._project("kv", source)
            return k, v
        store = past.cross_attention_cache
        if past.is_updated.get(self.layer_idx):
            layer = store.layers[self.layer_idx]
            return layer.keys, layer.values
        k, v = self._project("kv", source)
        k, v = store.update(k, v, self.layer_idx)
        past.is_updated[self.layer_idx] = True
        return k, v

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        kernel = self.config._attn_implementation
        # Eager supports any width; sdpa's fused kernel needs equal ones except on CUDA; flash kernels always do.
        # A single query gains nothing from the fused kernel, and padding would copy the whole cache.
        single = kernel == "sdpa" and (q.device.type == "cuda" or q.shape[2] == 1)
        if kernel not in ("eager", None) and not single:
            q, k, v = equal_widths(q, k, v)
        drop = self._dropout() if self.training else 0.0
        kwargs = {**{name: self._named(place) for name, place in self.names.extras}, **kwargs}
        y, weights = self.lookup(self)(self, q, k, v, mask, dropout=drop, scaling=self.qk_scale, **kwargs)
        return y[..., : self.v_dim], weights

    def _named(self, place: str) -> Any:
        found: Any = self
        for name in place.split("."):  # attrgetter is opaque to torch.compile
            found = getattr(found, name)
        return found

    def _dropout(self) -> float:
        drop = getattr(self, self.names.drop)
        return float(getattr(drop, "p", drop))

    def _finish(self, y: Tensor) -> Tensor:
        y = y.flatten(2)
        for name in self.names.out:
            y = getattr(self, name)(y)
        return y


class RotaryAttention(NarrowAttention):
    """Attention with rotary positions; every key head has its own kept frequencies."""

    frequencies: Tensor  # (K, e): which rotated dimensions each key head kept

    def __init__(
        self,
        dense: Any,
        *parts: Projection | None,
        kept: Tensor | None = None,
        norms: Sequence[nn.Module] = (),
        **options: Any,
    ) -> None:
        super().__init__(dense, *parts, **options)
        for name, norm in zip(self.names.norms, norms, strict=False):
            setattr(self, name, norm)
        dims = rotated_dims(dense)
        if kept is None:  # all of them
            kept = torch.arange(self.qk_dim).repeat(self.kv_count, 1)
        self.rotary_width = int((kept[0] < dims).sum())
        device = next(self.parameters()).device
        self.register_buffer("frequencies", kept[:, : self.rotary_width].to(device), persistent=False)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.rotated(hidden_states, position_embeddings)
        past = layer_past if past_key_values is None else past_key_values
        if past is not None:
            k, v = past.update(k, v, self.layer_idx)
        y, weights = self._attend(q, k, v, attention_mask, kwargs)
        return self._finish(y), weights

    def rotated(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Queries, keys and values (B, H, n, width), the first two rotated by their positions."""
        q, k, v = self._project("qkv", hidden_states)
        q, k = self._normed(q, k)
        # (B, n, d) -> (B, K, n, e): the angles of each key head's frequencies.
        cos, sin = (x[..., self.frequencies].transpose(1, 2) for x in position_embeddings)
        shared = self.qk_heads // self.kv_count
        q = self._rotate(q, cos.repeat_interleave(shared, dim=1), sin.repeat_interleave(shared, dim=1))
        return q, self._rotate(k, cos, sin), v

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not self.names.norms:
            return q, k
        of_queries, of_keys = self.names.norms
        return getattr(self, of_queries)(q), getattr(self, of_keys)(k)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated, rest = x[..., : self.rotary_width], x[..., self.rotary_width :]
        return torch.cat([rotate(rotated, cos, sin), rest], -1) if rest.shape[-1] else rotate(rotated, cos, sin)


def rotated_dims(attention: Any) -> int:
    """How many dimensions of a head are rotated: all of them if the module does not say."""
    known = getattr(attention, "rotary_ndims", None)
    return int(attention.head_dim if known is None else known)


class BiasedAttention(NarrowAttention):
    """MPNet's attention: adds a position bias to the logits, has a single kernel, and returns weights on request."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **_: Any,
    ) -> tuple[Tensor, ...]:
        q, k, v = self._project("qkv", hidden_states)
        given = [bias for bias in (position_bias, attention_mask) if bias is not None]
        bias = sum(given[1:], given[0]) if given else None
        drop = self._dropout() if self.training else 0.0
        if not output_attentions:
            y = attend(q, k, v, scale=self.qk_scale, mask=bias, drop=drop)
            return (self._finish(y.transpose(1, 2)),)
        y, weights = attend_openly(q, k, v, scale=self.qk_scale, mask=bias, drop=drop)
        return self._finish(y.transpose(1, 2)), weights


def narrow(
    dense: nn.Module,
    q: Projection | None = None,
    k: Projection | None = None,
    v: Projection | None = None,
    *,
    names: Names,
    cross: bool,
    lookup: Lookup,
    convention: type[NarrowAttention] = NarrowAttention,
    **more: Any,
) -> NarrowAttention:
    """The narrowed version of `dense`, which may have been narrowed before."""
    cls = type(dense) if isinstance(dense, NarrowAttention) else narrowed(convention, type(dense))
    return cls(dense, q, k, v, names=names, cross=cross, lookup=lookup, **more)


_classes: dict[tuple[type, type], type[NarrowAttention]] = {}


def narrowed(convention: type[NarrowAttention], dense_class: type[nn.Module]) -> type[NarrowAttention]:
    """The class of a narrowed module: corp's forward, but still a subclass of the dense class. Made once."""
    key = (convention, dense_class)
    if key not in _classes:
        name = f"Narrow{dense_class.__name__}"
        made = {"__module__": __name__, "__qualname__": name, "convention": convention, "dense_class": dense_class}
        _classes[key] = type(name, key, made)
    return _classes[key]


def _blank(convention: type[NarrowAttention], dense_class: type[nn.Module]) -> NarrowAttention:
    cls = narrowed(convention, dense_class)
    return cls.__new__(cls)
