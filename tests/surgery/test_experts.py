"""Packed experts: split into layers that compute the same, packed again, and other packings refused by name."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corp.surgery.experts import Experts, expert_sites, opens, pack, unpack, why_packed
from corp.surgery.linear import shrink_mlp
from tests.helpers.seeds import seed_all, seeded

COUNT, D, WIDTH = 3, 4, 6
FLAGS = list(product([True, False], repeat=4))
every_packing = pytest.mark.parametrize(("gate", "bias", "transposed", "concatenated"), FLAGS)


class PackedExperts(nn.Module):
    """Experts in two three-dimensional parameters, as transformers' interface packs them, computed one by one."""

    def __init__(self, gate: bool, bias: bool, transposed: bool, concatenated: bool, *, norm: bool = False) -> None:
        super().__init__()
        self.num_experts, self.intermediate_dim = COUNT, WIDTH
        self.has_gate, self.has_bias, self.is_transposed, self.is_concatenated = gate, bias, transposed, concatenated
        self.has_post_expert_norm = norm
        self.post_expert_norm = nn.LayerNorm(D) if norm else nn.Identity()
        self.up_name = "gate_up_proj" if gate else "up_proj"
        for name, rows, columns in ((self.up_name, WIDTH * (1 + gate), D), ("down_proj", D, WIDTH)):
            shape = (COUNT, columns, rows) if transposed else (COUNT, rows, columns)
            setattr(self, name, nn.Parameter(torch.randn(shape)))
            if bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(COUNT, rows)))

    def act_fn(self, x: Tensor) -> Tensor:
        return x.relu()

    def _apply_gate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1) if self.is_concatenated else (x[..., ::2], x[..., 1::2])
        return first.sigmoid() * second

    def _layer(self, name: str, number: int, x: Tensor) -> Tensor:
        weight = getattr(self, name)[number]
        y = x @ (weight if self.is_transposed else weight.mT)
        return y + getattr(self, f"{name}_bias")[number] if self.has_bias else y

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for token, x in enumerate(hidden_states):
            for number, share in zip(top_k_index[token].tolist(), top_k_weights[token], strict=True):
                inner = self._layer(self.up_name, number, x)
                y = self._layer("down_proj", number, self._apply_gate(inner) if self.has_gate else self.act_fn(inner))
                out[token] += share * self.post_expert_norm(y)
        return out


def build(*flags: bool, norm: bool = False) -> Any:
    seed_all(0)
    return nn.Sequential(PackedExperts(*flags, norm=norm)).double().eval()


def routes() -> tuple[Tensor, Tensor, Tensor]:
    """Seven tokens, two experts each, of which the last expert gets none."""
    draw = seeded(1)
    x = torch.randn(7, D, generator=draw, dtype=torch.float64)
    return x, torch.randint(0, 2, (7, 2), generator=draw), torch.rand(7, 2, generator=draw, dtype=torch.float64)


@every_packing
def test_split_experts_compute_the_same_and_share_their_memory(
    gate: bool, bias: bool, transposed: bool, concatenated: bool
) -> None:
    model = build(gate, bias, transposed, concatenated)
    dense, expected = model[0], model[0](*routes())
    assert opens(dense)
    assert why_packed(dense) is None
    unpack(model)
    assert isinstance(model[0], Experts)
    torch.testing.assert_close(model[0](*routes()), expected)
    held = {p.untyped_storage().data_ptr() for p in dense.parameters()}
    assert {p.untyped_storage().data_ptr() for p in model.parameters()} == held
    assert not model[0].training
    assert not list(model[0].packed.parameters())


@every_packing
def test_packed_again_they_are_what_they_were(gate: bool, bias: bool, transposed: bool, concatenated: bool) -> None:
    model = build(gate, bias, transposed, concatenated)
    dense = model[0]
    dense.down_proj.requires_grad_(False)
    unpack(model)
    assert pack(model) == []
    again = model[0]
    assert isinstance(again, PackedExperts)
    assert {n: p.tolist() for n, p in again.named_parameters()} == {n: p.tolist() for n, p in dense.named_parameters()}
    assert not again.down_proj.requires_grad
    assert getattr(again, again.up_name).requires_grad
    assert not again.training


