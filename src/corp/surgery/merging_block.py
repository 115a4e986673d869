"""A pre-norm block that merges tokens between its attention and its MLP, and its cost."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corp.calibration.batches import evaluating
from corp.errors import ModelError
from corp.planning.merging import Merging
from corp.surgery.attention import attend, split_heads
from corp.surgery.merging import match, merge, regroup

PROOF = 0.1  # times the root of the dtype's precision: the largest difference between a block and the sum of its parts


class Parts(NamedTuple):
    """The names of a pre-norm block's parts: x + after(attention(norm x)), then x + after(mlp(norm x))."""

    norm: str
    attention: str
    after: tuple[str, ...]
    mlp_norm: str
    mlp: str
    mlp_after: tuple[str, ...]


KINDS = (
    Parts("norm1", "attn", ("ls1", "drop_path1"), "norm2", "mlp", ("ls2", "drop_path2")),
    Parts("layernorm_before", "attention", ("dropout",), "layernorm_after", "mlp", ("dropout",)),
    Parts("norm1", "attention", ("layer_scale1", "drop_path"), "norm2", "mlp", ("layer_scale2", "drop_path")),
    Parts("layer_norm1", "self_attn", (), "layer_norm2", "mlp", ()),
)
OUTPUTS = ("proj", "o_proj", "out_proj")  # names of an attention's output projection


