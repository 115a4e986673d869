"""Whether attentions are causal is tried out: their names say little in models that users write."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import corp
from corp.testing import check_model
from tests.helpers.seeds import seed_all, seeded

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # few samples, on purpose
D, H, N = 24, 3, 8


class Attention(nn.Module):
    """One projection for all; `mask` is added to the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = H
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def mask(self, n: int) -> Tensor:
        return torch.zeros(n, n)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(-3, -2) for part in self.c_attn(x).chunk(3, -1))
        weights = (q @ k.mT / math.sqrt(D // H) + self.mask(x.shape[-2])).softmax(-1)
        out: Tensor = self.c_proj((weights @ v).transpose(-3, -2).flatten(-2))
        return out


class Causal(Attention):
    def mask(self, n: int) -> Tensor:
        return torch.full((n, n), -torch.inf).triu(1)


class Fused(Attention):
    """Causal by an argument of the kernel."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return out


class Pieces(Attention):
    """Two pieces of a sequence, each of which sees itself only: the first half never sees the second."""

    def mask(self, n: int) -> Tensor:
        piece = torch.arange(n) // (n // 2)
        return torch.zeros(n, n).masked_fill(piece[:, None] != piece, -torch.inf)


class TimeFirst(Causal):
    """The same on (n, B, D)."""

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x.transpose(0, 1)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (H, -1)).permute(1, 2, 0, 3) for part in parts)
        weights = (q @ k.mT / math.sqrt(D // H) + self.mask(x.shape[1])).softmax(-1)
        out: Tensor = self.c_proj((weights @ v).transpose(1, 2).flatten(2))
        return out


class Net(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(attention() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def batch(n: int = N) -> Tensor:
    return torch.randn(5, n, D, generator=seeded(1))


@pytest.mark.parametrize(
    ("attention", "causal"), [(Attention, False), (Causal, True), (Fused, True), (Pieces, False), (TimeFirst, True)]
)
def test_causality_is_what_the_attention_does(attention: type[nn.Module], causal: bool) -> None:
    seed_all(0)
    found = corp.find_sites(Net(attention), batch()).attention
    assert [site.causal for site in found] == [causal, causal]
    assert [site.batch_first for site in found] == [attention is not TimeFirst] * 2


def test_a_batch_of_single_tokens_shows_nothing_and_the_attention_alone_does() -> None:
    assert [site.causal for site in corp.find_sites(Net(Causal), batch(1)).attention] == [True, True]


@pytest.mark.parametrize("attention", [Causal, TimeFirst])
def test_errors_of_causal_attentions_are_measured_as_predicted(attention: type[nn.Module]) -> None:
    """Only logits that exist are counted, in the sums and in the measurement alike."""
    seed_all(0)
    model: Any = Net(attention)
    check_model(model, batch(16), show=None).require()
