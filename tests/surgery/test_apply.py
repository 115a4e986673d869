"""Plans carried out without compensation, against the dense model with zeros, and plans for other models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import corp
from corp.errors import PlanError
from corp.planning.output import OutputPlan
from corp.planning.plan import Plan
from corp.planning.site_plan import SitePlan
from corp.recipe import Recipe
from corp.sites import AttentionSite, MLPSite, OutputHead, Rows, Site, Sites, heads_of
from corp.surgery.apply import history, match, match_output, narrowed_copy, narrowed_shell, set_history, shrink
from tests.helpers import models, rotary_models
from tests.helpers.seeds import seeded
from tests.helpers.site_outputs import parameters_of

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
OTHERS = ("vit", "siglip", "no-biases", "relative-position-bias", "scale-attn-norm", "swiglu-packed", "hf-opt",
          "hf-gpt2-cross", "hf-bert", "hf-mpnet", "hf-clip", "hf-whisper", "torch-encoder")  # fmt: skip
FAMILIES = [*rotary_models.FAMILIES, *OTHERS]


def build(family: str) -> tuple[Any, Any]:
    """A model and a batch for it."""
    if family in rotary_models.FAMILIES:
        return rotary_models.build(family), {**rotary_models.batches(1, padded=False)[0], "use_cache": False}
    return models.build(family), models.batches(family, 1, 4)[0]


def some(width: int, number: int) -> list[int]:
    """About half of the dimensions, ascending."""
    return torch.randperm(width, generator=seeded(number))[: (width + 1) // 2].sort().values.tolist()


def kept_of(site: Site, number: int) -> tuple[int, ...]:
    """What one head keeps; rotated dimensions in pairs, before the others."""
    if isinstance(site, AttentionSite) and site.rotary:
        half, plain = site.rotary_dims // 2, some(site.plain_width, number)
        pairs = some(half, number)
        return (*pairs, *(half + j for j in pairs), *(site.rotary_dims + j for j in plain))
    return tuple(some(site.width, number))


def plan_for(sites: Sites) -> Plan:
    plans = []
    for number, site in enumerate(sites):
        groups = heads_of(site) or 1
        kept = tuple(kept_of(site, 10 * number + g) for g in range(groups))
        plans.append(SitePlan(site.name, site.kind, site.width, 0.5, kept, False, ()))
    return Plan(Recipe(), tuple(plans))


def zero(model: nn.Module, rows: Rows, count: int, groups: tuple[tuple[int, ...], ...]) -> None:
    """Zero the rows of `count` heads that their group does not keep."""
    weight, bias = parameters_of(model, rows)
    width = rows.width // count
    for h in range(count):
        for j in set(range(width)) - set(groups[h * len(groups) // count]):
            place = rows.positions[h * width + j]
            weight[place] = 0
            if bias is not None:
                bias[place] = 0


def without(model: nn.Module, sites: Sites, plan: Plan) -> None:
    """The dense model, in place, with zeros for all that the plan removes."""
    for one in plan.sites:
        site = sites[one.name]
        if isinstance(site, AttentionSite):
            zero(model, site.q, site.heads, one.kept)
            zero(model, site.k, site.groups, one.kept)
        elif isinstance(site, MLPSite):
            gone = [i for i in range(site.width) if i not in one.kept[0]]
            parameters_of(model, Rows(site.down, 0, 0))[0][:, gone] = 0
        else:
            zero(model, site.v, site.groups, one.kept)


@pytest.mark.parametrize("family", FAMILIES)
def test_removed_dimensions_are_zeros_of_the_dense_model(family: str) -> None:
    (model, batch), (dense, _) = build(family), build(family)
    sites = corp.find_sites(model)
    assert sites.mlp
    assert sites.attention
    assert bool(sites.values) == (family != "scale-attn-norm")  # its norm mixes values
    plan = plan_for(sites)
    before = sum(p.numel() for p in model.parameters())
    shrink(model, sites, plan)
    without(dense, sites, plan)
    torch.testing.assert_close(models.run(model, batch), models.run(dense, batch), rtol=1e-6, atol=1e-6)
    assert sum(p.numel() for p in model.parameters()) < before


def test_a_shell_shares_what_stays_and_a_copy_shares_nothing() -> None:
    model, data = models.build("vit"), models.batches("vit", 2)
    stats = corp.calibrate(model, data)
    plan = corp.plan(model, stats, Recipe.paper(mlp=0.5))
    sites = corp.find_sites(model)
    held = {p.data_ptr() for p in model.parameters()}
    shell, copied = (make(model, sites, plan, stats) for make in (narrowed_shell, narrowed_copy))
    inside = narrowed_copy(model, sites, plan, stats, within="blocks.0")
    assert not {p.data_ptr() for p in copied.parameters()} & held
    assert {p.data_ptr() for n, p in shell.named_parameters() if ".mlp." not in n} <= held
    assert not {p.data_ptr() for n, p in shell.named_parameters() if ".mlp.fc" in n and "fc2.bias" not in n} & held
    own = {n for n, p in inside.named_parameters() if p.data_ptr() not in held}
    assert {n for n in own if ".mlp." not in n} == {
        n for n, _ in model.named_parameters() if n.startswith("blocks.0.") and ".mlp." not in n
    }
    for made in (shell, inside):
        assert torch.equal(models.run(made, data[0]), models.run(copied, data[0]))


def test_tied_weights_stay_tied_in_a_copy() -> None:
    model = rotary_models.build("llama-ungrouped-tied")
    stats = rotary_models.calibrate(model, rotary_models.batches(2))
    plan = corp.plan(model, stats, Recipe.paper(mlp=0.5))
    made: Any = narrowed_copy(model, corp.find_sites(model), plan, stats)
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert made.lm_head.weight is not model.lm_head.weight


MLP = MLPSite("mlp", (Rows("up", 0, 8),), "down")
HEADS = AttentionSite("attn", Rows("q", 0, 16), Rows("k", 0, 8), 4, None, kv_heads=2)
PLANNED = SitePlan("mlp", "mlp", 8, 0.5, ((0, 1),), True, ())
PLANNED_HEADS = SitePlan("attn", "attn", 4, 0.5, ((0, 1), (2, 3)), True, ())


@pytest.mark.parametrize(
    ("planned", "reason"),
    [
        (replace(PLANNED, name="other"), r"the plan has a mlp site 'other', but this model has no such site"),
        (replace(PLANNED, kind="vo"), r"the plan has a vo site 'mlp', but this model has no such site"),
        (replace(PLANNED, width=9), r"mlp: the plan is for 1 x 9, the model has 1 x 8"),
        (replace(PLANNED_HEADS, kept=((0, 1),)), r"attn: the plan is for 1 x 4, the model has 2 x 4"),
        (replace(PLANNED_HEADS, width=8), r"attn: the plan is for 2 x 8, the model has 2 x 4"),
    ],
)
def test_plans_for_other_models_are_refused(planned: SitePlan, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        match(Sites([MLP, HEADS]), Plan(Recipe(), (planned,)))


def test_planned_sites_are_grouped_by_module() -> None:
    found = match(Sites([MLP, HEADS]), Plan(Recipe(), (PLANNED_HEADS, PLANNED)))
    assert [[site.name for site, _ in group] for group in found] == [["attn"], ["mlp"]]


def test_plans_for_another_output_head_are_refused() -> None:
    sites = Sites([MLP], output=OutputHead("head", 8, 20))
    plan = OutputPlan("head", 8, 4, 1.0, 2.0)
    assert match_output(sites, plan) is sites.output
    for wrong in (replace(plan, name="other"), replace(plan, width=9)):
        with pytest.raises(PlanError, match=rf"output head '{wrong.name}' of width {wrong.width}, but this model has"):
            match_output(sites, wrong)
    with pytest.raises(PlanError, match="no such head"):
        match_output(Sites([MLP]), plan)


def test_a_model_has_the_history_that_it_was_given() -> None:
    model = nn.Linear(1, 1)
    assert history(model) == ()
    plans = (Plan(Recipe(), ()),)
    set_history(model, plans)
    assert history(model) is plans
