"""The output head as two thin linear layers in place of the dense one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from corp.numerics.output import LowRank
from corp.sites import OutputHead
from corp.surgery.linear import new_parameter


class LowRankOutput(nn.Module):
    """Logits as up(down(h)): equal to the dense head's up to one number per token, which softmax ignores."""

    def __init__(self, inputs: int, rank: int, outputs: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.down = nn.Linear(inputs, rank, bias=False)
            self.up = nn.Linear(rank, outputs)

    def forward(self, input: Tensor) -> Tensor:
        logits: Tensor = self.up(self.down(input))
        return logits


def replace_output(model: nn.Module, head: OutputHead, rank: int, fold: LowRank | None) -> None:
    """Put a head of this rank in the model, in place; a tied embedding keeps its weight. `fold` None: only shapes."""
    like = model.get_submodule(head.name).weight
    assert isinstance(like, Tensor)
    made = LowRankOutput(head.inputs, rank, head.outputs).train(model.get_submodule(head.name).training)
    empty = LowRank(like.new_zeros(rank, head.inputs), like.new_zeros(head.outputs, rank), like.new_zeros(head.outputs))
    P, U, b = fold or empty
    made.down.weight, made.up.weight, made.up.bias = (new_parameter(part, like) for part in (P, U, b))
    model.set_submodule(head.name, made)
