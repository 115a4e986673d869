"""Layers that are not a site's own: inside adapters such as LoRA, held by functions, shared between blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import corp
from corp.errors import DataError, ModelError
from corp.testing import check_model
from tests.helpers.handmade import Residual
from tests.helpers.seeds import seed_all, seeded

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # few samples, on purpose
D, H = 24, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = H
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (H, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        weights = (q @ k.mT * (D // H) ** -0.5).softmax(-1)
        out: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return out


class Block(Residual):
    def __init__(self) -> None:
        super().__init__(Attention(), D)


class ByFunction(nn.Module):
    """As in minGPT: the layers are a dict, and a function that closes over it runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(D, 2 * D), "act": nn.GELU(), "c_proj": nn.Linear(2 * D, D)})
        m = self.mlp
        self.mlpf = lambda x: m["c_proj"](m["act"](m["c_fc"](x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        out: Tensor = x + self.mlpf(x)
        return out


class Lora(nn.Module):
    """A layer with a low-rank addition, as peft wraps it."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return out


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        seed_all(0)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch() -> Tensor:
    return torch.randn(6, 7, D, generator=seeded(1))


def reasons(model: nn.Module) -> dict[tuple[str, str], str]:
    return {(r.name, r.kind): r.reason for r in corp.find_sites(model, batch()).refused}


def test_low_rank_additions_are_no_mlps_and_are_to_be_merged_first() -> None:
    model: Any = Net()
    for block in model.blocks:
        block.attn.query, block.mlp[0] = Lora(block.attn.query), Lora(block.mlp[0])
    assert not len(corp.find_sites(model, batch()))
    found = reasons(model)
    remedy = f"is a {__name__}.Lora, not a plain linear layer; merge the adapter into the model first"
    assert found["blocks.0.attn", "attn"].startswith(f"query {remedy}")
    assert found["blocks.1.attn.out", "vo"] == found["blocks.0.attn", "attn"]
    assert found["blocks.0.mlp.0", "mlp"].startswith(f"0 {remedy}")


def test_an_addition_to_the_attention_leaves_the_mlp() -> None:
    model: Any = Net()
    for block in model.blocks:
        block.attn.value = Lora(block.attn.value)
    assert [site.name for site in corp.find_sites(model, batch())] == ["blocks.0.mlp", "blocks.1.mlp"]


def test_layers_that_a_function_holds_are_refused() -> None:
    """A copy of the model calls the original's layers, so a pruned copy would compute what the dense model does."""
    model = Net(ByFunction)
    assert {site.kind for site in corp.find_sites(model, batch())} == {"attn", "vo"}
    assert reasons(model)["blocks.1.mlp", "mlp"] == (
        "blocks.1.mlpf is a function that holds blocks.1.mlp, also in a copy; make it a method instead"
    )
    check_model(model, batch(), show=None).require()


def test_functions_of_a_module_that_hold_no_module_do_not_matter() -> None:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            share = 0.5
            self.scale = lambda x: share * x

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.scale(super().forward(x))
            return out

    assert not reasons(Net(Scaled))


def test_values_are_pruned_where_only_queries_share_a_layer() -> None:
    model: Any = Net()
    model.blocks[1].attn.query = model.blocks[0].attn.query
    sites = corp.find_sites(model, batch())
    assert {site.name for site in sites.values} == {"blocks.0.attn.out", "blocks.1.attn.out"}
    assert not sites.attention
    assert reasons(model)["blocks.1.attn", "attn"] == "it shares a layer with blocks.0.attn"


def test_a_batch_that_the_model_does_not_take_is_refused_as_such() -> None:
    with pytest.raises(DataError, match=r"the model does not run on the first batch \(a float32 tensor \(2, 3\)\)"):
        corp.find_sites(Net(), torch.zeros(2, 3))


def test_a_model_that_does_not_run_on_random_numbers_says_so() -> None:
    class Strict(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if float(y.detach().abs().max()) > self.largest:
                raise ValueError("too large")
            return y

    model: Any = Strict()
    model.largest = float("inf")
    model.largest = float(model(batch()).detach().abs().max()) * 1.001
    with pytest.raises(ModelError, match=r"does not run on those: ValueError: too large"):
        corp.find_sites(model, batch())


def test_a_model_without_values_is_refused_before_anything_runs() -> None:
    with torch.device("meta"):
        model = Net()
    for verb in (lambda: corp.prune(model, [batch()], corp.Recipe(mlp=0.5)), lambda: check_model(model, batch())):
        with pytest.raises(ModelError, match=r"is on the meta device, and so are 23 more parameters"):
            verb()
