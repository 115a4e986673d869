"""Autocast inside a user's forward pass: tolerances follow what flows, and sums are as precise as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import corp
from corp.adapters import proof
from corp.testing import check_model
from tests.helpers.seeds import seed_all, seeded

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # few samples, on purpose
D = 24


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), nn.Sequential(nn.Linear(D, 48), nn.GELU(), nn.Linear(48, D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        out: Tensor = x + self.mlp(x)
        return out


class Cast(nn.Module):
    """A model that computes in half precision whatever its weights are."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        seed_all(3)
        self.blocks, self.dtype = nn.Sequential(Block(), Block()), dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            out: Tensor = self.blocks(x)
        return out


def tokens() -> Tensor:
    return torch.randn(8, 11, D, generator=seeded(1))


def torch_layers() -> nn.Module:
    seed_all(3)
    layers = nn.Sequential(*(nn.TransformerEncoderLayer(D, 3, 48, batch_first=True) for _ in range(2)))
    model = Cast()
    model.blocks = layers
    return model


@pytest.mark.parametrize("make", [Cast, torch_layers])
def test_the_contract_holds_and_nothing_is_refused(make: Any) -> None:
    model = make().eval()
    check_model(model, [tokens(), tokens().flip(0)], show=None).require()
    assert corp.find_sites(model, tokens()).refused == ()


def test_sums_are_those_of_what_flows_in_full_precision() -> None:
    model, x = Cast().eval(), tokens()
    seen: list[Tensor] = []
    handle = model.blocks[0].mlp[2].register_forward_pre_hook(lambda _m, args: seen.append(args[0]))  # type: ignore[index, union-attr]
    with torch.no_grad():
        model(x)
    handle.remove()
    flat = seen[0].flatten(0, 1).double()
    assert seen[0].dtype == torch.bfloat16
    found = corp.calibrate(model, [x], settings=corp.Settings(tokens="all")).moments_of("blocks.0.mlp").total()
    torch.testing.assert_close(found.cov(), torch.cov(flat.mT, correction=0), rtol=1e-4, atol=1e-7)


def test_a_wrong_claim_is_still_refused() -> None:
    class Mixing(Cast):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.mlp[1] = nn.Softmax(-1)

    sites = corp.find_sites(Mixing().eval(), tokens())
    assert {r.name for r in sites.refused} == {"blocks.0.mlp", "blocks.1.mlp"}


def test_the_tolerance_is_that_of_the_coarsest_that_flows() -> None:
    trial = proof.Trial(dtypes={torch.float32, torch.bfloat16})
    assert trial.limit == proof.tolerance(torch.bfloat16) > proof.tolerance(torch.float32)