@every_packing
def test_every_expert_is_narrowed_by_its_site(gate: bool, bias: bool, transposed: bool, concatenated: bool) -> None:
    """The dense experts with zeros in place of removed channels are the oracle."""
    model = build(gate, bias, transposed, concatenated)
    dense, kept = model[0], [torch.tensor(some) for some in ([0, 3], [1, 5], [2, 4])]
    unpack(model)
    sites = expert_sites("0", model[0])
    assert [(site.name, site.experts, site.width) for site in sites] == [(f"0.{i}", "0", WIDTH) for i in range(COUNT)]
    for site, some in zip(sites, kept, strict=True):
        shrink_mlp(model, site, some, None, bias=bias)
    with torch.no_grad():
        for number, some in enumerate(kept):
            gone = [i for i in range(WIDTH) if i not in some.tolist()]
            down = dense.down_proj[number].mT if not transposed else dense.down_proj[number]
            down[gone] = 0
    torch.testing.assert_close(model[0](*routes()), dense(*routes()))
    assert pack(model) == []
    assert model[0].intermediate_dim == 2
    torch.testing.assert_close(model[0](*routes()), dense(*routes()))


def test_a_norm_after_every_expert_is_kept() -> None:
    model = build(True, False, False, True, norm=True)
    expected = model[0](*routes())
    unpack(model)
    torch.testing.assert_close(model[0](*routes()), expected)


@pytest.mark.parametrize("what", ["width", "bias"])
def test_experts_of_unequal_widths_or_with_new_biases_stay_apart(what: str) -> None:
    model = build(True, False, False, True)
    unpack(model)
    first = expert_sites("0", model[0])[0]
    if what == "width":
        shrink_mlp(model, first, torch.tensor([0, 1]), None, bias=False)
    else:
        for site in expert_sites("0", model[0]):
            shrink_mlp(model, site, torch.arange(WIDTH), None, bias=True)
    assert pack(model) == ["0"]
    assert isinstance(model[0], Experts)


class Strange(PackedExperts):
    """Experts that compute something else."""

    def forward(self, *args: Any) -> Tensor:
        return super().forward(*args) * 1.5


class Called(PackedExperts):
    """Experts that are called in another way."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        return hidden_states


class OneExpertEach(nn.Module):
    def __init__(self, matrices: int) -> None:
        super().__init__()
        for i in range(matrices):
            setattr(self, f"w{i}", nn.Parameter(torch.zeros(2, 3, 4)))


class Plain(OneExpertEach):
    pass


class Table(nn.Module):
    """A parameter of three dimensions, one of which is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1, 3, 4)), nn.Parameter(torch.zeros(1, 3, 4))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: Strange(True, False, False, True), "and computes something else than an MLP for each"),
        (lambda: Called(True, False, False, True), "and computes something else than an MLP for each"),
        (lambda: OneExpertEach(1), "OneExpertEach keeps its experts packed in one parameter in a way of its own"),
        (lambda: Plain(2), "Plain keeps its experts packed in one parameter in a way of its own"),
        (lambda: Plain(1), None),
        (lambda: OneExpertEach(0), None),
        (Table, None),
        (lambda: nn.Conv1d(4, 4, 3), None),
        (lambda: nn.Linear(3, 3), None),
    ],
)
def test_other_packings_are_refused_by_name(module: Any, reason: str | None) -> None:
    seed_all(0)
    made = module()
    found = why_packed(made)
    assert (found is None) if reason is None else reason in str(found)
    assert not opens(made)
    model = nn.Sequential(made)
    unpack(model)
    assert model[0] is made


def test_experts_without_weights_are_taken_as_they_look() -> None:
    with torch.device("meta"):
        made = Strange(True, False, False, True)
    assert why_packed(made) is None
