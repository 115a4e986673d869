"""calibrate, plan and apply: what they accept, warn of and refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import corp
from corp import CorpError, Recipe
from corp.adapters.registry import find_sites
from corp.errors import CorpWarning
from corp.sites import fingerprint
from corp.steps.allocation.budget import count_budget
from corp.steps.allocation.curves import site_curves
from corp.surgery.refit.blocks import examine
from tests.helpers.models import as_saved, build, images, vit
from tests.helpers.observers import Recorder


def test_prune_is_its_three_steps() -> None:
    model, data, recipe = build("vit"), images(), Recipe.paper(mlp=0.5, attn=0.5)
    stats = corp.calibrate(model, data)
    stepwise = corp.apply(model, stats, corp.plan(model, stats, recipe))
    at_once = corp.prune(model, data, recipe)
    assert stepwise.plan == at_once.plan
    states = stepwise.model.state_dict(), at_once.model.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_one_tensor_of_batches_is_read_batch_by_batch() -> None:
    model, data, recipe = build("vit"), images(), Recipe.paper(mlp=0.5, attn=0.5)
    assert corp.prune(model, torch.stack(list(data)), recipe).plan == corp.prune(model, data, recipe).plan


def test_statistics_add_like_one_pass() -> None:
    model, data, recipe = build("vit"), images(4), Recipe.paper(mlp=0.5, attn=0.5)
    parts = corp.calibrate(model, data[:1]) + corp.calibrate(model, data[1:])
    whole = corp.calibrate(model, data)
    assert parts.samples == whole.samples == 200
    for a, b in zip(corp.plan(model, parts, recipe).sites, corp.plan(model, whole, recipe).sites, strict=True):
        assert a.kept == b.kept
        assert [c.J for c in a.costs] == pytest.approx([c.J for c in b.costs], rel=1e-9)


def test_statistics_of_other_weights_are_refused() -> None:
    model, data = build("vit"), images()
    stats = corp.calibrate(model, data)
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight[0, 0] += 1
    with pytest.raises(CorpError, match="other weights"):
        corp.plan(model, stats, Recipe.paper(mlp=0.5))
    with pytest.raises(CorpError, match="different weights"):
        _ = stats + corp.calibrate(model, data)


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = build("vit")

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.inner(pixels)


def test_batches_may_be_tensors_tuples_dicts_or_anything_with_forward() -> None:
    data, recipe = images(), Recipe.paper(mlp=0.5, attn=0.5)
    model = build("vit")
    plain = corp.prune(model, data, recipe).plan.sites
    labelled = corp.prune(model, [(x, torch.zeros(len(x))) for x in data], recipe).plan.sites
    other = corp.prune(model, [{"image": x} for x in data], recipe, forward=lambda m, b: m(b["image"])).plan.sites
    named = corp.prune(TakesDict().eval(), [{"pixels": x} for x in data], recipe)
    assert plain == labelled == other
    assert [site.kept for site in named.plan.sites] == [site.kept for site in plain]
    assert named.report.macs is not None
    with pytest.raises(CorpError, match=r"got str.*forward="):
        corp.calibrate(model, ["x"])


def test_no_data_is_an_error() -> None:
    with pytest.raises(CorpError, match="was empty"):
        corp.prune(build("vit"), [], Recipe.paper(mlp=0.5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_name_the_site(bad: float) -> None:
    model = build("vit", torch.float32)
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight[3, 3] = bad
    with pytest.raises(CorpError, match=r"NaN or Inf in the activations of site 'blocks\.1\.mlp'"):
        corp.calibrate(model, images(dtype=torch.float32))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_too_few_tokens_are_warned_of_with_the_numbers() -> None:
    model = build("vit")
    with pytest.warns(CorpWarning, match=r"17 tokens for 48 kept channels; a stable fit needs at least 96"):
        corp.prune(model, [images()[0][:1]], Recipe.paper(mlp=0.5, ridge=0.1))


def test_skip_and_overrides_reach_the_sites() -> None:
    model, data = build("vit"), images()
    recipe = Recipe.paper(mlp=0.5, attn=0.5, skip="blocks.0.attn", overrides={"blocks.1.*": {"mlp": 0.25}})
    plan = corp.plan(model, corp.calibrate(model, data), recipe)
    assert {site.name: site.keep for site in plan.sites} == {"blocks.0.mlp": 48, "blocks.1.attn": 4, "blocks.1.mlp": 72}


def test_globs_that_match_nothing_are_errors() -> None:
    with pytest.raises(CorpError, match=r"'block\.0\.\*' matches no site; they are called blocks\.0\.attn"):
        corp.prune(vit(), [], Recipe.paper(mlp=0.5, skip="block.0.*"))
    with pytest.raises(CorpError, match="matches no site"):
        corp.prune(vit(), [], Recipe.paper(overrides={"layers.*": {"mlp": 0.5}}))


def test_rounding_reports_asked_and_achieved() -> None:
    model, data = build("vit"), images()
    plan = corp.plan(
        model, corp.calibrate(model, data), Recipe.paper(mlp=0.45, attn=0.5, round_to={"mlp": 32, "head": 8})
    )
    assert [(s.name, s.keep, s.requested) for s in plan.sites] == [
        ("blocks.0.mlp", 64, 0.45),
        ("blocks.1.mlp", 64, 0.45),
    ]
    assert plan.sites[0].achieved == pytest.approx(1 / 3)


def test_compensation_orders_as_promised() -> None:
    model, data = build("vit"), images()
    stats = corp.calibrate(model, data)
    plans = [corp.plan(model, stats, Recipe.paper(mlp=0.5, compensate=how)) for how in ("full", "mean", "none")]
    for full, mean, none in zip(*(plan.sites for plan in plans), strict=True):
        assert full.kept == mean.kept == none.kept
        assert full.costs[0].J < mean.costs[0].J < none.costs[0].J == none.costs[0].J_uncomp


def test_no_bias_means_no_intercept_unless_asked() -> None:
    model, data = build("no-biases"), images()
    stats = corp.calibrate(model, data)
    auto = corp.apply(model, stats, corp.plan(model, stats, Recipe.paper(mlp=0.5)))
    asked = corp.apply(model, stats, corp.plan(model, stats, Recipe.paper(mlp=0.5, intercept=True)))
    assert auto.model.blocks[0].mlp.fc2.bias is None
    assert asked.model.blocks[0].mlp.fc2.bias is not None
    assert asked.plan.sites[0].costs[0].J <= auto.plan.sites[0].costs[0].J


def test_ridge_zero_on_singular_data_is_an_error_with_the_site() -> None:
    model = build("vit")
    with pytest.raises(CorpError, match=r"blocks\.0\.mlp \(mlp, width 96\): .*raise the ridge"):
        corp.prune(model, [images()[0][:1]], Recipe.paper(mlp=0.5, ridge=0.0))


def test_plans_of_other_models_are_refused() -> None:
    model, data = build("vit"), images()
    stats = corp.calibrate(model, data)
    plan = corp.plan(model, stats, Recipe.paper(mlp=0.5))
    with pytest.raises(CorpError, match="other weights"):
        corp.apply(build("dinov2"), stats, plan)


def test_report_prints_and_serialises() -> None:
    result = corp.prune(build("vit"), images(), Recipe.paper(mlp=0.5, attn=0.5))
    text, content = str(result.report), result.report.to_dict()
    assert "blocks.0.mlp" in text
    assert "parameters" in text
    assert content["params"]["after"] < content["params"]["before"]
    assert {"rho2", "relative_error", "requested", "achieved"} <= content["sites"][0].keys()
    assert "blocks.0.mlp" in str(result.plan)
    assert "blocks.0.mlp" in str(corp.find_sites(vit()))


def test_random_state_is_left_as_found() -> None:
    model, data = build("vit"), images()
    before = torch.get_rng_state()
    corp.prune(model, data, Recipe.paper(mlp=0.5, attn=0.5))
    assert torch.equal(before, torch.get_rng_state())


def test_plans_of_one_calibration_do_not_disturb_each_other() -> None:
    """A plan carries its fits to apply; a later plan that keeps the same dimensions must not change what they mean."""
    model, data = vit().double(), images()
    stats = corp.calibrate(model, data)
    full, none = (corp.plan(model, stats, Recipe.paper(attn=0.5, compensate=how)) for how in ("full", "none"))
    assert [site.kept for site in full.sites] == [site.kept for site in none.sites]
    found = corp.apply(model, stats, full).model(data[0])
    again = corp.apply(model, corp.calibrate(model, data), as_saved(full)).model(data[0])
    torch.testing.assert_close(found, again, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(found, corp.apply(model, stats, none).model(data[0]))


# One prune: every long step once, every stage told, nothing changed silently.


def count_calls(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> list[str]:
    """Count the calls of a function of corp wherever it was imported; one entry per call."""
    calls: list[str] = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **options)

    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "corp" and vars(module).get(function.__name__) is function:
            monkeypatch.setattr(module, function.__name__, counted)
    return calls


@pytest.mark.parametrize("target", [{"target_macs": 0.7}, {"target_params": 0.8}, {"min_agreement": 0.95}])
def test_within_one_prune_everything_is_done_once(target: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (find_sites, fingerprint, count_budget, examine, site_curves)
    calls = {step.__name__: count_calls(monkeypatch, step) for step in steps}
    told = Recorder()
    result = corp.prune(build("vit"), images(10, 20), Recipe(**target), observer=told)
    assert {name: len(made) for name, made in calls.items()} == dict.fromkeys(calls, 1)
    assert "refit" in result.plan.why
    assert told.notes
    assert {site.name for site in result.plan.sites} <= set(told.sites)
    assert {"planning", "refitting", "trying widths", "error curves"} <= told.stages.keys()
    assert told.stages["calibrating on cpu"] == 200


def test_given_statistics_are_not_made_again() -> None:
    model, data, recipe = build("vit"), images(4, 20), Recipe(target_macs=0.7)
    stats = corp.calibrate(model, data)
    told = Recorder()
    given = corp.prune(model, data, recipe, stats=stats, observer=told)
    assert "calibrating on cpu" not in told.stages
    assert given.plan == corp.prune(model, data, recipe).plan


def test_batches_from_a_generator_lose_the_refit_with_a_warning() -> None:
    model, data = build("vit"), images()
    with pytest.warns(CorpWarning, match="was not refitted: the refit reads the data twice"):
        result = corp.prune(model, (batch for batch in data), Recipe(mlp=0.5))
    assert "refit" not in result.plan.why
    (note,) = result.plan.notes
    assert "give batches as a list or a loader" in note
    assert as_saved(result.plan).notes == [note]
    assert corp.prune(model, data, Recipe(mlp=0.5)).plan.notes == []
    with pytest.raises(CorpError, match="sequential=True: the refit reads the data twice"):
        corp.prune(model, (batch for batch in data), Recipe(mlp=0.5, sequential=True))


def test_statistics_alone_lose_the_refit_with_a_warning() -> None:
    model = build("vit")
    stats = corp.calibrate(model, images())
    with pytest.warns(CorpWarning, match="was not refitted: the refit reads the data itself"):
        assert corp.prune(model, None, Recipe(mlp=0.5), stats=stats).plan.notes


def test_a_share_that_rounding_undoes_is_told() -> None:
    model = vit(embed_dim=128, num_heads=2, depth=1, mlp_ratio=4.0)
    data = images(8, dtype=torch.float32)
    with pytest.warns(CorpWarning, match=r"blocks.0.attn keep.*58 would be rounded up"):
        result = corp.prune(model, data, Recipe(mlp=0.1, attn=0.1, sequential=False))
    assert [(site.name, site.keep) for site in result.plan.sites] == [("blocks.0.mlp", 464)]  # not 461
    exact = corp.prune(model, data, Recipe(mlp=0.1, attn=0.1, sequential=False, round_to=1))
    assert [site.keep for site in exact.plan.sites] == [58, 461]


def test_notes_are_warnings_at_the_callers_own_line() -> None:
    batches = (batch for batch in images(3))  # an iterator cannot be read twice, so there is no refit
    with pytest.warns(CorpWarning, match="was not refitted") as caught:
        corp.prune(build("vit"), batches, Recipe(mlp=0.5))
    assert all(warning.filename == __file__ for warning in caught if warning.category is CorpWarning)


def test_arguments_that_cannot_be_pruned_with_are_refused_with_the_reason() -> None:
    model, recipe = build("vit"), Recipe.paper(mlp=0.5)
    with pytest.raises(corp.CorpError, match=r"recipe must be a corp\.Recipe, not dict"):
        corp.prune(model, images(), {"mlp": 0.5})  # type: ignore[arg-type]
    with pytest.raises(corp.CorpError, match=r"expected a torch\.nn\.Module, got str"):
        corp.prune("vit", images(), recipe)  # type: ignore[arg-type]
    with pytest.raises(corp.CorpError, match=r"does not run on the first batch \(a uint8 tensor \(2, 3, 8, 8\)\)"):
        corp.prune(model, [torch.zeros(2, 3, 8, 8, dtype=torch.uint8)], recipe)
