"""Silent wrongness: what a pruned model computes is checked against its plan, and against its own weights on data."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import timm
import torch

import corp
from corp import CorpError, Recipe
from corp.evaluate.check import ACCUMULATED, check, require_equal
from corp.surgery import apply as surgery
from corp.surgery.self_check import Finding, verify
from tests.helpers import models, rotary_models
from tests.helpers.kinds import by_kind

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
SOME = ["vit", "siglip", "relative-position", "hf-gpt2", "hf-bert", "torch-encoder", "torchvision-vit"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", by_kind(SOME, ["vit", "siglip", "hf-gpt2", "torch-encoder"]))
def test_the_error_of_the_weights_is_the_planned_one(family: str, dtype: torch.dtype) -> None:
    model, data = models.build(family, dtype), models.batches(family, dtype=dtype)
    stats = dataclasses.replace(corp.calibrate(model, data), inputs=None)
    for basis in ("coordinates", "subspace"):
        plan = corp.plan(model, stats, Recipe.paper(mlp=0.5, attn=0.5, vo=0.5, attn_basis=basis))
        findings = verify(model, corp.apply(model, stats, plan).model, corp.find_sites(model), stats, plan)
        assert [finding.site for finding in findings] == [site.name for site in plan.sites]
        assert all(finding.agrees for finding in findings)


@pytest.mark.parametrize("rank", ["combined", "exact"])
@pytest.mark.parametrize("family", by_kind(["llama", "phi", "gpt-neox"]))
def test_rotary_weights_too(family: str, rank: str) -> None:
    model, data = rotary_models.build(family, torch.float32), rotary_models.batches()
    stats = dataclasses.replace(corp.calibrate(model, data), inputs=None)
    plan = corp.plan(model, stats, Recipe.paper(mlp=0.5, attn=0.5, vo=0.5, rank=rank))
    findings = verify(model, corp.apply(model, stats, plan).model, corp.find_sites(model), stats, plan)
    assert len(findings) == len(plan.sites)
    assert all(finding.agrees for finding in findings)


@pytest.mark.parametrize("kind", ["mlp", "attn", "vo"])
def test_a_fold_that_goes_wrong_is_not_given_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One percent off in one part of one layer."""
    model, data = models.build("vit", torch.float32), models.batches("vit", dtype=torch.float32)
    stats = corp.calibrate(model, data)
    plan = corp.plan(model, stats, Recipe.paper(mlp=0.5, attn=0.5, vo=0.5))
    right = surgery.apply_group

    def wrong(smaller: torch.nn.Module, group: list[surgery.Planned], *rest: object) -> None:
        right(smaller, group, *rest)  # type: ignore[arg-type]
        site = group[0][0]
        if any(one.kind == kind for one, _ in group) and site.name.startswith("blocks.1"):
            layer = {"mlp": "blocks.1.mlp.fc2", "attn": "blocks.1.attn.qkv", "vo": "blocks.1.attn.proj"}[kind]
            smaller.get_submodule(layer).weight.data *= 1.01

    monkeypatch.setattr(surgery, "apply_group", wrong)
    with pytest.raises(CorpError, match=r"self-check: blocks\.1\.\S+ .*by the plan"):
        corp.apply(model, stats, plan)


@pytest.mark.parametrize("family", [*SOME, "hf-opt", "hf-whisper", "no-biases"])
def test_sites_fed_with_dense_inputs_do_what_their_weights_say(family: str) -> None:
    model, data = models.build(family), models.batches(family)
    result = models.prune(model, data[:2], Recipe.paper(mlp=0.5, attn=0.5, vo=0.25, attn_basis="subspace"))
    before, modules = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    checked = check(model, result.model, result.plan, data[2:])
    assert [one.finding.site for one in checked] == [site.name for site in result.plan.sites]
    require_equal(checked)
    for one in checked:
        assert one.measured == pytest.approx(one.expected, rel=1e-6)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [type(m) for m in model.modules()] == modules
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("rank", ["combined", "exact"])
@pytest.mark.parametrize("family", by_kind(["llama", "qwen2", "gemma2", "phi", "gpt-neox"]))
def test_rotated_sites_too(family: str, rank: str) -> None:
    model, data = rotary_models.build(family), rotary_models.data_for(family)
    result = models.prune(model, data[:2], Recipe.paper(mlp=0.5, attn=0.5, rank=rank))
    checked = check(model, result.model, result.plan, data[2:])
    assert [one.finding.site for one in checked] == [site.name for site in result.plan.sites]
    require_equal(checked)
    for one in checked:
        assert one.measured == pytest.approx(one.expected, rel=1e-6)
        assert one.expected > 0


