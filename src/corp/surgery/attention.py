"""Attention with separate widths of queries and keys, and of values: one small module per calling convention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corp.calibration.hooks import modules_around
from corp.planning.site_plan import HeadMaps
from corp.sites import AttentionSite, Projection, ValueSite, projection_of, rows_of
from corp.surgery.linear import fuse, make_linear, unfuse
from corp.surgery.norms import narrow_norms
from corp.surgery.padded import Padded

SHORT = 64  # tokens up to which plain products are as fast as padding
_true_widths: ContextVar[bool] = ContextVar("true_widths", default=False)


@contextmanager
def true_widths() -> Iterator[None]:
    """Within this context no width is padded, so that counted operations are the real ones."""
    token = _true_widths.set(True)
    try:
        yield
    finally:
        _true_widths.reset(token)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    drop: float = 0.0,
) -> Tensor:
    """softmax(scale q k^T + mask) v for q, k (B, H, n, e) and v (B, H, n, d), by the fastest kernel for these widths.

    The fused CPU kernel needs equal widths. If they differ, zero-padding the narrower ones is up to three times as
    fast as the unfused kernel; plain products are as fast for short sequences and faster for very short ones
    (benchmarks/attention.py). CUDA's memory-efficient kernel supports unequal widths.
    """
    width = v.shape[-1]
    if q.device.type != "cuda":
        if q.shape[-1] != width and not causal and not drop and _is_short(q, k):
            logits = (q * scale) @ k.mT
            return (logits if mask is None else _masked(logits, mask)).softmax(-1) @ v
        q, k, v = equal_widths(q, k, v)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop, is_causal=causal, scale=scale)
    return y[..., :width]


def attend_openly(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, drop: float
) -> tuple[Tensor, Tensor]:
    """Attention by plain products: its output and its weights (B, H, n, m). `mask` is added to logits."""
    logits = scale * (q @ k.mT)
    weights = (logits if mask is None else logits + mask).softmax(-1)
    weights = torch.dropout(weights, drop, drop > 0)
    return weights @ v, weights


def _is_short(q: Tensor, k: Tensor) -> bool:
    """Whether the sequence is short; never in compiled or exported graphs, which must work for any length."""
    return not torch.compiler.is_compiling() and q.shape[-2] * k.shape[-2] <= SHORT**2


def _masked(logits: Tensor, mask: Tensor) -> Tensor:
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask


def equal_widths(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v padded with zeros to the widest; no logit changes, and only the first columns of the result count.

    They are returned unchanged while operations are counted.
    """
    # A compiled graph counts nothing, and the compiler cannot trace a context variable.
    if not torch.compiler.is_dynamo_compiling() and _true_widths.get():
        return q, k, v
    width = max(q.shape[-1], v.shape[-1])
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return q, k, v


class PackedAttention(nn.Module):
    """timm's Attention (one `qkv` projection), with narrower queries and keys, or values."""

    def __init__(
        self, dense: Any, q: Projection | None = None, k: Projection | None = None, v: Projection | None = None
    ) -> None:
        super().__init__()
        self.num_heads: int = dense.num_heads
        self.qk_dim, self.head_dim = widths_of(dense, q, v)  # head_dim is that of the values
        self.scale: float = dense.scale  # of the DENSE width: pruning must not change the temperature
        self.qkv = replace_parts(dense, dense.qkv, q, k, v)
        self.attn_drop = dense.attn_drop
        self.norm = getattr(dense, "norm", nn.Identity())
        self.gate = getattr(dense, "gate", None)
        self.proj = dense.proj
        self.proj_drop = dense.proj_drop
        self.train(dense.training)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, qk_dim={self.qk_dim}, v_dim={self.head_dim}"

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self._attend(x, attn_mask, is_causal)

    def _attend(self, x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        narrow, wide = self.num_heads * self.qk_dim, self.num_heads * self.head_dim
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv(x).split((narrow, narrow, wide), dim=-1))
        drop = self.attn_drop.p if self.training else 0.0
        y = attend(q, k, v, scale=self.scale, mask=mask, causal=causal, drop=drop)  # (B, H, n, d)
        y = self.norm(y.transpose(1, 2).flatten(2))
        if self.gate is not None:
            y = y * self.gate(x).sigmoid()
        projected: Tensor = self.proj_drop(self.proj(y))
        return projected


class RelativeAttention(PackedAttention):
    """timm's RelPosAttention: a learned bias is added to the logits; pruning Q/K does not affect it."""

    def __init__(self, dense: Any, *parts: Projection | None, **named: Projection | None) -> None:
        super().__init__(dense, *parts, **named)
        self.rel_pos = dense.rel_pos

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self._attend(x, shared_rel_pos if self.rel_pos is None else self.rel_pos.get_bias(), False)