class MergingBlock(nn.Module):
    """A block that merges tokens after its attention. Called without sizes, it computes the same as the dense block."""

    dense_class: ClassVar[type[nn.Module]]

    def __init__(
        self, dense: nn.Module, parts: Parts, *, r: int, prefix: int, weighted: bool, read: int | None
    ) -> None:
        nn.Module.__init__(self)  # not the dense class's: its layers would be made only to be replaced
        for key, value in vars(dense).items():
            vars(self)[key] = value.copy() if isinstance(value, dict) else value
        self.parts, self.r, self.prefix, self.read = parts, r, prefix, read
        self.weighted = weighted  # whether tokens were merged before this block

    def extra_repr(self) -> str:
        return f"merges={self.r}" + ("" if self.read is None else f", reads={self.read}")

    def __reduce__(self) -> tuple[Any, ...]:
        # The class itself is made at run time, so pickle and deepcopy must recreate it.
        return _blank, (self.dense_class,), vars(self)

    def forward(
        self, x: Tensor, *args: Any, sizes: Tensor | None = None, groups: Tensor | None = None, **kw: Any
    ) -> Any:
        """Merge tokens (B, n, C), their sizes (B, n), or None, and the group of each dense token (B, N), or None."""
        if sizes is None:
            return super().forward(x, *args, **kw)
        p = self.parts
        seen = getattr(self, p.norm)(x)
        bias = sizes.log()[:, None, None] if self.weighted else None  # (B, 1, 1, n)
        y, keys = attend_and_keys(getattr(self, p.attention), seen, bias, self.read)
        x, sizes = x[:, : self.read], sizes[:, : self.read]
        x = x + self._through(p.after, y)
        if self.r and x.shape[1] - self.prefix > 1:
            found = match(keys, min(self.r, (x.shape[1] - self.prefix) // 2), self.prefix)
            x, sizes = merge(x, sizes, found, self.prefix)
            groups = groups if groups is None else regroup(groups, found, self.prefix)
        x = x + self._through(p.mlp_after, getattr(self, p.mlp)(getattr(self, p.mlp_norm)(x)))
        return x, sizes, groups

    def _through(self, names: tuple[str, ...], x: Tensor) -> Tensor:
        for name in names:
            x = getattr(self, name)(x)
        return x


def attend_and_keys(attention: Any, x: Tensor, bias: Tensor | None, read: int | None) -> tuple[Tensor, Tensor]:
    """The output (B, read or n, C) of a dense or narrowed attention, and its keys (B, n, D), heads side by side."""
    heads: int = _first(attention, "num_heads", "num_attention_heads")
    queries, keys, values = _project(attention, x, read)
    q, k, v = (split_heads(part, heads) for part in (queries, keys, values))
    q, k = getattr(attention, "q_norm", _same)(q), getattr(attention, "k_norm", _same)(k)
    drop = _first(attention, "attn_drop", "attention_dropout", "dropout")
    drop = getattr(drop, "p", drop) if attention.training else 0.0
    y = attend(q, k, v, scale=_first(attention, "scale", "scaling"), mask=bias, drop=drop)
    y = getattr(attention, "norm", _same)(y.transpose(1, 2).flatten(2))
    if getattr(attention, "gate", None) is not None:
        y = y * attention.gate(x[:, :read]).sigmoid()
    y = _first(attention, *OUTPUTS)(y)
    return getattr(attention, "proj_drop", _same)(y), keys


def _project(attention: Any, x: Tensor, read: int | None) -> tuple[Tensor, ...]:
    """Queries (of the first `read` tokens), keys and values, (B, n, H d) each."""
    if not hasattr(attention, "qkv"):
        return attention.q_proj(x[:, :read]), attention.k_proj(x), attention.v_proj(x)
    narrow, wide = widths_in(attention)
    if read is None:
        found: tuple[Tensor, ...] = attention.qkv(x).split((narrow, narrow, wide), dim=-1)
        return found
    W, b = attention.qkv.weight, attention.qkv.bias
    q = F.linear(x[:, :read], W[:narrow], None if b is None else b[:narrow])
    return q, *F.linear(x, W[narrow:], None if b is None else b[narrow:]).split((narrow, wide), dim=-1)


def widths_in(attention: Any) -> tuple[int, int]:
    """Features of all queries (or keys) together, and of all values."""
    if not hasattr(attention, "qkv"):
        return attention.q_proj.out_features, attention.v_proj.out_features
    heads = attention.num_heads
    return heads * getattr(attention, "qk_dim", attention.head_dim), heads * attention.head_dim


def block_macs(block: nn.Module, tokens: int, r: int = 0, prefix: int = 0, read: int | None = None) -> int:
    """Multiply-accumulates of a block for a sample of `tokens` tokens of which it merges `r`."""
    parts = parts_of(block)
    if parts is None:
        raise ModelError(f"{type(block).__name__} is not a plain pre-norm block of attention and MLP")
    attention, mlp = getattr(block, parts.attention), getattr(block, parts.mlp)
    qk, v = widths_in(attention)
    out = _first(attention, *OUTPUTS)
    stream, outputs = out.out_features, tokens if read is None else read
    each = out.weight.numel() + stream * qk + tokens * (qk + v)  # of a query: projections, logits, average
    if getattr(attention, "gate", None) is not None:
        each += attention.gate.weight.numel()
    hidden = sum(p.numel() for p in mlp.parameters() if p.dim() > 1)
    second = (tokens - prefix) // 2
    pairs = (tokens - prefix - second) * second * qk + second * r * (stream + 1) if r else 0
    return int(outputs * each + tokens * stream * (qk + v) + (outputs - r) * hidden + pairs)


def _same(x: Tensor) -> Tensor:
    return x


def _first(module: Any, *names: str) -> Any:
    """The first of these attributes that the module has."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def merging_block(
    block: nn.Module, where: str, r: int, merging: Merging, *, weighted: bool, read: int | None
) -> MergingBlock:
    """`block` with merging, after verifying that its parts compute the same as the block."""
    parts, cls = parts_of(block), _class_of(getattr(block, "dense_class", type(block)))
    if parts is not None and _equal(block, cls(block, parts, r=0, prefix=0, weighted=False, read=None)):
        return cls(block, parts, r=r, prefix=merging.prefix, weighted=weighted, read=read)
    raise ModelError(
        f"tokens cannot be merged in {where}: {type(block).__module__}.{type(block).__name__} is not a plain pre-norm "
        "block of attention and MLP (relative positions, rotary or parallel blocks are not); leave merging out"
    )


def parts_of(block: nn.Module) -> Parts | None:
    """The names of the block's parts, if it looks like a known kind of block."""

    def names(kind: Parts) -> tuple[str, ...]:
        return kind.norm, kind.attention, *kind.after, kind.mlp_norm, kind.mlp, *kind.mlp_after

    return next((kind for kind in KINDS if all(hasattr(block, name) for name in names(kind))), None)


def _equal(block: nn.Module, made: MergingBlock) -> bool:
    """Whether both compute the same from a few random tokens; without weights (meta) nothing is compared."""
    weight: Any = next(block.parameters())
    if weight.device.type == "meta":
        return True
    width = getattr(made, made.parts.norm).weight.numel()
    x = torch.randn(2, 6, width, generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad(), evaluating(block), evaluating(made):
        try:
            expected, found = block(x, None), made(x, sizes=x.new_ones(2, 6))[0]
        except (RuntimeError, TypeError, AttributeError, StopIteration):  # the block has another structure
            return False
    expected = expected[0] if isinstance(expected, tuple) else expected
    allowed = PROOF * torch.finfo(x.dtype).eps ** 0.5 * torch.linalg.vector_norm(expected)
    return expected.shape == found.shape and bool(torch.linalg.vector_norm(expected - found) <= allowed)


_classes: dict[type[nn.Module], type[MergingBlock]] = {}


def _class_of(dense: type[nn.Module]) -> type[MergingBlock]:
    """The class of a merging block: corp's forward, but still found by the dense class's name. Made once."""
    if dense not in _classes:
        made = {"__module__": dense.__module__, "__qualname__": f"Merging{dense.__name__}", "dense_class": dense}
        _classes[dense] = type(dense.__name__, (MergingBlock, dense), made)
    return _classes[dense]


def _blank(dense: type[nn.Module]) -> MergingBlock:
    cls = _class_of(dense)
    return cls.__new__(cls)