def test_a_wrong_frequency_is_found() -> None:
    model, data = rotary_models.build("llama"), rotary_models.batches()
    result = models.prune(model, data, Recipe.paper(attn=0.5))
    site = result.plan.sites[0]
    other = dataclasses.replace(site, kept=tuple(tuple(sorted(_other_pairs(group))) for group in site.kept))
    plan = dataclasses.replace(result.plan, sites=(other, *result.plan.sites[1:]))
    with pytest.raises(CorpError, match="sites do not compute what their weights predict"):
        require_equal(check(model, result.model, plan, data[:1]))


def _other_pairs(kept: tuple[int, ...]) -> set[int]:
    """As many pairs, but others."""
    pairs = len(kept) // 2
    half = 2 * pairs  # a half of the dimensions was kept, so there are as many pairs as dimensions kept
    others = sorted(set(range(half)) - set(kept[:pairs]))[:pairs]
    return {*others, *(j + half for j in others)}


def test_a_module_that_computes_something_else_is_found() -> None:
    model, data = models.build("vit"), models.batches("vit")
    result = models.prune(model, data, Recipe.paper(mlp=0.5))
    result.model.blocks[1].mlp.fc1.register_forward_hook(lambda _m, _a, out: 1.02 * out)
    with pytest.raises(CorpError, match=r"1 of 2 sites do not compute what their weights predict: blocks\.1\.mlp"):
        require_equal(check(model, result.model, result.plan, data[:1]))


def test_another_dense_model_is_refused() -> None:
    model, data = models.build("vit"), models.batches("vit")
    result = models.prune(model, data, Recipe.paper(mlp=0.5))
    model.blocks[0].mlp.fc1.weight.data *= 2
    with pytest.raises(CorpError, match="not the one that was pruned: its weights differ"):
        check(model, result.model, result.plan, data)


@pytest.mark.parametrize(
    ("planned", "found", "terms", "agrees"),
    [
        (0.0, 1e-7, 0.0, False),
        (0.0, 1e-7, 100.0, True),  # large weights of opposite signs, as after a fit on few tokens
        (-1e-7, 1e-7, 0.0, True),  # the sums are wrong by as much
        (0.01, 0.011, 100.0, False),
    ],
)
def test_what_rounding_explains_is_no_disagreement(planned: float, found: float, terms: float, agrees: bool) -> None:
    epsilon = torch.finfo(torch.float32).eps ** ACCUMULATED
    assert Finding("mlp", "mlp", planned, found, energy=1.0, epsilon=epsilon, terms=terms).agrees is agrees


def test_sums_that_cancel_are_rounded_by_their_own_size() -> None:
    assert not Finding("vo", "vo", 2e-5, 3e-5, energy=1.0, epsilon=1e-7).agrees
    assert Finding("vo", "vo", 2e-5, 3e-5, energy=1.0, epsilon=1e-7, sums=20.0).agrees


class Wide(torch.nn.Module):
    """An attention whose heads are wider than its input, as vit-pytorch makes them by default."""

    def __init__(self, dim: int = 32, heads: int = 4, width: int = 64) -> None:
        super().__init__()
        self.heads, self.scale = heads, width**-0.5
        self.to_qkv = torch.nn.Linear(dim, 3 * heads * width, bias=False)
        self.to_out = torch.nn.Linear(heads * width, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, -1))
        weights = (q @ k.mT * self.scale).softmax(-1)
        out: torch.Tensor = x + self.to_out((weights @ v).transpose(1, 2).flatten(2))
        return out


@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # few tokens, on purpose
@pytest.mark.parametrize("samples", [3, 6, 40])
def test_dimensions_that_are_nothing_but_rounding_are_no_disagreement(samples: int) -> None:
    """Half of a head's values are linear in the others, and their basis magnifies what rounding leaves of them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Wide(), Wide()).eval()
    data = [torch.randn(samples, 17, 32)]
    stats = corp.calibrate(model, data)
    plan = corp.plan(model, stats, Recipe(vo=0.4))
    pruned = corp.apply(model, stats, plan).model
    require_equal(check(model, pruned, plan, data))


def test_sites_that_see_fewer_tokens_than_dimensions_do_what_their_weights_say() -> None:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "embed_dim": 64, "depth": 2, "num_heads": 4}
    model = timm.create_model("vit_so150m_patch16_reg4_gap_256", num_classes=10, **sizes).eval()
    data = [torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    stats = dataclasses.replace(corp.calibrate(model, data), inputs=None)
    plan = corp.plan(model, stats, Recipe(mlp=0.4, attn=0.4, vo=0.4))
    require_equal(check(model, corp.apply(model, stats, plan).model, plan, data))