class LatentPool(nn.Module):
    """timm's AttentionPoolLatent: learned queries attend to all tokens (SigLIP's pooling)."""

    def __init__(
        self, dense: Any, q: Projection | None = None, k: Projection | None = None, v: Projection | None = None
    ) -> None:
        super().__init__()
        self.num_heads: int = dense.num_heads
        self.qk_dim, self.head_dim = widths_of(dense, q, v)
        self.scale: float = dense.scale
        self.pool: str = dense.pool
        self.latent, self.pos_embed = dense.latent, dense.pos_embed
        self.q = dense.q if q is None else make_linear(dense.q, *q)
        self.kv = replace_parts(dense, dense.kv, k, v)
        self.proj, self.proj_drop, self.norm, self.mlp = dense.proj, dense.proj_drop, dense.norm, dense.mlp
        self.train(dense.training)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if self.pos_embed is not None:
            x = x + self.pos_embed.unsqueeze(0).to(x.dtype)
        narrow, wide = self.num_heads * self.qk_dim, self.num_heads * self.head_dim
        q = split_heads(self.q(self.latent.expand(len(x), -1, -1)), self.num_heads)
        k, v = (split_heads(part, self.num_heads) for part in self.kv(x).split((narrow, wide), dim=-1))
        heads = attend(q, k, v, scale=self.scale, mask=attn_mask)
        y: Tensor = self.proj_drop(self.proj(heads.transpose(1, 2).flatten(2)))
        if self.mlp is not None:
            y = y + self.mlp(self.norm(y))
        if self.pool == "token":
            return y[:, 0]
        return y.mean(1) if self.pool == "avg" else y


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, n, H d) -> (B, H, n, d)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def widths_of(dense: Any, q: Projection | None, v: Projection | None) -> tuple[int, int]:
    """The widths of a head's queries and keys and of its values; those that are given replace the ones of `dense`."""
    qk_dim = getattr(dense, "qk_dim", dense.head_dim) if q is None else len(q.weight) // dense.num_heads
    return qk_dim, dense.head_dim if v is None else len(v.weight) // dense.num_heads


def replace_parts(dense: Any, packed: Any, *parts: Projection | None) -> nn.Module:
    """The packed projection of `dense` with the given parts in place of its own."""
    new = replaced(projection_of(packed), dense.num_heads * dense.head_dim, *parts)
    return make_linear(packed, *fuse(packed.weight, new))


def replaced(whole: Projection, values: int, *parts: Projection | None) -> list[Projection]:
    """The parts of a packed projection, or their replacements; the last has `values` rows, the others are equal."""
    others = (len(whole.weight) - values) // (len(parts) - 1)
    own = unfuse(whole, [*[others] * (len(parts) - 1), values])
    return [new or old for new, old in zip(parts, own, strict=True)]


Parts: TypeAlias = dict[str, Any]  # what an attention is built around: q, k, v, the frequencies it kept, its norms


def narrow_queries(model: nn.Module, site: AttentionSite, kept: Sequence[Tensor], maps: HeadMaps | None) -> Parts:
    """Keep the dimensions kept[g] (e,) of every key head and of the query heads that share it, mapped if given."""
    shared = site.heads // site.groups
    q = _narrow(rows_of(model, site.q), [group for group in kept for _ in range(shared)], maps and maps.q)
    k = _narrow(rows_of(model, site.k), kept, maps and maps.k)
    which: Parts = {"kept": torch.stack(list(kept))} if site.rotary else {}  # the module needs its frequencies
    if site.norm is not None:
        which["norms"] = narrow_norms(model, site, kept, maps.norm if maps else None)
    return {"q": q, "k": k, **which}


def narrow_values(model: nn.Module, site: ValueSite, kept: Sequence[Tensor], maps: Sequence[Tensor]) -> Parts:
    """Keep the dimensions kept[g] (e,) of every value head, mapped (e, d) if given."""
    return {"v": _narrow(rows_of(model, site.v), kept, maps or None)}


def replace_attention(model: nn.Module, site: AttentionSite | ValueSite, parts: Parts) -> None:
    """Replace the dense attention by one with the new parts, or put narrower layers into it."""
    if isinstance(site.build, Padded):
        site.build.replace(model, parts)
        return
    model.set_submodule(site.attention, site.build(model.get_submodule(site.attention), **parts))
    _without_nested_tensors(model, site.attention)


def _without_nested_tensors(model: nn.Module, name: str) -> None:
    """Turn off nested tensors in an enclosing nn.TransformerEncoder; only its dense fast path supports them."""
    for parent in map(model.get_submodule, modules_around(name)):
        if isinstance(parent, nn.TransformerEncoder):
            parent.use_nested_tensor = False


def _narrow(dense: Projection, kept: Sequence[Tensor], maps: Sequence[Tensor] | None) -> Projection:
    """Every head's kept or mapped rows; maps keep their dtype, and the cast comes last (in make_linear)."""
    heads = len(kept)
    W = dense.weight.reshape(heads, -1, dense.weight.shape[1])  # (H, d, D)
    b = None if dense.bias is None else dense.bias.reshape(heads, -1)  # (H, d)
    if maps is None:
        index = [group.to(W.device) for group in kept]
        weight = torch.cat([rows[i] for rows, i in zip(W, index, strict=True)])
        return Projection(weight, None if b is None else torch.cat([v[i] for v, i in zip(b, index, strict=True)]))
    weight = torch.cat([m @ rows.to(m) for m, rows in zip(maps, W, strict=True)])
    return Projection(weight, None if b is None else torch.cat([m @ v.to(m) for m, v in zip(maps, b, strict=True)]))
