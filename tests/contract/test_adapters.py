"""One contract that every model family passes, on tiny random models; and what is refused, with the reason."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor, nn

import corp
from corp import CorpError, Recipe
from corp.calibration.batches import example, move
from corp.calibration.settings import Settings
from corp.measure.units import unit_costs
from corp.sites import AttentionSite, MLPSite, Rows
from corp.steps.apply import apply_plan
from corp.steps.run import Dense
from tests.helpers.hf_models import output_of
from tests.helpers.kinds import KINDS, by_kind
from tests.helpers.models import FAMILIES, batches, build, call, images, prune, run, vit
from tests.helpers.seeds import seeded
from tests.helpers.site_outputs import hidden_output, logit_errors, parameters_of

FEW_TOKENS = pytest.mark.filterwarnings("ignore:.*a stable fit needs:corp.errors.CorpWarning")


@pytest.fixture(params=by_kind(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """What a promise about how corp computes is tried on."""
    name: str = request.param
    return name


@pytest.fixture(params=FAMILIES)
def any_family(request: pytest.FixtureRequest) -> str:
    """What a promise about where an adapter points is tried on."""
    name: str = request.param
    return name


def test_everything_is_found_and_nothing_refused(any_family: str) -> None:
    sites, expected = corp.find_sites(build(any_family)), FAMILIES[any_family]
    assert (len(sites.mlp), len(sites.attention)) == (expected.mlps, expected.attentions)
    assert sum(site.causal is True for site in sites.attention) == expected.causal
    assert [site.attention for site in sites.values] == [s.name for s in sites.attention][: len(sites.values)]
    assert {refusal.kind for refusal in sites.refused} == ({"vo"} if any_family == "scale-attn-norm" else set())
    assert len(sites.values) == (0 if any_family == "scale-attn-norm" else expected.attentions)
    assert all(site.width * site.heads == 24 for site in sites.attention if site.name != "attn_pool")


def test_zero_sparsity_is_the_identity(family: str) -> None:
    model, data = build(family), batches(family)
    result = prune(model, data, Recipe.paper())
    assert torch.equal(run(result.model, data[0]), run(model, data[0]))
    assert result.plan.sites == ()


def test_the_dense_model_is_left_as_it_was(family: str) -> None:
    model, data = build(family).train(), batches(family)
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    prune(model, data, all_kinds(family, 0.5))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_pruned_model_is_smaller_dense_and_trainable(family: str) -> None:
    model, data = build(family), batches(family)
    result = corp.prune(model, data, all_kinds(family, 0.5))
    assert result.report.params[1] < result.report.params[0]
    assert result.report.macs is not None
    assert result.report.macs[1] < result.report.macs[0]
    smaller, batch = result.model.train(), data[0]
    output_of(call(smaller, batch)).sum().backward()
    sites = corp.find_sites(smaller)
    for site in sites:
        rows = (
            (site.q, site.k) if isinstance(site, AttentionSite) else site.up if isinstance(site, MLPSite) else (site.v,)
        )
        assert all(p.grad is not None for row in rows for p in smaller.get_submodule(row.module).parameters())
    narrowed = [site for site in (*sites.attention, *sites.values) if "attn_pool" not in site.name]
    assert all(site.width * site.heads == 12 for site in narrowed)


@FEW_TOKENS
def test_predicted_distortion_equals_the_measured_one_at_every_site(family: str) -> None:
    assert_predicted(family, "coordinates")


@FEW_TOKENS
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in KINDS])
def test_predicted_distortion_equals_the_measured_one_at_the_last_site_of_every_kind(family: str) -> None:
    assert_predicted(family, "coordinates", only_last=True)


@FEW_TOKENS
def test_predicted_distortion_of_subspaces_equals_the_measured_one(family: str) -> None:
    assert_predicted(family, "subspace")


def assert_predicted(family: str, basis: str, *, only_last: bool = False) -> None:
    """Prune one site alone, so that it sees what the dense model's sees, and compare with the plan; ridge > 0."""
    model, data = build(family), batches(family, 2, 8)
    stats = corp.calibrate(model, data, settings=Settings(tokens="all"))
    stats = dataclasses.replace(stats, inputs=None)  # no need to count operations every time
    recipe = dataclasses.replace(all_kinds(family, 0.5), mlp=0.4, ridge=1e-2, attn_basis=basis, vo_basis=basis)
    plan, dense = corp.plan(model, stats, recipe), Dense.of(model)  # sites are found once, not for every model
    assert len(plan.sites) == len(dense.sites)
    if basis == "subspace":  # the MLPs are the same
        plan = dataclasses.replace(plan, sites=tuple(site for site in plan.sites if site.kind != "mlp"))
        assert all(site.basis == "subspace" for site in plan.sites)
    for planned in {site.kind: site for site in plan.sites}.values() if only_last else plan.sites:
        site = dense.sites[planned.name]
        pruned = apply_plan(dense, stats, dataclasses.replace(plan, sites=(planned,))).model
        if isinstance(site, AttentionSite):
            measured = logit_errors(model, pruned, planned.name, data, centred=basis == "subspace")
        else:
            wide, narrow = (torch.cat([hidden_output(m, site, x) for x in data]) for m in (model, pruned))
            measured = [float((wide - narrow).square().sum()) / (wide.numel() / wide.shape[-1])]
        for cost, value in zip(planned.costs, measured, strict=True):
            assert pytest.approx(value, rel=1e-6, abs=1e-9 * cost.energy) == cost.J


