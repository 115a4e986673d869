"""Deployment data that differs is found, with the exact error it makes; data that does not is left in peace."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import corp
from corp import CorpError, Recipe
from corp.evaluate.shift import Shift, SiteShift
from tests.helpers import rotary_models as rotary
from tests.helpers.models import batches, build
from tests.helpers.site_outputs import hidden_output, logit_errors

ALL = Recipe.paper(mlp=0.5, attn=0.5, vo=0.5)


def shifted(data: list[Tensor]) -> list[Tensor]:
    """Other images: a ramp of another strength over each of them."""
    ramp = torch.linspace(-2, 2, data[0].shape[-1], dtype=data[0].dtype)
    return [0.3 * x + 2 * x.mean((1, 2, 3), keepdim=True).sign() * ramp for x in data]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build("vit")


@pytest.fixture(scope="module")
def data() -> list[Tensor]:
    return batches("vit", 20, 50)


@pytest.fixture(scope="module")
def stats(model: nn.Module, data: list[Tensor]) -> corp.Statistics:
    return corp.calibrate(model, data[:10])


@pytest.mark.parametrize("changes", [{}, {"attn_basis": "subspace", "vo_basis": "coordinates", "rank": "exact"}])
def test_the_same_distribution_does_not_warn_and_another_does(
    changes: dict, model: nn.Module, data: list[Tensor], stats: corp.Statistics
) -> None:
    plan = corp.plan(model, stats, Recipe.paper(mlp=0.5, attn=0.5, vo=0.5, **changes))
    same = corp.measure_shift(model, stats, stats, plan)
    assert all(site.spread == 0 and site.mean in (None, 0) for site in same.sites)
    assert [site.deployed for site in same.sites] == pytest.approx([site.relative_error for site in plan.sites])
    assert same.warning() is None

    fresh = corp.measure_shift(model, stats, corp.calibrate(model, data[10:]), plan)
    assert fresh.warning() is None
    assert all(abs(site.growth) < 0.25 for site in fresh.sites)

    other = corp.measure_shift(model, stats, corp.calibrate(model, shifted(data)), plan)
    assert other.warning() is not None
    assert other.alarming[0].name in str(other.warning())
    assert len(other.sites) == len(plan.sites) == 6
    for site, calm in zip(other.sites, fresh.sites, strict=True):
        assert site.spread > 3 * calm.spread
        assert site.best <= site.deployed + 1e-12


def test_the_error_on_deployment_data_is_the_one_it_makes(
    model: nn.Module, data: list[Tensor], stats: corp.Statistics
) -> None:
    """The pruned site, fed the dense model's inputs on the deployment data."""
    there = shifted(data[:4])
    deployment = corp.calibrate(model, there, settings=corp.calibration.settings.Settings(tokens="all"))
    for recipe, name in (
        (Recipe.paper(mlp=0.5), "blocks.0.mlp"),
        (Recipe.paper(vo=0.5), "blocks.0.attn.proj"),
        (Recipe.paper(attn=0.5), "blocks.0.attn"),
        (Recipe.paper(attn=0.5, attn_basis="subspace"), "blocks.0.attn"),
    ):
        plan = corp.plan(model, stats, recipe)
        pruned = corp.apply(model, stats, plan).model
        found = next(s for s in corp.measure_shift(model, stats, deployment, plan).sites if s.name == name)
        if recipe.attn:
            centred = recipe.attn_basis == "subspace"
            error = sum(logit_errors(model, pruned, name, there, centred=centred))
            energy = sum(logit_energies(model, name, there, centred=centred))
        else:
            site = corp.find_sites(model)[name]
            pairs = [(hidden_output(model, site, x), hidden_output(pruned, site, x)) for x in there]
            bias = model.get_submodule(site.down).bias.detach()
            error = sum(float((a - b).square().sum()) for a, b in pairs)
            energy = sum(float((a - bias).square().sum()) for a, _ in pairs)
        assert found.deployed == pytest.approx(error / energy, rel=1e-5)


def logit_energies(model: nn.Module, name: str, data: list[Tensor], *, centred: bool) -> list[float]:
    """The squared logits: what is lost against a model whose queries are zero."""
    silent = build("vit")
    site = corp.find_sites(silent)[name]
    layer = silent.get_submodule(site.q.module)
    with torch.no_grad():
        layer.weight[site.q.index] = 0
        layer.bias[site.q.index] = 0
    return logit_errors(model, silent, name, data, centred=centred)


def test_calibrating_on_the_mixture_helps_on_deployment_data(
    model: nn.Module, data: list[Tensor], stats: corp.Statistics
) -> None:
    deployment = corp.calibrate(model, shifted(data[:10]))
    mixture = stats + deployment
    alone, mixed = (
        corp.measure_shift(model, from_, deployment, corp.plan(model, from_, Recipe.paper(mlp=0.5)))
        for from_ in (stats, mixture)
    )
    for before, after in zip(alone.sites, mixed.sites, strict=True):
        assert after.deployed < before.deployed


@pytest.mark.parametrize("family", ["llama", "phi"])  # all dimensions rotated, and half of them
def test_rotary_models_are_measured_too(family: str) -> None:
    model = rotary.build(family)
    data = rotary.batches(40)
    stats, other = corp.calibrate(model, data[:20]), corp.calibrate(model, data[20:])
    plan = corp.plan(model, stats, Recipe.paper(attn=0.5))
    shift = corp.measure_shift(model, stats, other, plan)
    assert all(site.best <= site.deployed for site in shift.sites)
    assert shift.warning() is None
    same = corp.measure_shift(model, stats, stats, plan)
    assert [site.deployed for site in same.sites] == pytest.approx([site.relative_error for site in plan.sites])


def test_a_negligible_error_may_grow() -> None:
    def site(expected: float, deployed: float) -> SiteShift:
        return SiteShift("blocks.0.mlp", "mlp", 0.1, 0.1, expected, deployed, 0.0)

    assert not site(1e-6, 9e-4).alarming
    assert not site(0.1, 0.149).alarming
    assert site(0.1, 0.151).alarming
    assert Shift((1, 1), (site(0.1, 0.2), site(0.1, 0.4))).warning().count("1 other site")
    assert json.dumps(Shift((1, 1), (site(0.1, 0.2),)).to_dict())


def test_statistics_of_another_model_are_refused(model: nn.Module, stats: corp.Statistics) -> None:
    other = build("vit")
    with torch.no_grad():
        other.head.bias += 1
    strange = corp.calibrate(other, batches("vit", 1, 50))
    with pytest.raises(CorpError, match="another model"):
        corp.measure_shift(model, stats, strange, corp.plan(model, stats, ALL))
