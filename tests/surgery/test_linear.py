"""Narrower linear layers: what they compute, which flags they keep, and which layers are refused with what reason."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from corp.numerics.affine import Folded
from corp.sites import MLPSite, Projection, Rows
from corp.surgery.linear import fuse, make_linear, refill, shrink_down, shrink_mlp, unfuse, why_not_linear
from tests.helpers.seeds import seed_all, seeded

KEPT = torch.tensor([0, 2, 5])


def random(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(number), dtype=torch.float64)


def layer(kind: str, inputs: int, outputs: int, *, bias: bool = True) -> Any:
    makers: dict[str, Any] = {
        "linear": lambda: nn.Linear(inputs, outputs, bias=bias),
        "transposed": lambda: Conv1D(outputs, inputs),
        "pointwise": lambda: nn.Conv1d(inputs, outputs, 1, bias=bias),
    }
    return makers[kind]().double()


def through(module: Any, x: Tensor) -> Tensor:
    """The layer's output for tokens x (B, n, D); convolutions take channels second."""
    out: Tensor = module(x.mT).mT if isinstance(module, nn.Conv1d) else module(x)
    return out


@pytest.mark.parametrize("kind", ["linear", "transposed", "pointwise"])
def test_a_layer_of_the_same_class_has_the_new_weights_in_the_old_dtype_and_mode(kind: str) -> None:
    like = layer(kind, 6, 4).float().eval()
    like.weight.requires_grad_(False)
    W, b, x = random(3, 5), random(3, number=1), random(2, 4, 5, number=2).float()
    made: Any = make_linear(like, W, b)
    torch.testing.assert_close(through(made, x), x @ W.mT.float() + b.float())
    assert type(made) is type(like)
    assert {p.dtype for p in made.parameters()} == {torch.float32}
    assert not made.training
    assert not any(p.requires_grad for p in made.parameters())
    assert made.weight.is_contiguous()
    assert make_linear(like.train(), W, b).training


@pytest.mark.parametrize("kind", ["linear", "transposed", "pointwise"])
def test_a_layer_without_bias_adds_nothing(kind: str) -> None:
    W, x = random(3, 5), random(2, 4, 5, number=2)
    made: Any = make_linear(layer(kind, 6, 4), W, None)
    torch.testing.assert_close(through(made, x), x @ W.mT)
    assert (made.bias is None) == (kind != "transposed")  # Conv1D always has one


def test_new_weights_share_no_memory_with_the_dense_ones() -> None:
    dense = layer("linear", 6, 4)
    made: Any = make_linear(dense, dense.weight, dense.bias)
    made.weight.data.zero_()
    made.bias.data.zero_()
    assert bool(dense.weight.any())
    assert bool(dense.bias.any())


def test_maps_of_one_input_are_joined_and_parted() -> None:
    parts = [Projection(random(n, 5, number=n), random(n, number=10 + n)) for n in (2, 3, 1)]
    whole = fuse(torch.zeros(1, dtype=torch.float32), parts)
    assert whole.bias is not None
    assert (whole.weight.dtype, whole.bias.dtype) == (torch.float32, torch.float32)
    for found, expected in zip(unfuse(whole, [2, 3, 1]), parts, strict=True):
        assert torch.equal(found.weight, expected.weight.float())
        assert found.bias is not None
        assert expected.bias is not None
        assert torch.equal(found.bias, expected.bias.float())
    bare = fuse(torch.zeros(1), [Projection(part.weight, None) for part in parts])
    assert bare.bias is None
    assert [part.bias for part in unfuse(bare, [2, 4])] == [None, None]


@pytest.mark.parametrize("kind", ["linear", "transposed", "pointwise"])
def test_layers_are_refilled_in_place(kind: str) -> None:
    model = nn.Sequential(layer(kind, 3, 2))
    folded = Folded(random(2, 3), random(2, number=1))
    before, old, x = model[0], model[0].bias.detach().clone(), random(1, 4, 3, number=2)  # type: ignore[union-attr,operator]
    refill(model, "0", folded, bias=False)
    torch.testing.assert_close(through(model[0], x), x @ folded.W.mT + old)
    refill(model, "0", folded, bias=True)
    assert model[0] is before
    torch.testing.assert_close(through(model[0], x), x @ folded.W.mT + folded.b)


