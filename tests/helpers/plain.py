"""A small model of torch's own layers, for processes that would spend seconds importing timm and transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.helpers.handmade import ByHead, D, Residual
from tests.helpers.seeds import seed_all, seeded

POSITIONS = 9


class Attention(ByHead):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, None)


def build(dtype: torch.dtype = torch.float64) -> nn.Module:
    seed_all(1)
    return nn.Sequential(*(Residual(Attention(), D) for _ in range(2))).to(dtype).eval()


def sequences(batches: int, size: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = seeded(2)
    return [torch.randn(size, POSITIONS, D, generator=generator).to(dtype) for _ in range(batches)]
