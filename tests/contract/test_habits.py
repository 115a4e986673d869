"""Habits of users' own code that need care: adding in place, values passed along, padding, odd nesting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import corp
from corp.adapters.hf_export import resize
from corp.adapters.registry import adapters_for
from corp.testing import check_model
from tests.helpers import models
from tests.helpers.seeds import seed_all, seeded

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # few samples, on purpose
D, H = 24, 3


class Attention(nn.Module):
    """Plain attention, with queries scaled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = H
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def heads(self, x: Tensor) -> Any:
        return self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q *= (D // H) ** -0.5
        out: Tensor = self.proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 48), nn.ReLU(inplace=True), nn.Linear(48, D))


class Block(nn.Module):
    def __init__(self, feed: Callable[[], nn.Module] = mlp) -> None:
        super().__init__()
        self.attn, self.mlp, self.norm = Attention(), feed(), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class AddsInPlace(Block):
    """To the hidden state that it is given."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.attn(self.norm(x))
        x += self.mlp(self.norm(x))
        return x


class AddsToItsOutput(Block):
    """Side by side, as Falcon does: the sum is made in what the MLP gave."""

    def forward(self, x: Tensor) -> Tensor:
        attended, out = self.attn(self.norm(x)), self.mlp(self.norm(x))
        out += attended
        out += x
        return out  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(D, D), nn.ModuleList(make() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def batches() -> list[Tensor]:
    return [torch.randn(8, 9, D, generator=seeded(i), dtype=torch.float64) for i in (1, 2)]


def stack(make: Callable[[], nn.Module]) -> nn.Module:
    seed_all(3)
    model = Stack(make)
    with torch.no_grad():  # random initialisation is small: every layer must matter
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model.double().eval()


@pytest.mark.parametrize("make", [AddsInPlace, AddsToItsOutput])
def test_what_a_block_adds_in_place_is_copied_before(make: Callable[[], nn.Module]) -> None:
    model = stack(make)
    check_model(model, batches(), show=None).require()
    plain, refitted = (corp.prune(model, batches(), corp.Recipe(mlp=0.5, sequential=refit)) for refit in (False, True))
    assert error(model, refitted.model) <= error(model, plain.model)


def error(dense: nn.Module, pruned: nn.Module) -> float:
    with torch.no_grad():
        return float(sum((dense(x.clone()) - pruned(x.clone())).square().sum() for x in batches()))


class PassesValues(Attention):
    """Values of the first layer are added to those of all later ones."""

    def forward(self, x: Tensor, first: Tensor | None = None) -> Any:
        q, k, v = self.heads(x)
        first = v if first is None else first
        out = F.scaled_dot_product_attention(q, k, 0.5 * (v + first))
        return self.proj(out.transpose(1, 2).flatten(2)), first


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": PassesValues(), "mlp": mlp()}) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        values = None
        for layer in self.layers:
            more, values = layer["attn"](x, values)
            x = x + more
            x = x + layer["mlp"](x)
        return x


def test_values_that_later_layers_use_are_refused_in_all_of_them() -> None:
    seed_all(3)
    model = Passing().double().eval()
    sites = corp.find_sites(model, batches()[0])
    assert (len(sites.mlp), len(sites.attention), len(sites.values)) == (3, 3, 0)
    assert {r.name for r in sites.refused} == {f"layers.{i}.attn.proj" for i in range(3)}
    check_model(model, batches(), show=None).require()


class Pooled(nn.Module):
    """torch.nn's encoder, sequence first, with padding; its layers' queries are their own keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, D)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 48), 2)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == 0
        hidden = self.encoder(self.embed(ids).transpose(0, 1), src_key_padding_mask=padding).transpose(0, 1)
        return (hidden * ~padding[..., None]).mean(1)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")  # torch's own, about nested tensors
def test_padding_counts_the_same_when_an_attention_is_replayed() -> None:
    seed_all(3)
    ids = torch.randint(1, 30, (8, 9), generator=seeded(1))
    ids[:3, 5:] = 0
    check_model(Pooled().double().eval(), {"ids": ids}, show=None).require()


class Gate(nn.Module):
    """Both halves of a gated MLP, in a module of their own whose layer is called like a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(D, 80)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, -1)
        out: Tensor = value * F.gelu(gate)
        return out


def gated() -> nn.Module:
    return nn.Sequential(Gate(), nn.Dropout(0.1), nn.Linear(40, D))


def test_a_gate_in_a_module_of_its_own_is_found() -> None:
    sites = corp.find_sites(stack(lambda: Block(gated)))
    assert [(site.name, site.width) for site in sites.mlp] == [("blocks.0.mlp", 40), ("blocks.1.mlp", 40)]
    assert {site.name for site in sites.mlp} <= sites.proven


class Adapted(nn.Module):
    """A layer with a low-rank addition, as LoRA wraps it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def test_wrapped_layers_are_refused_by_what_they_are() -> None:
    model: Any = stack(Block)
    for block in model.blocks:
        block.attn.qkv = Adapted(block.attn.qkv)
        nn.utils.parametrizations.weight_norm(block.mlp[0])
    reasons = {(r.name, r.kind): r.reason for r in corp.find_sites(model).refused}
    assert reasons["blocks.0.attn", "attn"] == f"qkv is a {__name__}.Adapted, not a plain linear layer"
    assert reasons["blocks.0.attn.out", "vo"] == reasons["blocks.1.attn", "attn"]
    assert reasons["blocks.0.mlp", "mlp"].endswith("ParametrizedLinear, not a plain linear layer")


def test_a_share_of_what_the_model_has_not_is_told() -> None:
    model = nn.Sequential(*(mlp() for _ in range(2))).double()
    result = corp.prune(model, batches(), corp.Recipe(mlp=0.5, attn=0.5, sequential=False))
    assert "attn=0.5 changes nothing: no queries and keys were found in this model" in result.plan.notes


def test_two_small_images_are_enough_for_every_kind_of_site() -> None:
    """A fit that rests on a handful of tokens raises its ridge; it does not fail."""
    seed_all(0)
    model = timm.create_model("cait_xxs24_224", img_size=64, depth=2, num_classes=5).eval()
    batch = torch.randn(2, 3, 64, 64, generator=seeded(1))
    for recipe in (corp.Recipe(mlp=0.5, attn=0.5, vo=0.25), corp.Recipe(target_macs=0.7)):
        with torch.no_grad():
            assert bool(torch.isfinite(corp.prune(model, [batch], recipe).model(batch)).all())


def test_a_config_leaves_layers_that_were_refused_as_wide_as_they_are() -> None:
    """Some layers of Gemma 3n look like MLPs until they are tried out, so widths do not name them."""
    model = models.build("hf-bert", torch.float32)
    identity = next(adapter for adapter in adapters_for(model) if adapter.identify).identify(model)
    assert resize(identity, {}, False) == identity