class Gated(nn.Module):
    """Two packed sets of channels, one after the other or as neighbours."""

    def __init__(self, *, neighbours: bool, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 12, bias=bias), nn.Linear(6, 4, bias=bias)
        self.neighbours = neighbours

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        gate, value = (y[..., ::2], y[..., 1::2]) if self.neighbours else y.chunk(2, -1)
        out: Tensor = self.down(gate.sigmoid() * value)
        return out


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("neighbours", [True, False])
def test_packed_channels_are_removed_from_both_sets(neighbours: bool, bias: bool) -> None:
    """The dense model with zeros in place of the removed channels is the oracle."""
    seed_all(0)
    model, x = Gated(neighbours=neighbours, bias=bias).double(), random(2, 3, 4)
    up = tuple(Rows("up", i, i + 1, runs=6, period=2) for i in (0, 1)) if neighbours else ()
    site = MLPSite("", up or (Rows("up", 0, 6), Rows("up", 6, 12)), "down")
    with torch.no_grad():
        gone = [i for i in range(6) if i not in KEPT.tolist()]
        dense = Gated(neighbours=neighbours, bias=bias).double()
        dense.load_state_dict(model.state_dict())
        dense.down.weight[:, gone] = 0
        shrink_mlp(model, site, KEPT, None, bias=bias)
        torch.testing.assert_close(model(x), dense(x))
    assert (model.up.out_features, model.down.in_features) == (6, 3)
    assert (model.down.bias is None) == (not bias)


def test_modules_between_keep_the_parameters_of_the_kept_channels() -> None:
    seed_all(0)
    norm = nn.BatchNorm1d(6).double().eval()
    conv = nn.Conv1d(6, 6, 3, padding=1, groups=6).double()
    model = nn.Sequential(nn.Conv1d(4, 6, 1).double(), norm, conv, nn.Conv1d(6, 4, 1).double()).eval()
    with torch.no_grad():
        for name in ("running_mean", "running_var", "weight", "bias"):
            getattr(norm, name).uniform_(0.5, 2)
    x = random(2, 4, 7)
    inner = model[:3](x).detach()[:, KEPT]
    whole = norm.weight.detach().clone()
    site = MLPSite("", (Rows("0", 0, 6),), "3", between=("1", "2"))
    shrink_mlp(model, site, KEPT, None, bias=True)
    torch.testing.assert_close(model[:3](x), inner)
    made: Any = (model[1], model[2])
    assert (made[0].num_features, made[1].in_channels, made[1].out_channels, made[1].groups) == (3, 3, 3, 3)
    assert [buffer.numel() for buffer in made[0].buffers()] == [3, 3, 1]
    assert isinstance(made[0].weight, nn.Parameter)
    assert not isinstance(made[0].running_mean, nn.Parameter)
    assert torch.equal(norm.weight, whole)  # the dense module is left as it was


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("new", [True, False])
def test_the_consuming_layer_has_a_bias_where_it_is_said_to(old: bool, new: bool) -> None:
    model = nn.Sequential(layer("linear", 6, 4, bias=old))
    before, x = model[0], random(3, 6)
    site = MLPSite("", (Rows("up", 0, 6),), "0")
    bias = before.bias
    shrink_down(model, site, KEPT, None, bias=new)
    expected = x[:, KEPT] @ before.weight[:, KEPT].mT
    torch.testing.assert_close(model(x[:, KEPT]), expected + (bias if old and new else 0))
    assert (model[0].bias is not None) == new
    model = nn.Sequential(before)
    folded = Folded(random(4, 3), random(4, number=1))
    shrink_down(model, site, KEPT, folded, bias=new)
    torch.testing.assert_close(model(x[:, KEPT]), x[:, KEPT] @ folded.W.mT + (folded.b if new else 0))


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(3, 3)


class Own(nn.Linear):
    """A subclass may compute anything."""


def hooked(before: bool) -> nn.Module:
    made = nn.Linear(3, 3)
    if before:
        made.register_forward_pre_hook(lambda *_: None)
    else:
        made.register_forward_hook(lambda *_: None)
    return made


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Linear(3, 3), None),
        (Conv1D(3, 3), None),
        (Own(3, 3), r"is a .*test_linear\.Own, not a plain linear layer$"),
        (Adapter(), r"is a .*Adapter, not a plain linear layer; merge the adapter into the model first"),
        ("text", r"is a builtins\.str, not a plain linear layer$"),
        (nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), r"not a plain linear layer"),
        (hooked(True), r"has forward hooks"),
        (hooked(False), r"has forward hooks"),
    ],
)
def test_only_plain_linear_layers_are_narrowed(module: object, reason: str | None) -> None:
    found = why_not_linear(module)
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(reason, found)


def test_a_weight_that_is_computed_from_others_is_refused_by_their_names() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        made = nn.utils.weight_norm(nn.Linear(3, 3))
    made._forward_pre_hooks.clear()
    assert "computes its weight from weight_g, weight_v; remove that" in str(why_not_linear(made))
