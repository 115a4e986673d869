"""Searches that measure: on data that calibration has not seen, and honest about what they found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import corp
from corp import CorpError, Recipe
from corp.calibration.batches import size_of
from corp.calibration.holdout import HeldBatches, HoldOut
from corp.calibration.hooks import removing
from corp.calibration.moments import Moments
from corp.errors import CorpWarning
from corp.io.observer import SILENT
from corp.measure.closeness import Closeness, Output, Reader, Reference, tensor_of
from corp.measure.intervals import Interval
from corp.sites import AttentionSite, MLPSite, Rows, ValueSite
from corp.steps.allocation import search, sensitivity, split, trials
from corp.steps.allocation.allocator import Allocator
from corp.steps.allocation.sensitivity import measure_sensitivities
from corp.steps.calibrate import run_calibration
from corp.steps.run import Dense, Run
from corp.surgery.apply import narrowed_copy
from tests.helpers import decoders
from tests.helpers.models import as_saved, batches, build
from tests.helpers.observers import Recorder

# Tiny models and little data: that fits overfit is said, and is not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")


def test_bisection_closes_in_and_asks_the_end_only_where_nothing_stops_it() -> None:
    asked = trials.bisect(lambda t: t >= 0.37, 0.2, 1.0, 8)
    assert min(t for t in asked if t >= 0.37) == pytest.approx(0.37, abs=0.8 / 2**7)
    assert len(asked) == 8
    assert trials.bisect(lambda t: True, 0.2, 1.0, 3) == pytest.approx([0.6, 0.4, 0.3, 0.2])
    assert trials.bisect(lambda t: False, 0.2, 1.0, 3) == pytest.approx([0.6, 0.8, 0.9])


@pytest.mark.parametrize("valley", [0.0, 0.1, 0.3, 0.5, 0.66, 0.9])
def test_climbing_finds_the_valley_to_within_a_step(valley: float) -> None:
    asked: list[float] = []

    def measure(x: float) -> float:
        asked.append(x)
        return (x - valley) ** 2

    found = trials.climb(measure, 0.5, 0.125, (0.0, 0.9))
    assert abs(found - valley) <= 0.125 / 2 + 1e-9
    assert len(asked) == len(set(asked)) <= 7


def held_of(count: int) -> list[int]:
    return [index for index in range(count) if HoldOut.of([None] * count).holds(index)]


def kept_of(data: Iterable[Tensor], samples: int) -> list[int]:
    """The numbers of the batches that a search of so many samples keeps, of two passes over the data."""
    held = HeldBatches(HoldOut.of(data), samples)
    for _ in range(2):
        for index, batch in enumerate(data):
            held.offer(index, batch)
    return [int(batch[0]) for batch in held.batches]


@pytest.mark.parametrize(
    ("count", "held"),
    [(1, []), (2, [1]), (3, [2]), (5, [3, 4]), (12, [10, 11]), (20, [17, 18, 19]), (40, [18, 19, 37, 38, 39])],
)
def test_held_out_batches_are_an_eighth_and_more_of_few_in_one_or_two_stretches(count: int, held: list[int]) -> None:
    assert held_of(count) == held
    assert HoldOut(count).share == len(held) / count
    assert kept_of([torch.full((4, 1), float(i)) for i in range(count)], 512) == held


def test_of_an_unknown_number_of_batches_every_eighth_is_held_out() -> None:
    rule = HoldOut.of(iter([None] * 20))
    assert [index for index in range(20) if rule.holds(index)] == [1, 9, 17]
    assert rule.share == 1 / 8
    held = HeldBatches(rule, 8)
    held.collect(torch.full((4, 1), float(i)) for i in range(20))
    assert [int(batch[0]) for batch in held.batches] == [1, 9]


def test_of_much_data_no_more_is_kept_than_is_needed_and_that_is_spread() -> None:
    data = [torch.full((4, 1), float(i)) for i in range(160)]
    assert held_of(160) == [*range(70, 80), *range(150, 160)]
    assert kept_of(data, 8) == [70, 150]
    assert kept_of(data, 9) == [70, 76, 153]
    assert kept_of(data, 4 * 20) == held_of(160)


@pytest.mark.parametrize(("answers", "samples"), [(1, 128), (32, 128), (64, 64), (256, 16), (512, 8), (4096, 8)])
def test_of_texts_fewer_are_held_out_because_every_token_is_an_answer(answers: int, samples: int) -> None:
    assert search.samples_needed(Recipe(target_macs=0.5), answers) == samples


def test_calibration_keeps_the_batches_that_a_search_needs_and_fits_without_them() -> None:
    """Statistics tell the fitted batches from the held-out ones, which are those that the search is given."""
    model, data = build("vit"), batches("vit", 6, 10)
    held = held_of(6)
    whole, without = (
        corp.calibrate(model, data),
        corp.calibrate(model, [x for i, x in enumerate(data) if i not in held]),
    )
    for name, sums in without.sums.items():
        if isinstance(sums.total(), Moments):
            torch.testing.assert_close(whole.fitted().moments_of(name).total().cov(), sums.total().cov())


def test_a_text_has_an_answer_at_every_token_and_an_image_has_one() -> None:
    texts = decoders.batches()
    assert (
        Run(texts, None, None, None, SILENT).answers(Dense.of(decoders.build("llama")).sites)
        == texts[0]["input_ids"].shape[1]
    )
    assert Run(batches("vit"), None, None, None, SILENT).answers(Dense.of(build("vit")).sites) == 1


def test_the_dense_outputs_of_held_out_batches_are_read_while_calibration_runs() -> None:
    model, data = build("vit"), batches("vit", 6, 10)
    held = HeldBatches(HoldOut.of(data), 128, Reader.of(model, 128))
    run = Run(data, None, None, None, SILENT)
    run_calibration(Dense.of(model, None, run), run, held=held)
    assert [int(size_of(batch)) for batch in held.batches] == [10, 10]
    again: list[Any] = []
    with removing([model.register_forward_hook(lambda *_: again.append(1))]):
        known = Reference(model, held.batches, reader=held.reader, known=held.outputs)
        assert not again
        fresh = Reference(model, held.batches, reader=held.reader)
        assert len(again) == 2
    assert all(torch.equal(a.values, b.values) for a, b in zip(known.outputs, fresh.outputs, strict=True))
    assert known.compare(model).divergence().value == 0


def test_outputs_that_cannot_be_compared_are_left_for_the_search_to_refuse() -> None:
    assert Reader(False, 8).read_if_possible(torch.zeros(2, 3), torch.zeros(2, 1)) is None
    with pytest.raises(CorpError, match="one number per sample"):
        Reader(False, 8).read(torch.zeros(2, 3), torch.zeros(2, 1))


def test_logits_of_skipped_positions_are_not_kept_in_memory() -> None:
    logits = torch.randn(2, 64, 5)
    output = Reader(False, 1 << 25).read({}, SimpleNamespace(logits=logits))
    assert torch.equal(output.values, logits[:, ::4])
    assert output.values.untyped_storage().nbytes() == 2 * 16 * 5 * 4


def test_a_generator_is_read_once_and_split() -> None:
    read: list[int] = []

    def once() -> Iterator[Tensor]:
        for number, batch in enumerate(batches("vit", 10, 8)):
            read.append(number)
            yield batch

    result = corp.prune(build("vit"), once(), Recipe.paper(target_macs=0.7, allocate="gain"))
    assert read == list(range(10))
    assert (result.plan.samples, result.plan.why["split"]["samples"]) == (80, 16)  # batches 1 and 9


def test_agreement_of_classes_is_counted() -> None:
    dense = torch.eye(4).repeat(5, 1) * 3  # 20 samples
    other = dense.clone()
    other[:4] = dense[:4].roll(1, dims=1)
    found = Closeness()
    found.add(other, dense, None, answers=True)
    assert found.agreement().value == pytest.approx(0.8)
    log_p, log_q = dense.log_softmax(1).double(), other.log_softmax(1).double()
    expected = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    assert found.divergence().value == pytest.approx(float(expected), rel=1e-6)
    assert "class" in found.what


def test_agreement_of_tokens_leaves_padding_out() -> None:
    dense = torch.randn(3, 5, 7)
    other, mask = dense.clone(), torch.ones(3, 5)
    mask[:, 3:] = 0
    other[:, 3:] = -dense[:, 3:]
    found = Closeness()
    found.add(other, dense, mask, answers=True)
    assert (found.agreement().value, found.divergence().value) == (1.0, pytest.approx(0.0, abs=1e-7))
    found.add(-dense, dense, None, answers=True)
    assert found.agreement().value < 0.9
    assert "token" in found.what


def test_agreement_of_features_is_the_cosine_of_pooled_tokens() -> None:
    dense, mask = torch.randn(4, 6, 8, dtype=torch.float64), torch.ones(4, 6)
    mask[:, 4:] = 0
    other = dense + 0.3 * torch.randn_like(dense)
    found = Closeness()
    found.add(other, dense, mask, answers=False)
    x, y = other[:, :4].mean(1), dense[:, :4].mean(1)
    assert found.agreement().value == pytest.approx(float(torch.cosine_similarity(x, y).mean()))
    assert found.divergence().value == pytest.approx(float(((x - y).square().sum(1) / y.square().sum(1)).mean()))


def test_outputs_are_told_apart() -> None:
    logits, hidden = torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)
    assert tensor_of(SimpleNamespace(loss=None, logits=logits))[1] is True
    assert tensor_of({"last_hidden_state": hidden, "pooler_output": None})[0] is hidden
    assert tensor_of(torch.zeros(2, 4))[1] is True
    assert tensor_of(hidden)[1] is False
    assert tensor_of((torch.zeros(2, dtype=torch.long), hidden)) == (hidden, False)
    with pytest.raises(CorpError, match="forward="):
        tensor_of(None)


def test_one_number_per_sample_has_no_answers_and_timm_backbones_have_features() -> None:
    model = build("vit")
    images = batches("vit", 1, 4)
    with pytest.raises(CorpError, match="one number per sample"):
        Reference(model, images, lambda m, x: m(x)[:, :1])
    model.reset_classifier(0)
    assert Reference(model, images).compare(model).what.startswith("mean cosine")


def agreement(model: torch.nn.Module, dense: torch.nn.Module, data: list[Tensor]) -> float:
    with torch.no_grad():
        return float(torch.cat([model(x).argmax(1) == dense(x).argmax(1) for x in data]).double().mean())


def test_pruning_goes_as_far_as_agreement_allows() -> None:
    model, data = build("vit"), batches("vit", 10, 20)
    told = Recorder()
    result = corp.prune(model, data, Recipe(min_agreement=0.95, sequential=False), observer=told)
    why = result.plan.why["agreement"]
    held = [data[i] for i in held_of(len(data))]
    assert (why["samples"], result.plan.samples) == (20 * len(held), 200)
    chosen = next(step for step in why["steps"] if step["target_macs"] == why["chosen"])
    assert chosen["agreement"] >= 0.95
    # The model that was tried was fitted without the held-out batches; the result is fitted to all.
    fitted = corp.calibrate(model, data).fitted()
    tried = corp.apply(model, fitted, corp.plan(model, fitted, result.plan.recipe)).model
    assert chosen["agreement"] == pytest.approx(agreement(tried, model, held), abs=0.05)
    assert chosen["low"] < chosen["agreement"] < chosen["high"]
    # Everything lighter that was tried would have done, nothing heavier.
    assert all((step["agreement"] >= 0.95) == (step["target_macs"] >= why["chosen"]) for step in why["steps"])
    dense, pruned = result.report.macs
    assert pruned / dense <= why["chosen"] < 0.95
    assert result.plan.recipe.target_macs == why["chosen"]
    assert len(told.notes) == len(why["steps"])
    assert result.report.to_dict()["why"] == result.plan.why


def test_operations_are_counted_through_the_users_own_forward() -> None:
    model, data = build("vit"), batches("vit", 6, 10)
    recipe = Recipe.paper(min_agreement=0.5)
    for given, searched in ((iter(data), "target_params"), (data, "target_macs")):
        result = corp.prune(model, given, recipe, forward=lambda m, x: m(x))
        assert searched in result.plan.why["agreement"]["steps"][0]


@pytest.mark.parametrize("agreement", [0.3, 1.0])
def test_what_cannot_be_had_and_what_never_stops_are_said(agreement: float, monkeypatch: pytest.MonkeyPatch) -> None:
    class Always:
        def __init__(self, *_: Any, **_known: Any) -> None: ...

        def compare(self, _model: Any, _rival: Any = None) -> Any:
            return SimpleNamespace(agreement=lambda: Interval(agreement, agreement, agreement), what="all of it")

    monkeypatch.setattr(search, "Reference", Always)
    model, data = build("vit"), batches("vit", 4, 10)
    recipe = Recipe.paper(min_agreement=0.9, allocate="uniform")
    if agreement < 0.9:
        with pytest.raises(CorpError, match=r"out of reach: target_macs=0.98\d, the lightest one tried, gives 0.300"):
            corp.prune(model, data, recipe)
    else:
        with pytest.warns(CorpWarning, match="the strongest pruning possible"):
            result = corp.prune(model, data, recipe)
        assert {site.keep for site in result.plan.sites} == {1}


def test_agreement_needs_data_to_measure_on() -> None:
    model, data = build("vit"), batches("vit", 2, 10)
    recipe = Recipe.paper(min_agreement=0.9)
    with pytest.raises(CorpError, match=r"corp.prune\(model, batches, recipe\)"):
        corp.plan(model, corp.calibrate(model, data), recipe)
    with pytest.raises(CorpError, match="at least two"):
        corp.prune(model, data[:1], recipe)
    with pytest.raises(CorpError, match=r"min_agreement is measured on the data.*give batches"):
        corp.prune(model, None, recipe, stats=corp.calibrate(model, data))
    with pytest.raises(CorpError, match="not both"):
        Recipe.paper(min_agreement=0.9, target_macs=0.5)
    with pytest.raises(CorpError, match="0 < min_agreement <= 1"):
        Recipe.paper(min_agreement=95)


def kl(model: torch.nn.Module, dense: torch.nn.Module, data: list[Tensor]) -> float:
    with torch.no_grad():
        p, q = (torch.cat([m(x) for x in data]).log_softmax(1) for m in (dense, model))
    return float((p.exp() * (p - q)).sum(1).mean())


def test_the_split_that_is_taken_is_the_best_that_was_tried_or_nearly_so_and_more_even() -> None:
    model, data = build("vit"), batches("vit", 10, 20)
    recipe = Recipe(target_macs=0.7, sequential=False)
    result = corp.prune(model, data, recipe)
    why, taken = result.plan.why["split"], result.plan.why["allocation"]
    told = ("queries", "power", "measured", "spread")
    (best,) = [one for one in why["tried"] if [one.get(key) for key in told] == [taken.get(key) for key in told]]
    assert best["divergence"] <= split.EVENER * split.CLOSER * min(one["divergence"] for one in why["tried"])
    assert any("measured" in one for one in why["tried"])
    assert len({one["queries"] for one in why["tried"] if "queries" in one}) > 1
    assert [one for one in why["tried"] if "queries" not in one] == [one for one in why["tried"] if "allocate" in one]
    assert "measured" in why["tried"][0]  # the usual way, so the others end early
    assert {key: why["tried"][0][key] for key in why["rule"]} == why["rule"]  # the search starts from the rule
    assert result.report.macs[1] <= 0.7 * result.report.macs[0]
    # What was tried was fitted without the held-out batches, and without the exact steps of the subspaces.
    fitted = corp.calibrate(model, data).fitted()
    tried = narrowed_copy(model, corp.find_sites(model), as_saved(result.plan), fitted)
    held = [data[i] for i in held_of(len(data))]
    assert kl(tried, model, held) == pytest.approx(best["divergence"], rel=0.1)


def test_a_sensitivity_is_how_far_the_output_moves_if_one_site_alone_is_narrower() -> None:
    model, data = build("vit"), batches("vit", 10, 20)
    made = Allocator(model, corp.find_sites(model), corp.calibrate(model, data), Recipe(target_macs=0.7))
    watch = Recorder()
    made.observer = watch
    reference = Reference(model, data)
    measured = measure_sensitivities(trials.Trials(made, made.recipe, reference, 200, lambda _n: None), 0.5)
    found = measured.rates
    assert measured.answers == min(200, sensitivity.SAMPLES)
    assert not measured.precise
    assert set(found) == set(made.curves())
    assert "sensitivities" in watch.stages
    tried = sensitivity.tried_alone([made.sites[name] for name in made.curves()])
    assert {made.sites[name].kind for name in tried} == {"mlp", "vo"}
    for name, rate in found.items():
        kind = made.sites[name].kind
        others = [site.name for site in made.sites if site.name != name]
        alone = Recipe(overrides={name: {kind: 0.5}}, sequential=False, skip=others)
        pruned = corp.apply(model, made.stats, corp.plan(model, made.stats, alone))
        keep = pruned.plan.sites[0].keep
        moved = kl(pruned.model, model, [torch.cat(data)[: sensitivity.SAMPLES]])
        assert rate * float(made.curves()[name].errors[keep]) == pytest.approx(moved, rel=1e-3)


def mlp_site(name: str) -> MLPSite:
    return MLPSite(name, (Rows(f"{name}.up", 0, 8),), f"{name}.down")


def test_of_a_long_chain_some_sites_are_tried_and_the_others_get_what_lies_between() -> None:
    towers = {tower: [f"{tower}.{i}.mlp" for i in range(40)] for tower in ("text", "image")}
    sites = [mlp_site(name) for name in (*towers["text"], *towers["image"], "pool.mlp")]
    tried = sensitivity.tried_alone(sites)
    assert len(tried) == 2 * sensitivity.MOST + 1
    shorter = {n: len(sensitivity.tried_alone([mlp_site(f"blocks.{i}.mlp") for i in range(n)])) for n in (8, 12, 24)}
    assert shorter == {8: 8, 12: 8, 24: 12}
    assert {"text.0.mlp", "text.39.mlp", "image.0.mlp", "image.39.mlp", "pool.mlp"} <= set(tried)
    rates = {name: 0.9**i * (1 if tower == "text" else 100) for tower in towers for i, name in enumerate(towers[tower])}
    rates["pool.mlp"] = 7.0
    found = sensitivity.filled(sites, {name: rates[name] for name in tried})
    assert found == pytest.approx(rates)
    del rates["text.0.mlp"]  # a site without an error to measure: as its neighbour
    short = sensitivity.filled(sites, {name: rates[name] for name in tried if name in rates})
    assert short["text.1.mlp"] == pytest.approx(rates[tried[1]])


def test_values_inside_a_chain_get_the_rate_of_the_mlp_in_their_block() -> None:
    model = timm.create_model("test_vit", depth=4)
    sites = [site for site in corp.find_sites(model) if not isinstance(site, AttentionSite)]
    tried = sensitivity.tried_alone(sites)
    values = [site.name for site in sites if isinstance(site, ValueSite)]
    mlps = [site.name for site in sites if isinstance(site, MLPSite)]
    assert set(tried) == {values[0], values[3], *mlps}
    rates = {name: float(number + 1) for number, name in enumerate(tried)}
    found = sensitivity.filled(sites, rates)
    assert [found[name] for name in values] == [rates[values[0]], rates[mlps[1]], rates[mlps[2]], rates[values[3]]]
    del rates[mlps[1]]  # an MLP without an error to measure: its values get what lies between its neighbours
    between = (rates[mlps[0]] * rates[mlps[2]]) ** 0.5
    assert sensitivity.filled(sites, rates)[values[1]] == pytest.approx(between)
    alone = [site for site in sites if isinstance(site, ValueSite)]  # of MLPs that the recipe skips
    assert sensitivity.tried_alone(alone) == values


def test_a_map_has_an_answer_at_every_place() -> None:
    assert Output(torch.zeros(2, 3, 4, 5), None, answers=False).each == 20
    assert Output(torch.zeros(2, 7, 5), None, answers=True).each == 7
    assert Output(torch.zeros(2, 7, 5), None, answers=False).each == 1  # pooled over tokens


def test_few_samples_of_a_reference_compare_the_same_outputs() -> None:
    model, data = build("vit"), batches("vit", 3, 20)
    other = corp.prune(model, data, Recipe(mlp=0.5, sequential=False)).model
    few = Reference(model, data).few(answers=1000, samples=25)
    assert [len(batch) for batch in few.batches] == [20, 5]
    assert few.compare(other).divergence().value == pytest.approx(kl(other, model, [torch.cat(data)[:25]]), rel=1e-5)
    texts = decoders.batches()
    length = texts[0]["input_ids"].shape[1]
    some = Reference(decoders.build("llama"), texts).few(answers=3 * length - 1, samples=25)
    assert [len(batch["input_ids"]) for batch in some.batches] == [3]
    assert (few.answers, some.answers) == (25, 3 * length)


def test_trials_leave_nothing_behind_for_the_plan() -> None:
    """The result is what applying its plan, as it is saved, to fresh statistics gives."""
    model, data = build("vit"), batches("vit", 4, 20)
    found = corp.prune(model, data, Recipe(target_macs=0.7, sequential=False))
    again = corp.apply(model, corp.calibrate(model, data), as_saved(found.plan))
    x = data[0]
    with torch.no_grad():
        torch.testing.assert_close(found.model(x), again.model(x), rtol=1e-9, atol=1e-9)


def test_where_queries_are_told_nothing_is_tried_for_them() -> None:
    model, data = build("vit"), batches("vit", 4, 20)
    recipe = Recipe(target_macs=0.7, overrides={"*.attn": {"attn": 0.25}})
    result = corp.prune(model, data, recipe)
    assert len({one["queries"] for one in result.plan.why["split"]["tried"] if "queries" in one}) == 1


def test_one_width_for_all_layers_is_split_between_mlps_and_heads_by_trials() -> None:
    recipe = Recipe(target_params=0.85, allocate="uniform", rotary="shared", equal_heads=True, output=0.0)
    result = corp.prune(decoders.build("llama"), decoders.batches(), recipe)
    widths = {kind: {site.keep for site in result.plan.sites if site.kind == kind} for kind in ("mlp", "attn", "vo")}
    assert all(len(kept) <= 1 for kept in widths.values())
    assert widths["attn"] == widths["vo"]
    tried = result.plan.why["split"]["tried"]
    assert len(tried) > 1
    chosen = min(tried, key=lambda one: one["divergence"])
    assert result.plan.why["allocation"]["queries"] == pytest.approx(chosen["queries"])
    paper = corp.prune(decoders.build("llama"), decoders.batches(), Recipe.paper(target_params=0.85))
    assert "split" not in paper.plan.why


def test_trials_keep_the_pairs_that_the_result_keeps() -> None:
    model, recipe = decoders.build("llama"), Recipe(attn=0.5, rotary="shared", sequential=False)
    stats = corp.calibrate(model, decoders.batches())
    allocator = Allocator(model, corp.find_sites(model), stats, recipe)
    tried: Any = trials.sketch_model(allocator, recipe, allocator.allocate(recipe))
    made: Any = corp.apply(model, stats, corp.plan(model, stats, recipe)).model
    for one, other in zip(tried.model.layers, made.model.layers, strict=True):
        assert torch.equal(one.self_attn.frequencies, other.self_attn.frequencies)
        assert torch.equal(one.self_attn.frequencies[0], tried.model.layers[0].self_attn.frequencies[0])


def test_a_trial_ends_once_it_lags_behind_the_best_and_is_judged_by_the_samples_that_both_saw() -> None:
    model, data = build("vit"), batches("vit", 4, 20)
    good, bad = (corp.prune(model, data, Recipe(mlp=share, sequential=False)).model for share in (0.1, 0.8))
    reference = Reference(model, data)
    best, whole, early = (
        reference.compare(good),
        reference.compare(bad),
        reference.compare(bad, reference.compare(good)),
    )
    assert (len(best.each), len(whole.each), len(early.each)) == (4, 4, 1)
    gap = kl(bad, model, data[:1]) - kl(good, model, data[:1])
    assert early.divergence(best).value == pytest.approx(kl(good, model, data) + gap, rel=1e-6)
    assert early.divergence(best).value == pytest.approx(whole.divergence().value, rel=0.3)
    # One that keeps up is compared on all samples.
    again = reference.compare(good, best)
    assert len(again.each) == 4
    assert again.divergence(best) == best.divergence()
