"""What is refused, and in which words; and what looks odd, but is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import corp
from corp.testing import check_model
from tests.helpers.handmade import Residual
from tests.helpers.seeds import seed_all, seeded

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # few samples, on purpose
D, H, N = 24, 3, 9


class ByHead(nn.Module):
    """q, k and v of every head in turn, as in TinyViT; `bias` is added to the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = H
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def bias(self, _q: Tensor) -> Tensor | float:
        return 0.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (H, -1)).transpose(1, 2).chunk(3, -1)
        weights = (q @ k.mT * (D // H) ** -0.5 + self.bias(q)).softmax(-1)
        out: Tensor = self.proj((weights @ v).transpose(1, 2).flatten(2))
        return out


class InWindows(ByHead):
    """A window of so many tokens and no others: a table has a bias for every pair of them."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.randn(H, 2 * N))
        self.register_buffer("index", (torch.arange(N)[:, None] - torch.arange(N) + N), persistent=False)

    def bias(self, _q: Tensor) -> Tensor:
        index: Any = self.index
        return self.offsets[:, index]


class Relative(ByHead):
    """SAM's relative positions: queries meet a table too, which a fresh model has at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.rel_pos_h = nn.Parameter(torch.zeros(N, D // H))

    def bias(self, q: Tensor) -> Tensor:
        return q @ self.rel_pos_h[: q.shape[-2]].mT


class Luke(ByHead):
    """Queries of another kind meet the same keys, if the input has some."""

    def __init__(self) -> None:
        super().__init__()
        self.w2e_query = nn.Linear(D, D)


class NotRotated(ByHead):
    """Its code speaks of rotary positions, and it has none; heads are samples to its kernel."""

    def forward(self, x: Tensor) -> Tensor:
        rope = None
        q, k, v = (part.flatten(0, 1) for part in self.qkv(x).unflatten(-1, (H, -1)).transpose(1, 2).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=rope)
        out: Tensor = self.proj(y.unflatten(0, (-1, H)).transpose(1, 2).flatten(2))
        return out


class Net(nn.Module):
    """Unlike a Sequential it says nothing about its input."""

    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        seed_all(0)
        self.blocks = nn.ModuleList(Residual(attention(), D) for _ in range(2))

    def forward(self, x: Tensor, *_others: Any) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch() -> Tensor:
    return torch.randn(6, N, D, generator=seeded(1))


@pytest.mark.parametrize("attention", [ByHead, InWindows, NotRotated])
def test_attention_is_found_without_data_whatever_number_of_tokens_it_takes(attention: type[nn.Module]) -> None:
    model = Net(attention)
    assert len(corp.find_sites(model).proven) == 6
    assert len(corp.find_sites(model, batch()).proven) == 6
    check_model(model, batch(), show=None).require()


def test_a_table_of_the_queries_is_refused_even_where_it_is_zero_yet() -> None:
    model = Net(Relative)
    found = {(r.name, r.kind): r.reason for r in corp.find_sites(model, batch()).refused}
    assert set(found) == {("blocks.0.attn", "attn"), ("blocks.1.attn", "attn")}
    assert set(found.values()) == {
        "rel_pos_h has a number for every dimension of a query, so queries do more than meet keys"
    }


def test_queries_for_other_inputs_are_refused_although_the_batch_has_none() -> None:
    sites = corp.find_sites(Net(Luke), batch())
    assert {r.reason for r in sites.refused} == {
        "w2e_query may meet the same keys or queries, for inputs that were not tried out"
    }
    assert {site.kind for site in sites} == {"vo", "mlp"}


def test_values_beside_refused_queries_are_measured() -> None:
    """One layer makes all three, and only a third of it is narrowed."""
    rows = {row.name: row for row in check_model(Net(Relative), batch(), show=None)}
    assert rows["predicted = measured"].detail == "4 of 4 sites measured"


class Bypassed(nn.Module):
    """The weights of an nn.MultiheadAttention that is never called, as in torchaudio's WavLM."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.inner.in_proj_weight).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v)
        return F.linear(y, self.inner.out_proj.weight)


def test_weights_of_an_attention_that_is_not_called_are_refused() -> None:
    sites = corp.find_sites(Net(Bypassed), batch())
    reason = "nothing of the batch reaches it, or its weights are used without calling it"
    assert {(r.kind, r.reason) for r in sites.refused} == {("attn", reason), ("vo", reason)}


def test_reasons_that_differ_in_a_number_are_told_once() -> None:
    class Mixed(nn.Module):
        """Keys are scaled dimension by dimension with a factor that depends on the others."""

        def __init__(self) -> None:
            super().__init__()
            self.num_heads = H
            self.q, self.k, self.v, self.proj = (nn.Linear(D, D) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (layer(x).unflatten(-1, (H, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(q.softmax(-1), k.softmax(-1), v)
            out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
            return out

    model = Net(Mixed)
    assert len({r.reason for r in corp.find_sites(model, batch()).refused}) == 2
    rows = {row.name: row.detail for row in check_model(model, batch(), show=None)}
    assert rows["Q/K sites"].count("changes the attention") == 1


class Elsewhere(nn.Module):
    """Two layers in the shapes of an MLP, of which the second takes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        self.fc1(x)
        out: Tensor = self.fc2(torch.cat([x, x], -1))
        return out


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(D, 2 * D), nn.LayerNorm(2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.norm(self.fc1(x)))
        return out


@pytest.mark.parametrize(
    ("mlp", "reason"),
    [
        (Elsewhere, "tried out on the model, what fc1 makes does not arrive at fc2"),
        (Normed, "norm has parameters of its own for every hidden channel"),
    ],
)
def test_every_block_is_refused_in_the_same_plain_words(mlp: type[nn.Module], reason: str) -> None:
    model = nn.Sequential(mlp(), mlp())
    assert {r.reason for r in corp.find_sites(model, batch()).refused} == {reason}
