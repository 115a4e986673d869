"""Blocks that return their hidden state: the model's own modules are untouched, and their hooks are called."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from corp.storage.streamed.passing import Manner, passing


class Block(nn.Module):
    """A block that returns a tuple, as those of older models of transformers."""

    def forward(self, x: Tensor, *, scale: float) -> tuple[Tensor, None]:
        return scale * x, None


class Model(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=2.0)[0]
        return x


def test_passed_blocks_return_their_hidden_state_and_no_module_is_changed() -> None:
    model, x, called = Model(), torch.ones(1, 3), list[int]()
    blocks = list(model.blocks)
    blocks[0].register_forward_hook(lambda *_: called.append(0))
    with passing(model, {"blocks.0": Manner(0, tuple, 2)}):
        model.blocks[0].register_forward_hook(lambda *_: called.append(1))
        assert torch.equal(model(x), 2 * x)
        assert not any("forward" in vars(block) for block in blocks)
    assert called == [0, 1]
    assert list(model.blocks) == blocks
    assert torch.equal(model(x), 4 * x)
