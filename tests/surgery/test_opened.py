"""Models whose biases are apart from their layers: opened as a copy that shares memory and computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from torch import nn

from corp.surgery.opened import open_up, opened
from tests.helpers.seeds import seed_all, seeded

MAKERS: dict[str, Any] = {
    "beit": lambda: BeitAttention(12, num_heads=3, qkv_bias=True),
    "eva": lambda: EvaAttention(12, num_heads=3, qkv_fused=True, scale_norm=False),
}


def build(name: str) -> Any:
    seed_all(0)
    model = nn.Sequential(MAKERS[name](), nn.Linear(12, 12)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


@pytest.mark.parametrize("name", MAKERS)
def test_biases_that_are_apart_are_joined_in_a_copy(name: str) -> None:
    model = build(name)
    model[0].q_bias.requires_grad_(False)
    model[0].qkv.train()
    x = torch.randn(2, 5, 12, generator=seeded(0), dtype=torch.float64)
    expected = model(x)
    made: Any = opened(model)
    assert made is not model
    torch.testing.assert_close(made(x), expected)
    torch.testing.assert_close(model(x), expected)
    assert model[0].q_bias is not None  # the user's own is left as it was
    joined = made[0].qkv
    assert type(joined) is nn.Linear
    assert (joined.in_features, joined.out_features) == (12, 36)
    assert torch.equal(joined.bias[:12], model[0].q_bias)
    assert torch.equal(joined.bias[24:], model[0].v_bias)
    assert not bool(joined.bias[12:24].any())
    assert not joined.bias.requires_grad
    assert not joined.training
    assert joined.weight is model[0].qkv.weight
    assert made[1].weight is model[1].weight
    assert opened(made) is made


def test_models_that_are_open_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    assert opened(model) is model
    layer = model[0]
    open_up(model)
    assert model[0] is layer
