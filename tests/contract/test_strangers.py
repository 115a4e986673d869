"""Models as their users write them, that no library knows: right, or refused with a reason, and never a traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import corp
from corp import CorpError
from corp.errors import DataError
from corp.testing import check_model
from tests.helpers.hf_models import IMAGE, TEXT
from tests.helpers.seeds import seed_all, seeded

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # few samples, on purpose
D, H = 24, 3


class Packed(nn.Module):
    """One projection for q, k and v, in the order of an einops pattern."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.heads = order, H
        self.to_qkv, self.to_out = nn.Linear(D, 3 * D, bias=False), nn.Sequential(nn.Linear(D, D), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        sizes = {"k": 3, "h": H, "d": D // H}
        y = self.to_qkv(x).unflatten(-1, [sizes[letter] for letter in self.order])
        q, k, v = y.permute(2 + self.order.index("k"), 0, 2 + self.order.index("h"), 1, 2 + self.order.index("d"))
        weights = (q @ k.mT * (D // H) ** -0.5).softmax(-1)
        out: Tensor = self.to_out((weights @ v).transpose(1, 2).flatten(2))
        return out


class Unnamed(nn.Module):
    """The size of a head instead of their number, and complex rotation of neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.dim_head = D // H
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (H, -1)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        angles = torch.outer(torch.arange(x.shape[1]), 100.0 ** -torch.arange(0, 1, 2 * H / D)).to(x.dtype)
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (torch.view_as_real(torch.view_as_complex(z.unflatten(-1, (-1, 2))) * turn).flatten(3) for z in (q, k))
        out: Tensor = self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class SamplesSecond(Packed):
    """The same in (n, B, D), between modules that have samples first."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x.transpose(0, 1)).unflatten(-1, (3, H, -1)).permute(2, 1, 3, 0, 4)
        weights = (q @ k.mT * (D // H) ** -0.5).softmax(-1)
        out: Tensor = self.to_out((weights @ v).transpose(1, 2).flatten(2))
        return out


class AllSecond(Packed):
    """Also where its output projection takes it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x.transpose(0, 1)).unflatten(-1, (3, H, -1)).permute(2, 1, 3, 0, 4)
        weights = (q @ k.mT * (D // H) ** -0.5).softmax(-1)
        out: Tensor = self.to_out((weights @ v).permute(2, 0, 1, 3).flatten(2))
        return out.transpose(0, 1)


class Turns(nn.Module):
    """A gated MLP whose gate and up take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(D, 80), nn.Linear(40, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside(x)
        out: Tensor = self.outside(y[..., ::2] * y[..., 1::2].sigmoid())
        return out


class Latents(nn.Module):
    """Queries that are the model's own, the same for every sample, under names of no library."""

    def __init__(self, *samples: int) -> None:
        super().__init__()
        self.num_heads, self.own = H, nn.Parameter(torch.randn(*samples, 4, D))
        self.proj_q, self.proj_k, self.proj_v, self.proj_out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q = self.proj_q(self.own).expand(len(x), -1, -1)
        q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (q, self.proj_k(x), self.proj_v(x)))
        out: Tensor = self.proj_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out.mean(1, keepdim=True)


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attend, self.feed = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        out: Tensor = x + self.feed(x)
        return out


class Again(nn.Module):
    """One block, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(Packed("khd"), nn.Sequential(nn.Linear(D, 48), nn.GELU(), nn.Linear(48, D)))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return x


def stacked(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(Block(make(), Turns()) for _ in range(2)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "q, k, v of all heads": (stacked(lambda: Packed("khd")), (2, 2, 2)),
    "q, k, v of every head": (stacked(lambda: Packed("hkd")), (2, 2, 2)),
    "q, k, v of every dimension": (stacked(lambda: Packed("hdk")), (2, 2, 2)),
    "heads without a name": (stacked(Unnamed), (2, 2, 2)),
    "one block, called again": (Again, (1, 1, 1)),
    "queries of its own": (stacked(lambda: Latents(1)), (2, 2, 2)),
    "queries without samples": (stacked(Latents), (2, 2, 2)),
}


def tokens() -> Tensor:
    return torch.randn(6, 9, D, generator=seeded(1), dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_the_contract_holds_and_everything_is_found(name: str) -> None:
    make, expected = MODELS[name]
    seed_all(3)
    model = make().double().eval()
    check_model(model, [tokens(), tokens().flip(0)], show=None).require()
    sites = corp.find_sites(model)  # without a batch: loading has none
    assert (len(sites.mlp), len(sites.attention), len(sites.values)) == expected
    assert sites.proven == {site.name for site in sites}


@pytest.mark.parametrize("odd", [SamplesSecond, AllSecond])
def test_queries_meet_the_keys_of_their_own_sample_where_the_sequence_comes_first(odd: Any) -> None:
    seed_all(3)
    plain = stacked(lambda: Packed("khd"))().double().eval()
    turned = stacked(lambda: odd("khd"))().double().eval()
    turned.load_state_dict(plain.state_dict())
    torch.testing.assert_close(turned(tokens()), plain(tokens()))
    a, b = (corp.calibrate(model, [tokens()]).grams_of("0.attend").total() for model in (plain, turned))
    torch.testing.assert_close(b.head(1).cross(), a.head(1).cross())


def test_layers_of_a_block_without_a_number_are_accounted_for() -> None:
    layers = {layer.name: layer.state for layer in corp.find_sites(Again()).layers}
    assert len(layers) == 4
    assert set(layers.values()) == {"pruned"}


class Mixture(nn.Module):
    """Experts in bare parameters of a numbered module."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(D, 3)
        self.up, self.down = (nn.Parameter(torch.randn(3, *shape)) for shape in ((D, 80), (80, D)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bnd,edh->bneh", x, self.up).relu()
        return torch.einsum("bneh,ehd,bne->bnd", hidden, self.down, self.route(x).softmax(-1))


def test_a_model_without_sites_is_refused_with_its_reasons() -> None:
    model = nn.Sequential(Mixture(), Mixture())
    assert corp.find_sites(model).coverage()["refused"] > 0.9
    for recipe in (corp.Recipe(), corp.Recipe(mlp=0.5), corp.Recipe(target_macs=0.5)):
        with pytest.raises(
            CorpError, match=r"nothing in this model can be pruned: 0 \(mlp\): Mixture keeps its experts"
        ):
            corp.prune(model, [tokens().float()], recipe)
    with pytest.raises(CorpError, match="no site to calibrate"):
        corp.calibrate(model, [tokens().float()])
    outcome = check_model(model, tokens().float(), show=None)
    assert [row.name for row in outcome.failed] == ["something to prune"]
    assert not outcome.passed


class Unused(nn.Module):
    """Blocks, and a pooling head that no call reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = stacked(lambda: Packed("khd"))()
        self.pool = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.blocks(x)


def test_an_nn_multihead_attention_that_the_batch_does_not_reach_is_refused() -> None:
    refused = {(r.name, r.kind): r.reason for r in corp.find_sites(Unused().double(), tokens()).refused}
    reason = "nothing of the batch reaches it, or its weights are used without calling it"
    assert refused == dict.fromkeys([("pool", "attn"), ("pool.out_proj", "vo")], reason)


def test_albert_calls_its_layer_again_and_again() -> None:
    seed_all(3)
    model = hf.AlbertModel(hf.AlbertConfig(**{**TEXT, "num_hidden_layers": 3}, embedding_size=8)).double().eval()
    batch = {"input_ids": torch.randint(3, 50, (6, 11), generator=seeded(1))}
    check_model(model, batch, show=None).require()


@pytest.mark.filterwarnings("ignore")  # transformers' own, about rope
def test_masks_that_an_outer_model_derives_are_no_users_masks() -> None:
    text = {**TEXT, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    vision = {**IMAGE, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = hf.Gemma3Config(text_config={**text, "num_hidden_layers": 1}, vision_config=vision, mm_tokens_per_image=4)
    seed_all(3)
    model = hf.Gemma3Model(config).eval()
    batch = {"input_ids": torch.randint(3, 50, (6, 11), generator=seeded(1))}
    result = corp.prune(model, [batch], corp.Recipe(mlp=0.5, skip=["*vision*"]))
    assert result.report.params[1] < result.report.params[0]


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"words": torch.ones(2)}, r"batch 0 \(a dict of words: a float32 tensor \(2,\)\): TypeError"),
        (torch.ones(2, 3, 5), r"batch 0 \(a float32 tensor \(2, 3, 5\)\): RuntimeError"),
        ([], "the list is empty"),
        (3, "a batch is a tensor, a dict"),
    ],
)
def test_a_wrong_batch_is_told_from_a_wrong_model(batch: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        check_model(Again(), batch)


def test_a_model_that_draws_at_random_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    class Noisy(Again):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn_like(x)

    outcome = check_model(Noisy().double(), tokens())
    assert "repeatable" in [row.name for row in outcome.failed]
    assert capsys.readouterr().out.startswith("the contract does not hold: repeatable")
    with pytest.raises(CorpError, match="does not hold"):
        outcome.require()


@pytest.mark.filterwarnings("ignore")
def test_a_site_that_sees_a_handful_of_tokens_is_no_defect() -> None:
    """Attention pooling gives one token per sample: fewer than the values have dimensions."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = hf.SiglipVisionModel(hf.SiglipVisionConfig(**sizes, image_size=16, patch_size=8)).eval()
    batch = {"pixel_values": torch.randn(4, 3, 16, 16)}
    check_model(model, [batch, batch], show=None).require()
