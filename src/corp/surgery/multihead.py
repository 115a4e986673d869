"""nn.MultiheadAttention with narrower queries and keys, or values, in its own calling convention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from corp.errors import ModelError
from corp.sites import Projection
from corp.surgery.attention import attend, attend_openly, replaced, split_heads, widths_of
from corp.surgery.linear import fuse, new_parameter


class NarrowMultihead(nn.Module):
    """Takes and returns what nn.MultiheadAttention does. Parameters keep their names.

    nn.TransformerEncoderLayer has a fast path that reads the parameters of `self_attn` instead of calling it; it
    is not used for modules whose `_qkv_same_embed_dim` is False.
    """

    _qkv_same_embed_dim = False

    def __init__(
        self, dense: Any, q: Projection | None = None, k: Projection | None = None, v: Projection | None = None
    ) -> None:
        super().__init__()
        self.embed_dim: int = dense.embed_dim
        self.num_heads: int = dense.num_heads
        self.qk_dim, self.head_dim = widths_of(dense, q, v)  # head_dim is that of the values
        self.scale = getattr(dense, "scale", dense.head_dim**-0.5)  # of the DENSE width
        self.batch_first: bool = dense.batch_first
        self.dropout: float = dense.dropout
        bias = None if dense.in_proj_bias is None else dense.in_proj_bias.detach()
        whole = Projection(dense.in_proj_weight.detach(), bias)
        weight, bias = fuse(dense.in_proj_weight, replaced(whole, dense.num_heads * dense.head_dim, q, k, v))
        self.in_proj_weight = new_parameter(weight, dense.in_proj_weight)
        self.in_proj_bias: nn.Parameter | None
        self.register_parameter("in_proj_bias", None if bias is None else new_parameter(bias, dense.in_proj_weight))
        self.out_proj = dense.out_proj
        self.train(dense.training)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, qk_dim={self.qk_dim}, v_dim={self.head_dim}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """`is_causal` is a hint about attn_mask, as in nn.MultiheadAttention: the mask itself decides."""
        if is_causal and attn_mask is None:
            raise ModelError("is_causal is a hint about attn_mask, which is missing: pass the mask too")
        batched = query.dim() == 3
        same = query is key is value
        inputs = [query, key, value]
        if not batched:
            inputs = [x[None] for x in inputs]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        q, k, v = (split_heads(x, self.num_heads) for x in self._project(inputs, same))
        mask = self._mask(attn_mask, key_padding_mask, q)
        y, weights = self._attend(q, k, v, mask, need_weights)
        out: Tensor = self.out_proj(y.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _project(self, inputs: list[Tensor], same: bool) -> list[Tensor]:
        narrow = self.num_heads * self.qk_dim
        widths = (narrow, narrow, self.num_heads * self.head_dim)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(widths)
        if same:  # self-attention: one matrix product
            packed = nn.functional.linear(inputs[0], self.in_proj_weight, self.in_proj_bias)
            return list(packed.split(widths, dim=-1))
        return [
            nn.functional.linear(x, weight, bias)
            for x, weight, bias in zip(inputs, self.in_proj_weight.split(widths), biases, strict=True)
        ]

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Both masks as one that is added to the logits; in both, True hides a token."""
        masks = []
        if attn_mask is not None:  # (n, m) or (B H, n, m)
            shape = (-1, self.num_heads) if attn_mask.dim() == 3 else (1, 1)
            masks.append(_additive(attn_mask, q).reshape(*shape, *attn_mask.shape[-2:]))
        if padding is not None:
            masks.append(_additive(padding, q)[:, None, None, :])
        return sum(masks[1:], masks[0]) if masks else None

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        drop = self.dropout if self.training else 0.0
        if not need_weights:
            return attend(q, k, v, scale=self.scale, mask=mask, drop=drop), None
        return attend_openly(q, k, v, scale=self.scale, mask=mask, drop=drop)


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -torch.inf)
