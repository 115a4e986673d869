"""Queries and keys under QK-norm: tiny random Qwen3 and Gemma 3, whose narrower norms predict the length of a head."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import corp
from corp import CorpError, Recipe
from corp.calibration.settings import Settings
from corp.errors import CorpWarning
from corp.evaluate.check import check, require_equal
from corp.numerics.lengths import Length
from corp.planning.normed import LIMIT, require_lengths
from corp.planning.site_plan import GroupCost, HeadMaps
from corp.sites import AttentionSite
from corp.storage.export.possible import Exports
from corp.surgery.attention import narrow_queries, replace_attention
from corp.surgery.norms import NarrowNorm
from corp.surgery.self_check import require_agreement, verify
from corp.testing import check_model
from tests.helpers.kinds import by_kind
from tests.helpers.rotary_models import BASE, LAYERS, batches, calibrate, logits
from tests.helpers.seeds import seed_all

SIZE = {**BASE, "hidden_size": 64, "head_dim": 32, "max_position_embeddings": 64}
FAMILIES: dict[str, Any] = {
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZE)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZE, **LAYERS, query_pre_attn_scalar=32)),
}
OTHERS: dict[str, Any] = {"apertus": lambda: hf.ApertusForCausalLM(hf.ApertusConfig(**SIZE))}
FEW = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # few samples, on purpose


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def build(family: str, dtype: torch.dtype = torch.float64) -> Any:
    seed_all(1)
    model = {**FAMILIES, **OTHERS}[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtype)
            if parameter.dim() == 2 and "embed" not in name:  # random initialisation is tiny: logits must matter
                parameter.mul_(8)
            elif "q_norm" in name or "k_norm" in name:  # gains that differ within a pair
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


def norms(model: Any) -> list[NarrowNorm]:
    return [module for module in model.modules() if isinstance(module, NarrowNorm)]


def test_everything_is_found_and_nothing_refused(family: str) -> None:
    sites = corp.find_sites(build(family))
    assert (len(sites.mlp), len(sites.attention), len(sites.values), sites.refused) == (2, 2, 2, ())
    assert {(s.norm.q, s.norm.k) for s in sites.attention if s.norm} == {
        (f"model.layers.{i}.self_attn.q_norm", f"model.layers.{i}.self_attn.k_norm") for i in (0, 1)
    }
    assert len(sites.proven) == 6
    assert [site.window for site in sites.attention] == ([4, None] if family == "gemma3" else [None, None])


def test_a_norm_that_keeps_every_dimension_is_the_dense_one(family: str) -> None:
    dense, model = build(family), build(family)
    for site in corp.find_sites(model).attention:
        replace_attention(model, site, narrow_queries(model, site, [torch.arange(32)] * 2, None))
    assert len(norms(model)) == 4
    torch.testing.assert_close(logits(model, batches()[0]), logits(dense, batches()[0]), rtol=1e-5, atol=1e-6)
    assert corp.plan(dense, calibrate(dense, batches()), Recipe.paper(attn=0.0)).sites == ()


@FEW
@pytest.mark.parametrize("rank", by_kind(["combined", "exact"], ["exact"]))
def test_predicted_errors_are_the_measured_ones(family: str, rank: str) -> None:
    """Exactly but for the lengths, which are of first order: the whole agrees to a tenth."""
    model, data = build(family), batches(8, padded=family == "qwen3")
    result = corp.prune(model, data, Recipe.paper(mlp=0.25, attn=0.5, vo=0.25, rank=rank))
    checked = check(model, result.model, result.plan, data)
    require_equal(checked)
    for one in checked:
        tolerance = 0.1 if one.finding.kind == "attn" else 1e-4
        assert one.expected == pytest.approx(one.planned, rel=1e-4)
        assert one.measured == pytest.approx(one.expected, rel=tolerance)
        assert (one.finding.estimated > 0) == (one.finding.kind == "attn")


@FEW
def test_dimensions_that_carry_nothing_are_pruned_without_loss(family: str) -> None:
    model, data = build(family), batches()
    with torch.no_grad():
        for site in corp.find_sites(model).attention:
            for rows in (site.q, site.k):
                heads = model.get_submodule(rows.module).weight.unflatten(0, (-1, 2, 16))  # (heads, halves, pairs)
                heads[:, :, 1::2] = 0
    result = corp.prune(model, data, Recipe.paper(attn=0.5))
    assert {norm.gain.shape[1] for norm in norms(result.model)} == {16}
    assert max(site.length_error or 0 for site in result.plan.sites) < 1e-3
    torch.testing.assert_close(logits(result.model, data[0]), logits(model, data[0]), rtol=1e-4, atol=1e-5)


@FEW
def test_compensation_helps_and_pairs_are_turned_behind_the_norm(family: str) -> None:
    model, data = build(family), batches(8)
    stats = calibrate(model, data)
    plans = [corp.plan(model, stats, Recipe.paper(attn=0.5, compensate=how)) for how in ("full", "none")]
    assert plans[0].sites[0].relative_error < plans[1].sites[0].relative_error
    pruned = corp.apply(model, stats, plans[0]).model
    crossed = [norm.cross is not None and bool(norm.cross.abs().max() > 0) for norm in norms(pruned)]
    assert crossed == [True, False] * 2  # queries are corrected, keys are not


@FEW
def test_generation_is_the_same_with_a_cache_and_without(family: str) -> None:
    pruned = corp.prune(build(family), batches(), Recipe.paper(mlp=0.25, attn=0.5, vo=0.25)).model.float()
    prompt = torch.tensor([[7, 8, 9, 10, 11]])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = pruned.generate(prompt, **options)
    assert torch.equal(cached, pruned.generate(prompt, use_cache=False, **options))
    cache = pruned(prompt, use_cache=True).past_key_values
    assert cache.layers[0].keys.shape[-1] == 16


@FEW
def test_saved_models_come_back_bit_identical_and_are_not_narrowed_again(family: str, tmp_path: Path) -> None:
    model, data = build(family, torch.bfloat16), batches()
    result = corp.prune(model, data, Recipe.paper(mlp=0.25, attn=0.5, vo=0.25))
    corp.save(result, tmp_path / "out")
    loaded = corp.load(tmp_path / "out")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(loaded, data[1]), logits(result.model, data[1]))
    with pytest.raises(CorpError, match="narrowed already"):
        corp.prune(loaded, data, Recipe.paper(attn=0.5))
    again = corp.prune(loaded, data, Recipe.paper(mlp=0.5)).model
    assert torch.isfinite(logits(again, data[1])).all()


@FEW
def test_statistics_and_plans_survive_files(tmp_path: Path) -> None:
    model = build("qwen3")
    stats = calibrate(model, batches(8))
    stats.save(tmp_path / "stats")
    read = corp.Statistics.load(tmp_path / "stats")
    plans = [corp.plan(model, s, Recipe.paper(attn=0.5)) for s in (stats, read)]
    assert plans[0].to_dict() == plans[1].to_dict()
    plans[0].save(tmp_path / "plan.json")
    results = [corp.apply(model, stats, plan).model for plan in (plans[1], corp.Plan.load(tmp_path / "plan.json"))]
    assert torch.equal(*(logits(result, batches()[0]) for result in results))
    both = stats + read
    assert torch.equal(both.pairs_of("model.layers.0.self_attn").fit.lengths, 2 * _lengths(stats))


def _lengths(stats: corp.Statistics) -> Tensor:
    return stats.pairs_of("model.layers.0.self_attn").fit.lengths


def test_sums_are_those_of_the_queries_before_their_norm() -> None:
    model, data, seen = build("qwen3"), batches(2), []
    name = "model.layers.1.self_attn"
    hook = model.get_submodule(f"{name}.q_proj").register_forward_hook(lambda _m, _a, out: seen.append(out))
    for batch in data:
        logits(model, batch)
    hook.remove()
    total: Tensor = torch.zeros(4, 33, 33, dtype=torch.float64)
    for batch, out in zip(data, seen, strict=True):
        real = batch.get("attention_mask", torch.ones(5, 11)).bool()
        for h, q in enumerate(out[real].unflatten(-1, (4, 32)).unbind(1)):
            s = q.square().mean(1, keepdim=True) + model.config.rms_norm_eps
            f = torch.cat([q.square() / (32 * s), 1 / s], 1)
            total[h] += f.mT @ f
    sums = calibrate(model, data).pairs_of(name).total()
    torch.testing.assert_close(sums.lengths[:4], total)
    tokens = sums.lengths[4:, :, :].flatten(1) @ _ones(model).flatten()
    torch.testing.assert_close(tokens, torch.full((2,), float(sums.tokens), dtype=torch.float64))


def _ones(model: Any) -> Tensor:
    one = torch.ones(33, dtype=torch.float64)
    one[-1] = model.config.rms_norm_eps
    return torch.outer(one, one)  # every key has weight 1 on average


@FEW
def test_an_attention_keeps_as_much_as_its_lengths_need_and_says_so() -> None:
    model = build("qwen3")
    stats = calibrate(model, batches(8))
    with pytest.warns(CorpWarning, match=r"keeps \d+ of 32 dimensions per head instead of 4: .*QK-norm.* 10%"):
        plan = corp.plan(model, stats, Recipe.paper(attn=0.9))
    assert all(site.keep > 4 for site in plan.sites)
    assert all(0 < (site.length_error or 0) <= LIMIT for site in plan.sites)
    wide = corp.plan(model, stats, Recipe.paper(attn=0.25))
    assert wide.notes == []
    assert [site.keep for site in wide.sites] == [24, 24]


def test_pairs_chosen_for_all_layers_are_refused_above_the_limit() -> None:
    site = corp.find_sites(build("qwen3")).attention[0]
    cost = GroupCost(1, 1, 1, 0, 1, length=0.03)
    require_lengths(site, [cost])
    with pytest.raises(CorpError, match=r"predict only to 23% \(10% is the limit\).*rotary='free'.*skip="):
        require_lengths(site, [cost, dataclasses.replace(cost, length=0.23)])


@FEW
def test_the_self_check_notices_a_norm_that_was_changed() -> None:
    model = build("qwen3")
    stats = calibrate(model, batches(8))
    result = corp.apply(model, stats, corp.plan(model, stats, Recipe.paper(attn=0.5)))
    sites = corp.find_sites(model)
    for name in ("gain", "cross", "squares", "offset"):
        parameter = getattr(norms(result.model)[0], name)
        before = parameter.detach().clone()
        parameter.data *= 1.2
        with pytest.raises(CorpError, match="self-check"):
            require_agreement(verify(model, result.model, sites, stats, result.plan))
        parameter.data = before
    require_agreement(verify(model, result.model, sites, stats, result.plan))
    rows = result.model.get_submodule("model.layers.0.self_attn.q_proj").weight
    rows.data[[0, 1]] = rows.data[[1, 0]]  # as long as before, but not the rows that were kept
    with pytest.raises(CorpError, match="self-check"):
        require_agreement(verify(model, result.model, sites, stats, result.plan))


@FEW
def test_exports_that_cannot_predict_lengths_say_so(tmp_path: Path) -> None:
    model = build("qwen3", torch.float32)
    reasons = Exports(model).under(Recipe.paper(attn=0.5))
    assert "QK-norm" in str(reasons["hf"])
    assert "QK-norm" in str(reasons["compat"])
    assert reasons["pt2"] is None
    result = corp.prune(model, batches(), Recipe.paper(attn=0.5))
    for profile in ("standard", "compat"):
        with pytest.raises(CorpError, match=r"narrower under QK-norm.*attn=0"):
            corp.save(result, tmp_path / profile, profile=profile)
    others = corp.prune(model, batches(), Recipe.paper(mlp=0.5, vo=0.5, intercept=False))
    corp.save(others, tmp_path / "plain", profile="compat")
    plain = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(logits(plain, batches()[0]), logits(others.model, batches()[0]), rtol=1e-4, atol=1e-4)


@FEW
def test_compiled_models_compute_the_same() -> None:
    pruned = corp.prune(build("gemma3"), batches(), Recipe.paper(attn=0.5)).model
    compiled = torch.compile(pruned, backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, batches()[0]), logits(pruned, batches()[0]))


@FEW
def test_fitted_lengths_lose_much_less_than_plain_ones_where_heads_have_a_common_scale() -> None:
    """128-dimensional heads that lie mostly along one direction, by a factor that differs from token to token."""
    seed_all(2)
    size = {**SIZE, "head_dim": 128, "num_hidden_layers": 1}
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**size)).double().eval()
    with torch.no_grad():
        for site in corp.find_sites(model).attention:
            for rows in (site.q, site.k):
                weight = model.get_submodule(rows.module).weight
                heads = weight.unflatten(0, (-1, 128))  # (heads, d, D)
                along, of_token = torch.randn(len(heads), 128, 1).exp(), torch.randn(len(heads), 1, 64)
                heads.copy_(0.2 * torch.randn(heads.shape) + along * of_token)
    data = batches(8)
    stats = corp.calibrate(model, data, settings=Settings(tokens="all"))
    plan = corp.plan(model, stats, Recipe.paper(attn=0.5))
    fitted = corp.apply(model, stats, plan).model
    (site_plan,), (site,) = plan.sites, corp.find_sites(model).attention
    assert isinstance(site, AttentionSite)
    assert (site_plan.length_error or 1) < 0.02
    maps = site_plan.fold
    assert isinstance(maps, HeadMaps)
    assert maps.norm is not None
    plain = Length(torch.full((64,), 2.0).double(), torch.tensor(1e-6).double())  # the mean square of kept dimensions
    unfit = maps._replace(norm=maps.norm._replace(q=(plain,) * 4, k=(plain,) * 2))
    without = copy.deepcopy(model)
    replace_attention(without, site, narrow_queries(without, site, site_plan.indices(), unfit))
    errors = [float((logits(m, data[0]) - logits(model, data[0])).square().mean()) for m in (fitted, without)]
    assert errors[0] < 0.2 * errors[1]


@FEW
@pytest.mark.filterwarnings("ignore")  # transformers' own, about rope
def test_norms_of_other_families_are_known_by_what_they_compute() -> None:
    """EXAONE 4 does not rotate layers that see everything: those are refused, whatever their weights are."""
    kinds = ["sliding_attention", "full_attention"]
    mixed = hf.Exaone4Config(**SIZE, sliding_window=8, layer_types=kinds)
    everything: tuple[tuple[Any, Any, list[int]], ...] = (
        (hf.ApertusForCausalLM, hf.ApertusConfig(**SIZE), [0, 1]),
        (hf.Exaone4ForCausalLM, mixed, [0]),
        (hf.DogeForCausalLM, hf.DogeConfig(**SIZE), []),
        (hf.Olmo2ForCausalLM, hf.Olmo2Config(**SIZE), []),
    )
    for cls, config, layers in everything:
        seed_all(1)
        whole = cls(config)
        with torch.device("meta"):
            empty = cls(config)
        with torch.no_grad():
            zero = cls(config).apply(lambda module: [p.zero_() for p in module.parameters(recurse=False)])
        for model in (whole, empty, zero):  # loading finds the sites in models without weights
            sites = corp.find_sites(model)
            assert [site.name for site in sites.attention] == [f"model.layers.{i}.self_attn" for i in layers]
            assert [site.padded for site in sites.values] == [i not in layers for i in range(2)]


@FEW
@pytest.mark.filterwarnings("ignore")
def test_the_contract_holds_under_the_norm_of_another_family() -> None:
    check_model(build("apertus"), batches(), show=None).require()
