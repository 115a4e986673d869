"""The factored output head in a model: what it computes, and what it keeps of the dense one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from corp.numerics.output import LowRank
from corp.sites import OutputHead
from corp.surgery.output import LowRankOutput, replace_output
from tests.helpers.seeds import seeded


@pytest.mark.parametrize("training", [True, False])
def test_the_dense_head_is_replaced_by_two_thin_layers(training: bool) -> None:
    model: Any = nn.ModuleDict({"head": nn.Linear(6, 9).half()}).train(training)
    model["head"].weight.requires_grad_(False)
    P, U, b = (torch.randn(shape, generator=seeded(i)).double() for i, shape in enumerate([(2, 6), (9, 2), (9,)]))
    replace_output(model, OutputHead("head", 6, 9), 2, LowRank(P, U, b))
    made = model["head"]
    assert isinstance(made, LowRankOutput)
    assert {(p.dtype, p.requires_grad) for p in made.parameters()} == {(torch.float16, False)}
    assert made.training is training
    x = torch.randn(3, 6, generator=seeded(4)).double()
    torch.testing.assert_close(made.double()(x), x @ P.half().double().mT @ U.half().double().mT + b.half().double())


def test_shapes_alone_are_made_without_a_fold() -> None:
    model: Any = nn.ModuleDict({"head": nn.Linear(6, 9)})
    replace_output(model, OutputHead("head", 6, 9), 2, None)
    made = model["head"]
    assert [tuple(p.shape) for p in made.parameters()] == [(2, 6), (9, 2), (9,)]
    assert not any(bool(p.any()) for p in made.parameters())
    assert (made.down.in_features, made.down.out_features, made.up.out_features) == (6, 2, 9)
