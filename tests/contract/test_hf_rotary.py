"""Rotary decoders: Llama and its kin, on tiny random models. Logits are read where the library computes them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import corp
from corp import CorpError, Recipe
from corp.adapters import hf_models
from corp.calibration.grams import CAUSAL_BLOCKS
from corp.calibration.settings import Settings
from corp.sites import AttentionSite
from corp.surgery.hf_attention import NarrowAttention
from tests.helpers.kinds import ROTARY, by_kind
from tests.helpers.rotary_models import BASE, FAMILIES, PARTIAL, batches, build, calibrate, data_for, logits
from tests.helpers.seeds import seed_all


@pytest.fixture(params=by_kind(FAMILIES, [*ROTARY, "gemma2"]))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@contextmanager
def seen_logits(model: Any) -> Iterator[list[tuple[Any, Tensor, Tensor]]]:
    """(module, q, k) of every attention call, as they reach the library's own attention function."""
    calls: list[tuple[Any, Tensor, Tensor]] = []
    library = sys.modules[type(model).__module__]
    real = library.eager_attention_forward

    def recording(module: Any, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append((module, q, k))
        return real(module, q, k, *args, **kwargs)

    library.eager_attention_forward = recording
    kernel, model.config._attn_implementation = model.config._attn_implementation, "eager"
    try:
        yield calls
    finally:
        library.eager_attention_forward = real
        model.config._attn_implementation = kernel


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_is_found_and_nothing_refused(family: str) -> None:
    sites = corp.find_sites(build(family))
    assert (len(sites.mlp), len(sites.attention), sites.refused) == (2, 2, ())
    assert all(site.causal and site.rotary and site.width == 8 for site in sites.attention)
    grouped = family not in ("gpt-neox", "llama-ungrouped-tied")
    assert {site.groups for site in sites.attention} == {2 if grouped else 4}
    assert {site.plain_width for site in sites.attention} == {4 if family in ("phi", "gpt-neox") else 0}
    windows = {"mistral-window": [4, 4], "qwen2": [4, None], "gemma2": [4, None]}
    assert [site.window for site in sites.attention] == windows.get(family, [None, None])


def test_predicted_distortion_of_logits_equals_the_measured_one(family: str) -> None:
    """Of the logits that exist: rotated dimensions exactly, others up to blocks of queries."""
    model, data = build(family), data_for(family)
    stats = calibrate(model, data)
    plan = corp.plan(model, stats, Recipe.paper(attn=0.5, ridge=1e-2))
    assert len(plan.sites) == 2
    for planned in plan.sites:
        pruned = corp.apply(model, stats, dataclasses.replace(plan, sites=(planned,))).model
        site = corp.find_sites(model)[planned.name]
        assert isinstance(site, AttentionSite)
        measured = sum(_errors(model, pruned, site, batch) for batch in data)
        for cost, value in zip(planned.costs, measured, strict=True):
            assert pytest.approx(float(value), rel=1e-6) == cost.J


def _errors(model: Any, pruned: Any, site: AttentionSite, batch: dict[str, Tensor]) -> Tensor:
    """(K,) squared errors, summed over the query heads that share a key head."""
    parts = []
    for which in (model, pruned):
        with seen_logits(which) as calls:
            logits(which, batch)
        attention = which.get_submodule(site.name)
        q, k = next((q, k) for module, q, k in calls if module is attention)
        k = k.repeat_interleave(site.heads // site.groups, dim=1)
        rotated = attention.rotary_width if isinstance(attention, NarrowAttention) else site.rotary_dims
        parts.append([q[..., s] @ k[..., s].mT for s in (slice(0, rotated), slice(rotated, None))])
    n = batch["input_ids"].shape[1]
    real = batch.get("attention_mask", torch.ones(5, n)).bool()
    exact = torch.ones(n, n, dtype=torch.bool).tril()
    if site.window is not None:
        exact &= torch.ones(n, n, dtype=torch.bool).triu(1 - site.window)
    total: Tensor = torch.zeros(())
    for number, (dense, narrow) in enumerate(zip(*parts, strict=True)):
        for b in range(len(real)):
            tokens = real[b].nonzero().squeeze(1)
            error = (dense - narrow)[b][:, tokens][:, :, tokens].square()  # (H, n, n)
            seen = exact[tokens][:, tokens] if number == 0 else _blocks(len(tokens))
            total = total + (error * seen).sum((1, 2))
    return total.unflatten(0, (site.groups, -1)).sum(1)


def _blocks(n: int) -> Tensor:
    seen, end = torch.zeros(n, n, dtype=torch.bool), 0
    for block in torch.arange(n).tensor_split(min(n, CAUSAL_BLOCKS)):
        end += len(block)
        seen[block, :end] = True
    return seen


@pytest.mark.parametrize("rank", ["combined", "exact"])
def test_dimensions_that_carry_nothing_are_pruned_without_loss(family: str, rank: str) -> None:
    model, data = build(family), data_for(family)
    with torch.no_grad():
        for site in corp.find_sites(model).attention:
            for rows in (site.q, site.k):
                module: Any = model.get_submodule(rows.module)
                heads = module.weight[rows.index].unflatten(0, (-1, 8))
                for dims in (slice(1, 4, 2), slice(5, 8, 2)):  # every other pair, or plain dimension
                    heads[:, dims] = 0
                module.weight[rows.index] = heads.flatten(0, 1)
                if module.bias is not None:
                    bias = module.bias[rows.index].unflatten(0, (-1, 8))
                    bias[:, 1::2] = 0
                    module.bias[rows.index] = bias.flatten()
    stats = calibrate(model, data)
    pruned = corp.apply(model, stats, corp.plan(model, stats, Recipe.paper(attn=0.5, rank=rank))).model
    assert all(m.qk_dim == 4 for m in pruned.modules() if isinstance(m, NarrowAttention))
    torch.testing.assert_close(logits(pruned, data[1]), logits(model, data[1]))


@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # few samples, on purpose
def test_compensation_and_exact_choice_help(family: str) -> None:
    model, data = build(family), data_for(family, 8)
    stats = calibrate(model, data)
    recipes = {
        "none": Recipe.paper(attn=0.5, compensate="none"),
        "full": Recipe.paper(attn=0.5),
        "mlp": Recipe.paper(mlp=0.5),
        "exact mlp": Recipe.paper(mlp=0.5, rank="exact"),
    }
    cost = {name: sum(site.costs[0].J for site in corp.plan(model, stats, r).sites) for name, r in recipes.items()}
    assert cost["full"] < cost["none"]
    assert cost["exact mlp"] <= cost["mlp"]


@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # few samples, on purpose
def test_the_ranking_of_mlp_channels_does_not_concern_the_default_choice_of_pairs(family: str) -> None:
    model, data = build(family), data_for(family)
    stats = calibrate(model, data)
    plans = [corp.plan(model, stats, Recipe(mlp=0.5, attn=0.5, rank=rank)) for rank in ("exact", "combined")]
    first, second = ([site for site in plan.sites if site.kind == "attn"] for plan in plans)
    assert [(site.kept, site.costs) for site in first] == [(site.kept, site.costs) for site in second]
    assert [site.kept for site in plans[0].sites] != [site.kept for site in plans[1].sites]


def test_generation_is_the_same_with_a_cache_without_and_in_padded_batches(family: str) -> None:
    model = build(family)
    pruned = corp.prune(model, data_for(family), Recipe.paper(mlp=0.25, attn=0.5)).model.float()
    prompt = torch.tensor([[7, 8, 9, 10, 11]])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = pruned.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert torch.equal(
        cached, pruned.generate(prompt, attention_mask=torch.ones_like(prompt), use_cache=False, **options)
    )
    ids = torch.cat([torch.tensor([[0, 0]]), prompt], 1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    both = pruned.generate(
        torch.cat([ids, ids.flip(1)]), attention_mask=torch.cat([mask, torch.ones_like(mask)]), **options
    )
    assert torch.equal(both[0, 2 : 2 + cached.shape[1]], cached[0])
    sampled = pruned.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=True, pad_token_id=0
    )
    assert sampled.shape == (1, 8)


def test_the_cache_holds_keys_of_the_true_width() -> None:
    pruned = corp.prune(build("llama"), batches(), Recipe.paper(attn=0.5)).model
    cache = pruned(**batches()[0], use_cache=True).past_key_values
    assert (cache.layers[0].keys.shape[-1], cache.layers[0].values.shape[-1]) == (4, 8)


def test_sdpa_and_eager_agree_on_padded_batches(family: str) -> None:
    pruned = corp.prune(build(family), data_for(family), Recipe.paper(mlp=0.25, attn=0.5)).model.float()
    found = []
    for kernel in ("eager", "sdpa") if family != "gemma2" else ("eager", "eager"):  # sdpa knows no soft-capping
        pruned.set_attn_implementation(kernel)
        found.append(logits(pruned, batches()[1])[batches()[1]["attention_mask"].bool()])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_saved_models_come_back_bit_identical(family: str, tmp_path: Path) -> None:
    model = build(family, torch.bfloat16)
    result = corp.prune(model, data_for(family), Recipe.paper(mlp=0.25, attn=0.5))
    assert {p.dtype for p in result.model.parameters()} == {torch.bfloat16}
    corp.save(result, tmp_path / "out")
    assert torch.equal(logits(corp.load(tmp_path / "out"), batches()[1]), logits(result.model, batches()[1]))


def test_statistics_survive_a_folder(tmp_path: Path) -> None:
    model = build("phi")
    stats = calibrate(model, batches())
    stats.save(tmp_path / "stats")
    recipe = Recipe.paper(mlp=0.25, attn=0.5)
    plans = [corp.plan(model, s, recipe).to_dict() for s in (stats, corp.Statistics.load(tmp_path / "stats"))]
    assert plans[0] == plans[1]


def test_compiled_models_compute_the_same() -> None:
    pruned = corp.prune(build("llama"), batches(), Recipe.paper(mlp=0.25, attn=0.5)).model
    expected = logits(pruned, batches()[0])
    compiled = torch.compile(pruned, backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, batches()[0]), expected)


REFUSED: dict[str, Any] = {
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**BASE)),
    "phi-norm": lambda: hf.PhiForCausalLM(hf.PhiConfig(**BASE, **PARTIAL, qk_layernorm=True)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_qk_norm_is_refused_with_the_reason_and_the_mlp_pruned(name: str) -> None:
    seed_all(0)
    model, data = REFUSED[name]().double().eval(), batches()
    with pytest.raises(CorpError, match="QK-norm divides by the length of the whole head"):
        corp.prune(model, data, Recipe.paper(mlp=0.5, attn=0.5))
    result = corp.prune(model, data, Recipe.paper(mlp=0.5, vo=0.5))
    assert len(result.plan.sites) == 4
    assert torch.isfinite(logits(result.model, data[1])).all()


def test_narrowed_rotary_attention_is_not_narrowed_again() -> None:
    pruned = corp.prune(build("llama"), batches(), Recipe.paper(attn=0.5)).model
    with pytest.raises(CorpError, match="cannot prune"):
        corp.prune(pruned, batches(), Recipe.paper(attn=0.5))
    again = corp.prune(pruned, batches(), Recipe.paper(mlp=0.5))
    assert torch.isfinite(logits(again.model, batches()[0])).all()


@pytest.mark.filterwarnings("ignore")  # transformers' own, about rope
def test_attention_sinks_are_kept_and_packed_experts_taken() -> None:
    model = hf.GptOssForCausalLM(hf.GptOssConfig(**BASE, num_local_experts=2, num_experts_per_tok=1))
    sites = corp.find_sites(model)
    assert not sites.refused
    assert len(sites.mlp) == 4  # two experts in each of two layers
    assert len(sites.attention) == len(sites.values) == 2  # sinks stay as they are


def test_sharded_half_precision_checkpoints_are_read_and_keep_their_dtype(tmp_path: Path) -> None:
    build("llama", torch.bfloat16).save_pretrained(tmp_path / "dense", max_shard_size="20KB")
    assert len(list((tmp_path / "dense").glob("*.safetensors"))) > 1
    model = hf_models.create(str(tmp_path / "dense"))
    result = corp.prune(model, batches(), Recipe.paper(mlp=0.25, attn=0.5))
    corp.save(result, tmp_path / "pruned")
    loaded = corp.load(tmp_path / "pruned")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(loaded, batches()[1]), logits(result.model, batches()[1]))


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_layers_that_visit_the_device_one_by_one_give_the_same_statistics(place: str) -> None:
    model, data = build("phi"), batches()
    recipe = Recipe.paper(mlp=0.25, attn=0.5)
    plans = []
    for offload in (None, place):
        stats = corp.calibrate(model, data, settings=Settings("all", offload=offload))
        plans.append(corp.plan(model, stats, recipe).to_dict())
    assert plans[0] == plans[1]
