"""Narrowed nn.MultiheadAttention: without biases, narrowed part by part, and with dropout in training alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corp.sites import Projection
from corp.surgery.multihead import NarrowMultihead
from tests.helpers.seeds import seed_all, seeded

HEADS, WIDTH, D = 3, 4, 12


def random(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(number), dtype=torch.float64)


def build(bias: bool = True, dropout: float = 0.0) -> Any:
    seed_all(0)
    made = nn.MultiheadAttention(D, HEADS, bias=bias, dropout=dropout, batch_first=True).double().eval()
    if bias:
        nn.init.normal_(made.in_proj_bias)
    return made


def part(dense: Any, number: int, kept: list[list[int]]) -> Projection:
    """The kept rows of queries (0), keys (1) or values (2)."""
    index = [number * D + h * WIDTH + j for h, some in enumerate(kept) for j in some]
    bias = None if dense.in_proj_bias is None else dense.in_proj_bias.detach()[index]
    return Projection(dense.in_proj_weight.detach()[index], bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_removed_dimensions_are_zeros_of_the_dense_attention(bias: bool, same: bool) -> None:
    dense, kept = build(bias), [[0, 2], [1, 3], [0, 1]]
    values = [[0, 1, 2], [1, 2, 3], [0, 2, 3]]
    first = NarrowMultihead(dense, part(dense, 0, kept), part(dense, 1, kept))
    assert first.extra_repr() == "heads=3, qk_dim=2, v_dim=4"
    assert first.scale == WIDTH**-0.5
    both = NarrowMultihead(first, v=part(dense, 2, values))
    assert both.extra_repr() == "heads=3, qk_dim=2, v_dim=3"
    assert both.scale == WIDTH**-0.5
    every = [h * WIDTH + j for h, some in enumerate(values) for j in some]
    both.out_proj = nn.Linear(9, D).double()
    with torch.no_grad():
        both.out_proj.weight.copy_(dense.out_proj.weight[:, every])
        both.out_proj.bias.copy_(dense.out_proj.bias if bias else torch.zeros(D))
        for number, some in ((0, kept), (1, kept), (2, values)):
            for h in range(HEADS):
                for j in set(range(WIDTH)) - set(some[h]):
                    dense.in_proj_weight[number * D + h * WIDTH + j] = 0
                    if bias:
                        dense.in_proj_bias[number * D + h * WIDTH + j] = 0
    q, k, v = (random(2, 5, D, number=i) for i in range(3))
    q, k, v = (q, q, q) if same else (q, k, v)
    for weights in (True, False):
        torch.testing.assert_close(both(q, k, v, need_weights=weights), dense(q, k, v, need_weights=weights))
    assert (both.in_proj_bias is None) == (not bias)


@pytest.mark.parametrize("need_weights", [True, False])
def test_weights_are_dropped_in_training_alone(need_weights: bool) -> None:
    narrow, x = NarrowMultihead(build(dropout=0.5)), random(2, 5, D)
    assert torch.equal(narrow(x, x, x, need_weights=need_weights)[0], narrow(x, x, x, need_weights=need_weights)[0])
    narrow.train()
    one, other = (narrow(x, x, x, need_weights=need_weights)[0] for _ in range(2))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("masked", [True, False])
def test_one_sample_needs_no_batch(masked: bool) -> None:
    dense = build()
    narrow, x = NarrowMultihead(dense), random(5, D)
    options = {"key_padding_mask": torch.tensor([False, True, False, False, True])} if masked else {}
    for found, expected in zip(narrow(x, x, x, **options), dense(x, x, x, **options), strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected)
    y, weights = narrow(x, x, x, need_weights=False)
    assert weights is None
    assert y.shape == (5, D)
