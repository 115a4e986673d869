"""Shortcuts through attentions: the refit computes queries, keys and values once, and the results are the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import corp
from corp import Recipe
from corp.sites import MLPSite, Rows, ValueSite, fingerprint
from corp.surgery.refit import repair
from corp.surgery.refit.replay import Call, drive
from corp.surgery.refit.shortcuts import finding, has_shortcut, taking
from tests.helpers import models, rotary_models
from tests.helpers.seeds import seed_all, seeded

HALF: dict[str, Any] = {"mlp": 0.5, "attn": 0.5, "vo": 0.5, "sequential": True}
ATTENTION = ValueSite("0.attend", Rows("0.attend.qkv", 8, 4), 1, "0.attend.out", "0.attend", None)
CALL = Call((None,), {}, 0)

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")


class Attention(nn.Module):
    """Returns its output, and whatever else it is made to return."""

    def __init__(self, rest: tuple[Any, ...], after: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.rest, self.after = nn.Linear(4, 12), nn.Linear(4, 4), rest, after

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        y = self.out((q @ k.mT).softmax(-1) @ v) + self.after
        return (y, *self.rest) if self.rest else y


class Block(nn.Module):
    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        found = self.attend(x)
        return x + (found[0] if isinstance(found, tuple) else found)


def build(*rest: Any, after: float = 0.0) -> nn.Sequential:
    seed_all(0)
    return nn.Sequential(Block(Attention(rest, after))).double().eval()


def hidden() -> Tensor:
    return torch.randn(2, 3, 4, generator=seeded(1), dtype=torch.float64)


@contextmanager
def counting(model: nn.Module, *names: str) -> Iterator[Counter[str]]:
    """Within this context, count how often these modules run."""
    runs = Counter[str]()
    handles = [
        model.get_submodule(name).register_forward_hook(lambda _m, _a, _o, name=name: runs.update([name]))
        for name in names
    ]
    yield runs
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("rest", [(), (None,)])
def test_a_shortcut_gives_the_same_output_and_follows_the_last_layer(rest: tuple[Any, ...]) -> None:
    model, x = build(*rest), hidden()
    with finding(model, ATTENTION) as found:
        whole = drive(model, "0", CALL, x)
    attention = model.get_submodule("0.attend")
    with taking(model, found), counting(model, "0.attend.qkv", "0.attend.out") as runs:
        assert torch.equal(drive(model, "0", CALL, x), whole)
    assert runs == {"0.attend.out": 1}
    assert model.get_submodule("0.attend") is attention
    model.get_parameter("0.attend.out.bias").data += 1
    with taking(model, found):
        torch.testing.assert_close(drive(model, "0", CALL, x), whole + 1)
    assert not any(m._forward_hooks for m in model.modules())


def test_a_block_ends_behind_its_attention() -> None:
    model, x = build(), hidden()
    with finding(model, ATTENTION, stop=True) as found:
        assert torch.equal(drive(model, "0", CALL, x), x)  # it did not get any further
    assert list(found) == ["0.attend"]


def test_an_attention_that_returns_more_than_its_last_layer_gives_has_no_shortcut() -> None:
    for model in (build(torch.ones(1)), build(after=1.0)):
        with finding(model, ATTENTION) as found:
            drive(model, "0", CALL, hidden())
        assert not found
    outside = ValueSite("0.attend", Rows("0.attend.qkv", 8, 4), 1, "0.out", "0.attend", None)
    mlp = MLPSite("0.mlp", (Rows("0.up", 0, 6),), "0.attend.out")
    assert [has_shortcut(site) for site in (ATTENTION, outside, mlp)] == [True, False, False]


@pytest.mark.parametrize("family", ["vit", "llama", "hf-whisper"])
def test_the_refit_runs_queries_once_for_every_batch_and_gives_the_same_bits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refitted() -> tuple[str, int]:
        rotary = family in rotary_models.FAMILIES
        model, data = (rotary_models.build(family), rotary_models.batches()) if rotary else (
            models.build(family), models.batches(family))  # fmt: skip
        values: list[ValueSite] = []
        runs = 0

        def spy(smaller: nn.Module, name: str, call: Any, hidden: Tensor) -> Tensor:
            nonlocal runs
            inside = {site.v.module for site in values if site.v.module.startswith(f"{name}.")}
            with counting(smaller, *inside) as counted:
                output = drive(smaller, name, call, hidden)
            runs += counted.total()
            return output

        values += [site for site in corp.find_sites(model) if isinstance(site, ValueSite)]
        monkeypatch.setattr(repair, "drive", spy)
        result = models.prune(model, data, Recipe.paper(**HALF))
        return fingerprint(result.model), runs

    short, fewer = refitted()
    monkeypatch.setattr(repair, "has_shortcut", lambda _site: False)
    monkeypatch.setattr("corp.surgery.refit.shortcuts.has_shortcut", lambda _site: False)
    long, more = refitted()
    assert short == long
    assert fewer < more