def test_budgets_are_met_exactly_as_counted(family: str) -> None:
    """What the plan thinks its widths cost is what the pruned model is counted to cost."""
    model, data = build(family), batches(family)
    stats = corp.calibrate(model, data)
    equal = family != "scale-attn-norm"
    result = corp.apply(model, stats, corp.plan(model, stats, Recipe.paper(target_macs=0.7, equal_heads=equal)))
    dense, pruned = result.report.macs
    sites = corp.find_sites(model)
    batch = example(stats.inputs, torch.device("cpu"))
    units = unit_costs(model, sites, move(batch, torch.device("cpu"), torch.float64))
    assert dense - pruned == sum(units[s.name].macs * (s.width - s.keep) for s in result.plan.sites)
    assert 0.6 < pruned / dense <= 0.7
    before, after = result.report.params
    assert before - after == sum(units[s.name].params * (s.width - s.keep) for s in result.plan.sites)


def all_kinds(family: str, sparsity: float) -> Recipe:
    """Everything that the family lets be pruned."""
    return Recipe.paper(mlp=sparsity, attn=sparsity, vo=0.0 if family == "scale-attn-norm" else sparsity)


def test_redundant_channels_are_pruned_without_loss(family: str) -> None:
    """Copies of hidden channels carry nothing new: removing half of them must not change the output."""
    model, data = build(family), batches(family)
    for site in corp.find_sites(model).mlp:
        half = site.width // 2
        for rows in site.up:
            for tensor in parameters_of(model, rows):
                if tensor is not None:
                    tensor[rows.start + half : rows.start + 2 * half] = tensor[rows.start : rows.start + half]
        # By magnitude the first of every pair is kept, though the second matters nearly as much.
        down, _ = parameters_of(model, Rows(site.down, 0, 0))
        down /= down.norm(dim=0)
        down[:, half:] *= 0.9
    result = prune(model, data, Recipe.paper(mlp=0.5, rank="magnitude", ridge=1e-9))
    torch.testing.assert_close(run(result.model, data[0]), run(model, data[0]), rtol=1e-5, atol=1e-5)
    assert all(site.rho2 > 0.999999 for site in result.plan.sites)


def test_redundant_dimensions_are_pruned_without_loss(family: str) -> None:
    """Heads whose Q/K dimensions are all mixtures of half as many lose half of them for nothing."""
    model, data = build(family), batches(family)
    generator = seeded(5)
    for site in corp.find_sites(model).attention:
        half, d = site.width // 2, site.width
        for rows in (site.q, site.k):
            for h in range(site.heads):
                start = rows.start + h * d
                # Small, so that the others are kept: a chance choice among all could be nearly dependent.
                mix = 0.3 * torch.randn(d - half, half, generator=generator, dtype=torch.float64) / half**0.5
                for tensor in parameters_of(model, rows):
                    if tensor is not None:
                        tensor[start + half : start + d] = mix @ tensor[start : start + half]
    result = prune(model, data, Recipe.paper(attn=0.5, ridge=1e-10))
    torch.testing.assert_close(run(result.model, data[0]), run(model, data[0]), rtol=1e-3, atol=1e-3)
    assert all(site.rho2 > 0.999 for site in result.plan.sites)


def test_redundant_values_are_pruned_without_loss(family: str) -> None:
    """Heads whose values are mixtures of half as many lose half of them for nothing, whatever the mixture."""
    model, data = build(family), batches(family)
    generator = seeded(5)
    for site in corp.find_sites(model).values:
        half, d = site.width // 2, site.width
        for h in range(site.groups):
            start = site.v.start + h * d
            mix = torch.randn(d, half, generator=generator, dtype=torch.float64)
            for tensor in parameters_of(model, site.v):
                if tensor is not None:
                    tensor[start : start + d] = mix @ tensor[start : start + half].clone()
    result = prune(model, data, Recipe.paper(vo=all_kinds(family, 0.5).vo, ridge=1e-10))
    torch.testing.assert_close(run(result.model, data[0]), run(model, data[0]), rtol=1e-5, atol=1e-5)
    assert all(site.relative_error < 1e-8 for site in result.plan.sites)


