"""Small language models as people write them by hand: rotations as complex numbers or slices, layers called by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HEADS, TOKENS, WORDS = 32, 4, 12, 40
Angles = tuple[Tensor, Tensor]


def rope_of_slices(x: Tensor, angles: Angles) -> Tensor:
    """Neighbours, as x[..., ::2] and x[..., 1::2]."""
    cos, sin = angles
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class Plainly(nn.Module):
    """Grouped heads; the block hands the angles over."""

    def __init__(self, rotate: Callable[[Tensor, Angles], Tensor] = rope_of_slices) -> None:
        super().__init__()
        self.n_heads, self.rotate = HEADS, rotate
        self.wq, self.wo = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.wk, self.wv = nn.Linear(D, D // 2, bias=False), nn.Linear(D, D // 2, bias=False)

    def forward(self, x: Tensor, freqs_cis: Angles) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        q, k = self.rotate(q, freqs_cis), self.rotate(k, freqs_cis)
        k, v = (part.repeat_interleave(2, 1) for part in (k, v))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(z.transpose(1, 2).flatten(2))


class CalledByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(input=F.relu(self.up(input=x)))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = attention, CalledByName()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        x = x + self.attention(self.norm1(x), angles)
        return x + self.mlp(x=self.norm2(input=x))


class Residual(nn.Module):
    """A block without norms around an attention, with a plain MLP of twice the width."""

    def __init__(self, attention: nn.Module, width: int) -> None:
        super().__init__()
        self.attn = attention
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


@dataclass
class Logits:
    logits: Tensor
    hidden: Tensor


class Language(nn.Module):
    """A language model that returns a dataclass and calls its head by name."""

    def __init__(self, attention: Callable[[], nn.Module] = Plainly) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.layers = nn.ModuleList(Block(attention()) for _ in range(2))
        self.head = nn.Linear(D, WORDS, bias=False)
        half = D // HEADS // 2
        angle = torch.outer(torch.arange(TOKENS).double(), 10000.0 ** -(torch.arange(half).double() / half))
        self.register_buffer("angle", angle, persistent=False)

    def forward(self, ids: Tensor) -> Logits:
        x, angles = self.words(ids), (self.angle.cos(), self.angle.sin())
        for layer in self.layers:
            x = layer(x, angles)
        return Logits(self.head(input=x), x)


class ByHead(nn.Module):
    """Queries, keys and values of one head after those of another; the caller must say what is added to the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def attend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (HEADS, 3, -1)).permute(3, 0, 2, 1, 4)
        logits = q @ k.mT * q.shape[-1] ** -0.5
        return self.proj(((logits if bias is None else logits + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))


class MaskedByHead(ByHead):
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.attend(x, mask)


class BiasedByHead(ByHead):
    def forward(self, x: Tensor, distances: Tensor) -> Tensor:
        return self.attend(x, -distances)


class Masked(nn.Module):
    """A block whose attention takes a mask that has no default."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = MaskedByHead()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.attn(x, None)


class Biased(nn.Module):
    """A block that makes what its attention adds to the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = BiasedByHead()

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], dtype=x.dtype)
        return x + self.attn(x, (at[:, None] - at).abs())


class Listed(nn.Module):
    """The four layers of an attention in one list, as in the Annotated Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.d_k = HEADS, D // HEADS
        self.linears = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.h, self.d_k)).transpose(1, 2)
            for layer, x in zip(self.linears, (query, key, value), strict=False)
        )
        return self.linears[-1](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Annotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.feed_forward = Listed(), CalledByName()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x, x, x)
        return x + self.feed_forward(x)
