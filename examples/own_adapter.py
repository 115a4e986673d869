"""Teach corp a model of your own: point at its sites.

python examples/own_adapter.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import corp
from corp.sites import MLPSite, Rows


class Mixer(nn.Module):
    """Three residual two-layer blocks that no built-in adapter knows."""

    def __init__(self, width: int = 32, hidden: int = 128) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, hidden) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(hidden, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.nn.functional.gelu(up(x)))
        return x


def find(model: nn.Module) -> list[MLPSite] | None:
    """The sites of a Mixer; None says that the model is another adapter's business."""
    if not isinstance(model, Mixer):
        return None
    return [
        MLPSite(f"block.{i}", up=(Rows(f"up.{i}", 0, up.out_features),), down=f"down.{i}")
        for i, up in enumerate(model.up)
    ]


def main() -> None:
    corp.register_adapter("mixer", find)
    torch.manual_seed(0)
    model = Mixer().eval()
    batches = [torch.randn(64, 32) for _ in range(20)]
    result = corp.prune(model, batches, corp.Recipe.paper(mlp=0.5))
    print(result.report)


if __name__ == "__main__":
    main()