def test_same_data_same_bits(family: str) -> None:
    model, data = build(family, torch.float32), batches(family, dtype=torch.float32)
    first, second = (prune(model, data, all_kinds(family, 0.5)) for _ in range(2))
    assert first.plan == second.plan
    states = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_pruned_model_can_be_pruned_again(family: str) -> None:
    model, data = build(family), batches(family)
    once = prune(model, data, all_kinds(family, 0.25)).model
    twice = prune(once, data, all_kinds(family, 0.25)).model
    assert run(twice, data[0]).isfinite().all()
    assert sum(p.numel() for p in twice.parameters()) < sum(p.numel() for p in once.parameters())


def test_half_precision_models_keep_their_dtype(family: str) -> None:
    model, data = build(family, torch.bfloat16), batches(family, dtype=torch.bfloat16)
    result = prune(model, data, all_kinds(family, 0.5))
    assert {p.dtype for p in result.model.parameters()} == {torch.bfloat16}
    assert run(result.model, data[0]).isfinite().all()


# What is not understood is refused for that kind of site only.


def test_qk_norm_refuses_attention_and_leaves_the_mlp() -> None:
    model = vit(qk_norm=True)
    sites = corp.find_sites(model)
    assert [r.name for r in sites.refused if r.kind == "attn"] == ["blocks.0.attn", "blocks.1.attn"]
    assert [site.name for site in sites.values] == ["blocks.0.attn.proj", "blocks.1.attn.proj"]  # not its business
    with pytest.raises(CorpError, match=r"blocks\.0\.attn \(attn\): QK-norm.*skip"):
        corp.prune(model, [], Recipe.paper(attn=0.5))
    data = images(dtype=torch.float32)
    assert len(corp.prune(model, data, Recipe.paper(mlp=0.5)).plan.sites) == 2
    assert len(corp.prune(model, data, Recipe.paper(mlp=0.5, attn=0.5, skip="*.attn")).plan.sites) == 2


def test_norm_inside_the_mlp_refuses_the_mlp() -> None:
    sites = corp.find_sites(vit(scale_mlp_norm=True))
    assert {r.kind for r in sites.refused} == {"mlp"}
    assert "norm between activation and second linear" in sites.refused[0].reason
    assert len(sites.attention) == 2


def test_fused_parallel_blocks_are_refused() -> None:
    sites = corp.find_sites(vit(block_fn=ParallelScalingBlock))
    assert len(sites) == 0
    assert {r.kind for r in sites.refused} == {"mlp", "attn", "vo"}


def test_parametrised_linears_are_refused() -> None:
    model = vit()
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].mlp.fc2)
    refused = corp.find_sites(model).refused
    assert [r.name for r in refused] == ["blocks.0.mlp"]
    assert "not a plain linear layer" in refused[0].reason


def test_unknown_models_are_refused_with_a_way_out() -> None:
    with pytest.raises(CorpError, match=r"no adapter knows .*Sequential.*register_adapter"):
        corp.find_sites(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(CorpError, match=r"expected a torch\.nn\.Module, got str"):
        corp.find_sites("deit_tiny")  # type: ignore[arg-type]


def test_a_backbone_inside_a_module_is_found() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = build("vit")

        def forward(self, x: Tensor) -> Tensor:
            return self.backbone(x) * 2

    model, data = Head(), images()
    assert corp.find_sites(model).mlp[0].name == "backbone.blocks.0.mlp"
    result = corp.prune(model, data, Recipe.paper(mlp=0.5, attn=0.5))
    assert result.report.params[1] < result.report.params[0]


class TwoLayer(nn.Module):
    """A model no built-in adapter knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 20), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def test_a_user_can_register_an_adapter_in_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corp.adapters.registry._registered", {})

    def find(model: nn.Module) -> list[MLPSite] | None:
        if not isinstance(model, TwoLayer):
            return None
        return [MLPSite("mlp", up=(Rows("first", 0, 20),), down="second")]

    corp.register_adapter("two-layer", find)
    model = TwoLayer()
    result = corp.prune(model, [torch.randn(64, 6) for _ in range(4)], Recipe.paper(mlp=0.5))
    assert result.model.first.out_features == 10
    assert len(corp.find_sites(vit())) == 6  # the built-in ones still answer


def test_a_failing_adapter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corp.adapters.registry._registered", {})
    corp.register_adapter("broken", lambda model: model.no_such_thing)
    with pytest.raises(CorpError, match="adapter 'broken' failed on VisionTransformer"):
        corp.find_sites(vit())
