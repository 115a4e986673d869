"""Projections in attentions that keep their code: outputs at their dense places, zeros elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corp.sites import Projection, Rows, rows_of
from corp.surgery.padded import GatherLinear, Padded, ScatterLinear, make_plain, taken
from tests.helpers.seeds import seed_all, seeded

HEADS, GROUPS, WIDTH, D = 4, 2, 3, 5


def random(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(number), dtype=torch.float64)


def test_outputs_are_scattered_and_the_rest_is_zero() -> None:
    W, b, x = random(3, D), random(3, number=1), random(2, 4, D, number=2)
    made = ScatterLinear.of(nn.Linear(D, 6).double(), Projection(W, b), [4, 0, 3], 6)
    expected = torch.zeros(2, 4, 6, dtype=torch.float64)
    for row, place in enumerate((4, 0, 3)):
        expected[..., place] = x @ W[row] + b[row]
    torch.testing.assert_close(made(x), expected)
    assert "outputs=6" in made.extra_repr()
    assert "index" in made.state_dict()


@pytest.mark.parametrize(
    ("index", "sound"),
    [([4, 0, 3], True), ([0, 5, 1], True), ([4, 4, 3], False), ([-1, 0, 1], False), ([6, 0, 1], False)],
)
def test_outputs_have_places_of_their_own(index: list[int], sound: bool) -> None:
    made = ScatterLinear.of(nn.Linear(D, 6), Projection(torch.ones(3, D), None), index, 6)
    assert made.is_sound() is sound


def test_inputs_are_gathered() -> None:
    like, x = nn.Linear(3, 2).double().eval(), random(2, 4, D)
    made = GatherLinear.of(like, [3, 0, 4])
    torch.testing.assert_close(made(x), like(x[..., [3, 0, 4]]))
    assert made.weight is like.weight
    assert not made.training
    assert "index" not in made.state_dict()
    assert torch.equal(taken(made, x), x[..., [3, 0, 4]])
    assert taken(like, x) is x


def test_a_plain_layer_has_the_dtype_and_flags_of_the_one_it_replaces() -> None:
    like: Any = nn.Linear(D, 6).half().eval()
    like.weight.requires_grad_(False)
    made: Any = make_plain(like, Projection(random(3, D), None))
    assert (type(made), made.weight.dtype, made.weight.requires_grad) == (nn.Linear, torch.float16, False)
    assert (made.training, made.bias) == (False, None)


class Attention(nn.Module):
    """Query heads that share keys and values, in one packed projection with values first."""

    def __init__(self) -> None:
        super().__init__()
        self.vqk, self.out = nn.Linear(D, (HEADS + 2 * GROUPS) * WIDTH), nn.Linear(HEADS * WIDTH, D)

    def forward(self, x: Tensor) -> Tensor:
        few = GROUPS * WIDTH
        parts = self.vqk(x).split([few, HEADS * WIDTH, few], -1)
        v, q, k = (part.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (k, v))
        y = (q @ k.mT).softmax(-1) @ v
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


FEW = GROUPS * WIDTH
V, Q, K = Rows("vqk", 0, FEW), Rows("vqk", FEW, FEW + HEADS * WIDTH), Rows("vqk", FEW + HEADS * WIDTH, 2 * FEW + 12)
PADDED = Padded(Q, K, V, HEADS, GROUPS, "out")


def kept_rows(model: nn.Module, rows: Rows, dims: list[list[int]]) -> Projection:
    whole = rows_of(model, rows)
    index = [h * WIDTH + j for h, some in enumerate(dims) for j in some]
    assert whole.bias is not None
    return Projection(whole.weight[index], whole.bias[index])


def without(model: Attention, rows: Rows, dims: list[list[int]]) -> None:
    """Zero the removed rows of the dense model."""
    for h, some in enumerate(dims):
        for j in set(range(WIDTH)) - set(some):
            model.vqk.weight.data[rows.start + h * WIDTH + j] = 0
            model.vqk.bias.data[rows.start + h * WIDTH + j] = 0


@pytest.fixture
def pair() -> tuple[Attention, Attention]:
    seed_all(0)
    model, dense = Attention().double(), Attention().double()
    dense.load_state_dict(model.state_dict())
    return model, dense


@pytest.mark.parametrize("known", [True, False], ids=["frequencies", "no-frequencies"])
def test_narrower_queries_and_keys_are_dense_ones_with_zeros(pair: tuple[Attention, Attention], known: bool) -> None:
    model, dense = pair
    keys = [[0, 2], [1, 2]]
    queries = [some for some in keys for _ in range(HEADS // GROUPS)]
    parts: dict[str, Any] = {"q": kept_rows(model, Q, queries), "k": kept_rows(model, K, keys)}
    PADDED.replace(model, {**parts, "kept": torch.tensor(keys)} if known else parts)
    without(dense, Q, queries)
    without(dense, K, keys)
    x = random(2, 6, D)
    torch.testing.assert_close(model(x), dense(x))
    made = model.vqk
    assert isinstance(made, ScatterLinear)
    assert (len(made.weight), made.outputs, made.is_sound()) == (6 + 8 + 4, 24, True)
    first = made.index[6:8].tolist()  # of the first query head
    assert first == ([6, 8] if known else [6, 7])
    assert type(model.out) is nn.Linear


def test_narrower_values_are_dense_ones_with_zeros(pair: tuple[Attention, Attention]) -> None:
    model, dense = pair
    values = [[0, 2], [1, 2]]
    x = random(2, 6, D)
    without(dense, V, values)
    every = [h * WIDTH + j for h in range(HEADS) for j in values[h // (HEADS // GROUPS)]]
    narrow = nn.Linear(len(every), D).double()
    narrow.weight.data, narrow.bias.data = model.out.weight.data[:, every], model.out.bias.data
    model.out = narrow  # narrowed already
    PADDED.replace(model, {"v": kept_rows(model, V, values)})
    torch.testing.assert_close(model(x), dense(x))
    assert isinstance(model.out, GatherLinear)


def test_layers_without_new_parts_stay() -> None:
    seed_all(0)
    model = nn.ModuleDict({name: nn.Linear(D, 6).double() for name in "qkv"})
    apart = Padded(Rows("q", 0, 6), Rows("k", 0, 6), Rows("v", 0, 6), 2, 2, None)
    assert set(apart.layers(model, {"v": kept_rows(model, Rows("v", 0, 6), [[0], [1]])})) == {"v"}
