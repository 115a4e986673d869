"""transformers models: padding, causality, caches, kernels, storage; and the manners of nn.MultiheadAttention."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import corp
from corp import CorpError, Recipe, Result
from corp.calibration.grams import CAUSAL_BLOCKS
from corp.calibration.settings import Settings
from corp.measure.cost import count_params
from tests.helpers import hf_models
from tests.helpers.kinds import by_kind
from tests.helpers.models import FAMILIES, batches, build, prune, run
from tests.helpers.seeds import seeded

pytestmark = pytest.mark.filterwarnings("ignore:.*data that was not fitted:corp.errors.CorpWarning")
HF = [name for name in FAMILIES if name.startswith("hf-")]
TEXT = [name for name in HF if FAMILIES[name].batch is hf_models.text]
BOTH = Recipe.paper(mlp=0.5, attn=0.5)
EAGER = ["hf-opt", "hf-bert", "hf-clip", "hf-whisper"]
STORED = [*EAGER, "hf-gpt2-cross", "hf-dinov2-swiglu"]


def pruned(family: str, recipe: Recipe = BOTH, dtype: torch.dtype = torch.float64) -> nn.Module:
    return prune(build(family, dtype), batches(family, dtype=dtype), recipe).model


def documents(count: int = 24) -> list[Tensor]:
    """Token ids of unequal lengths, 1 to 20."""
    g = seeded(7)
    lengths = torch.randint(1, 21, (count,), generator=g).tolist()
    return [torch.randint(3, 50, (n,), generator=g) for n in lengths]


def padded(ids: list[Tensor], side: str) -> dict[str, Tensor]:
    n = max(map(len, ids))
    fill = [torch.zeros(n - len(x), dtype=torch.long) for x in ids]
    ones = [torch.ones_like(x) for x in ids]

    def join(parts: list[Tensor]) -> Tensor:
        pairs = zip(parts, fill, strict=True)
        return torch.stack([torch.cat([x, f] if side == "right" else [f, x]) for x, f in pairs])

    mask = join(ones)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": join(ids), "attention_mask": mask, "position_ids": positions}


# Padding and causality.


def assert_same_statistics(a: corp.Statistics, b: corp.Statistics) -> None:
    for name in a.sums:
        x, y = a.sums[name].total(), b.sums[name].total()
        if hasattr(x, "cov"):
            assert (x.n, x.seen) == (y.n, y.seen)
            scale = float(x.cov().abs().max())
            torch.testing.assert_close(x.cov(), y.cov(), rtol=1e-8, atol=1e-10 * scale)
            torch.testing.assert_close(x.mean, y.mean, rtol=1e-8, atol=1e-10 * scale)
        else:
            assert (x.samples, x.entries, x.tokens) == (y.samples, y.entries, y.tokens)
            for h in range(x.heads):
                torch.testing.assert_close(x.head(h).energy(), y.head(h).energy(), rtol=1e-8, atol=1e-10)
                torch.testing.assert_close(x.head(h).cross(), y.head(h).cross(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("family", by_kind(TEXT, ["hf-opt", "hf-bert", "hf-distilbert"]))
def test_padded_batches_give_the_statistics_of_single_documents(family: str) -> None:
    """No oracle could be plainer: a document alone has no padding. Few tokens of each are sampled, as by default."""
    model, ids = build(family), documents()
    settings = Settings(tokens=6)
    sides = ("left", "right") if family.startswith(("hf-opt", "hf-gpt2")) else ("right",)
    # These take positions from the arguments; the others count real tokens themselves, or have no choice.
    named = family in ("hf-gpt2", "hf-bert", "hf-electra")
    drop = [] if named else ["position_ids"]

    def feed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: value for key, value in batch.items() if key not in drop}

    alone = corp.calibrate(model, [{"input_ids": x[None]} for x in ids], settings=settings)
    for side in sides:
        together = corp.calibrate(
            model, [feed(padded(ids[i : i + 6], side)) for i in range(0, 24, 6)], settings=settings
        )
        folded = {name: sums.total() for name, sums in together.sums.items()}
        assert folded
        assert_same_statistics(alone, together)


def test_each_tower_of_clip_has_its_own_padding() -> None:
    model, ids = build("hf-clip"), [x for x in documents() if len(x) > 2][:12]
    ids = [torch.cat([x, torch.tensor([2])]) for x in ids]  # the end token is what the text tower pools
    g = seeded(3)
    pixels = torch.randn(12, 3, 16, 16, generator=g, dtype=torch.float64)
    alone = [{"input_ids": x[None], "pixel_values": p[None]} for x, p in zip(ids, pixels, strict=True)]
    both = {key: value for key, value in padded(ids, "right").items() if key != "position_ids"}
    assert_same_statistics(
        corp.calibrate(model, alone, settings=Settings(tokens="all")),
        corp.calibrate(model, [{**both, "pixel_values": pixels}], settings=Settings(tokens="all")),
    )


def test_whisper_masks_decoder_tokens_only() -> None:
    model, ids = build("hf-whisper"), documents(12)
    g = seeded(3)
    sound = torch.randn(12, 8, 20, generator=g, dtype=torch.float64)
    alone = [{"input_features": s[None], "decoder_input_ids": x[None]} for s, x in zip(sound, ids, strict=True)]
    text = padded(ids, "right")
    together = {"decoder_input_ids": text["input_ids"], "decoder_attention_mask": text["attention_mask"]}
    assert_same_statistics(
        corp.calibrate(model, alone, settings=Settings(tokens="all")),
        corp.calibrate(model, [{"input_features": sound, **together}], settings=Settings(tokens="all")),
    )


def test_cross_attention_masks_both_sequences() -> None:
    model, ids = build("hf-bert-decoder"), documents(12)
    g = seeded(3)
    states = [torch.randn(1, n, 24, generator=g, dtype=torch.float64) for n in range(1, 13)]
    alone = [{"input_ids": x[None], "encoder_hidden_states": s} for x, s in zip(ids, states, strict=True)]
    source = torch.cat([nn.functional.pad(s, (0, 0, 0, 12 - s.shape[1]), value=9.0) for s in states])
    real = torch.stack([(torch.arange(12) < s.shape[1]).long() for s in states])
    text = padded(ids, "right")
    batch = {**text, "encoder_hidden_states": source, "encoder_attention_mask": real}
    assert_same_statistics(
        corp.calibrate(model, alone, settings=Settings(tokens="all")),
        corp.calibrate(model, [batch], settings=Settings(tokens="all")),
    )


@pytest.mark.parametrize("family", ["torch-encoder", "torch-encoder-sequence-first"])
def test_padding_of_torch_layers_is_no_data_either(family: str) -> None:
    model, settings = build(family), Settings(tokens=4)
    g = seeded(3)
    sources = [torch.randn(1, n, 24, generator=g, dtype=torch.float64) for n in range(1, 13)]
    src = torch.cat([nn.functional.pad(s, (0, 0, 0, 12 - s.shape[1]), value=9.0) for s in sources])
    hidden = torch.stack([torch.arange(12) >= s.shape[1] for s in sources])
    assert_same_statistics(
        corp.calibrate(model, [{"src": s} for s in sources], settings=settings),
        corp.calibrate(model, [{"src": src, "src_key_padding_mask": hidden}], settings=settings),
    )


def test_masks_reach_models_inside_a_users_own() -> None:
    class Embedder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = build("hf-bert")

        def forward(self, tokens: Tensor, real: Tensor | None = None) -> Tensor:
            pooled: Tensor = self.bert(tokens, real).last_hidden_state[:, 0]  # the mask goes by position here
            return pooled

    model, ids = Embedder(), documents(12)
    batch = padded(ids, "right")
    assert_same_statistics(
        corp.calibrate(model, [{"tokens": x[None]} for x in ids], settings=Settings(tokens="all")),
        corp.calibrate(
            model, [{"tokens": batch["input_ids"], "real": batch["attention_mask"]}], settings=Settings(tokens="all")
        ),
    )


def test_masks_are_seen_through_offloading() -> None:
    model, ids = build("hf-opt"), documents(12)
    data = [{key: value for key, value in padded(ids, "right").items() if key != "position_ids"}]
    away = corp.calibrate(model, data, settings=Settings(tokens="all", offload="cpu"))
    assert_same_statistics(corp.calibrate(model, data, settings=Settings(tokens="all")), away)
    with pytest.raises(CorpError, match="cannot be calibrated with offloaded weights"):
        corp.calibrate(build("torch-encoder"), batches("torch-encoder"), settings=Settings(offload="cpu"))


def test_masks_that_do_not_tell_padding_are_refused() -> None:
    model, ids = build("hf-bert"), batches("hf-bert")[0]["input_ids"]
    square = torch.zeros(len(ids), 1, 11, 11, dtype=torch.float64)
    with pytest.raises(CorpError, match=r"attention_mask must be a \(batch, tokens\) mask.*\(20, 1, 11, 11\)"):
        corp.calibrate(model, [{"input_ids": ids, "attention_mask": square}])


@pytest.mark.parametrize("family", [name for name in HF if FAMILIES[name].batch in (hf_models.text, hf_models.speech)])
def test_sites_are_causal_where_the_model_is(family: str) -> None:
    """Change the last token: earlier outputs of a causal model do not move."""
    model, batch = build(family), copy.deepcopy(batches(family, 1, 4)[0])
    tokens = batch["decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"]
    before = model(**batch)[0][:, 0]
    tokens[:, -1] = (tokens[:, -1] + 1) % 50
    causal = torch.equal(model(**batch)[0][:, 0], before)
    assert causal == (FAMILIES[family].causal > 0)


def test_ignoring_causality_is_a_setting_and_gives_other_sums() -> None:
    model, data = build("hf-opt"), batches("hf-opt")
    blocks, whole = (corp.calibrate(model, data, settings=Settings(causal=c)) for c in (True, False))
    name = "model.decoder.layers.0.self_attn"
    assert (blocks.grams_of(name).total().entries, whole.grams_of(name).total().entries) == (CAUSAL_BLOCKS * 60, 60)
    assert float(blocks.grams_of(name).total().head(0).energy().sum()) < float(
        whole.grams_of(name).total().head(0).energy().sum()
    )


# Running: caches, generation, kernels.

GENERATING = ["hf-opt", "hf-opt-post-norm", "hf-gpt2"]


@pytest.mark.parametrize("family", GENERATING)
def test_greedy_generation_is_the_same_with_a_cache_without_and_in_padded_batches(family: str) -> None:
    model: Any = pruned(family, dtype=torch.float32)
    ids = [x for x in documents() if len(x) > 3][:5]
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    alone = [model.generate(x[None], **options)[0, len(x) :] for x in ids]
    slow = [model.generate(x[None], use_cache=False, **options)[0, len(x) :] for x in ids]
    batch = padded(ids, "left")
    together = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **options)
    assert torch.equal(torch.stack(alone), torch.stack(slow))
    assert torch.equal(torch.stack(alone), together[:, batch["input_ids"].shape[1] :])
    static = model.generate(ids[0][None], cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(static[0, len(ids[0]) :], alone[0])


def test_the_cache_holds_keys_of_the_true_width() -> None:
    model = pruned("hf-opt")
    cache = model(**batches("hf-opt", 1, 2)[0], use_cache=True).past_key_values
    assert (cache.layers[0].keys.shape[-1], cache.layers[0].values.shape[-1]) == (4, 8)


@pytest.mark.parametrize("family", ["hf-whisper", "hf-gpt2-cross", "hf-bert-decoder"])
def test_cross_attention_with_a_cache_equals_one_without(family: str) -> None:
    model, batch = pruned(family), batches(family, 1, 4)[0]
    key = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    whole = model(**batch, use_cache=False).logits
    cache, steps = hf.EncoderDecoderCache(hf.DynamicCache(), hf.DynamicCache()), []
    for step in range(batch[key].shape[1]):
        now = {**batch, key: batch[key][:, step : step + 1]}
        steps.append(model(**now, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole)
    seen = 10 if family == "hf-whisper" else 7  # projected once, not once more at every step
    assert cache.cross_attention_cache.layers[0].keys.shape[2:] == (seen, 4)


def test_whisper_generates() -> None:
    model: Any = pruned("hf-whisper", dtype=torch.float32)
    sound = batches("hf-whisper", 1, 2, torch.float32)[0]["input_features"]
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(sound, **options), model.generate(sound, use_cache=False, **options))


@pytest.mark.parametrize("family", by_kind((name for name in HF if name != "hf-mpnet"), EAGER))
def test_eager_and_sdpa_agree_and_eager_returns_its_weights(family: str) -> None:
    model, batch = pruned(family), batches(family, 1, 4)[0]
    fused = run(model, batch)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(run(model, batch), fused, rtol=1e-4, atol=1e-5)  # some softmax in float32
    given = model(**batch, output_attentions=True)
    parts = [given] if "vision_model_output" not in given else [given.text_model_output, given.vision_model_output]
    for part in parts:
        weights = part.get("attentions") or part.get("decoder_attentions")
        assert len(weights) == 2
        assert all(w.dim() == 4 for w in weights)
        torch.testing.assert_close(weights[0].sum(-1), torch.ones_like(weights[0].sum(-1)))


def test_weights_are_returned_once_where_the_dense_model_returned_them_before() -> None:
    """transformers hooks the dense attentions on first demand; the narrowed ones take the hooks over."""
    model, data = build("hf-opt"), batches("hf-opt")
    model.set_attn_implementation("eager")
    dense = model(**data[0], output_attentions=True).attentions
    smaller = corp.prune(model, data, Recipe.paper(attn=0.25)).model
    narrow = smaller(**data[0], output_attentions=True).attentions
    assert len(narrow) == len(dense) == 2
    assert 0 < float((narrow[0] - dense[0]).detach().abs().max()) < 1


def test_mpnet_returns_its_weights_on_request() -> None:
    model, batch = pruned("hf-mpnet"), batches("hf-mpnet", 1, 4)[0]
    given = model(**batch, output_attentions=True)
    assert len(given.attentions) == 2
    torch.testing.assert_close(given.last_hidden_state, model(**batch).last_hidden_state)


def test_flash_kernels_get_queries_and_keys_as_wide_as_values(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fake(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        seen.append((q.shape[-1], k.shape[-1], v.shape[-1], options["scaling"]))
        return v.transpose(1, 2), None

    model = pruned("hf-vit")
    monkeypatch.setitem(hf.AttentionInterface._global_mapping, "flash_attention_2", fake)
    model.config._attn_implementation_internal = "flash_attention_2"
    run(model, batches("hf-vit", 1, 2)[0])
    assert seen == [(8, 8, 8, 8**-0.5)] * 2


def test_a_narrowed_attention_can_be_pickled_and_copied() -> None:
    model, batch = pruned("hf-opt"), batches("hf-opt", 1, 2)[0]
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(run(again, batch), run(model, batch))


@pytest.mark.parametrize("family", ["hf-opt", "torch-encoder", "vit"])
def test_a_pruned_model_compiles_into_one_graph(family: str) -> None:
    model, batch = pruned(family), batches(family, 1, 4)[0]
    whole = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(run(whole, batch), run(model, batch))


# What is not understood.


def test_upcast_attention_keeps_its_own_code() -> None:
    gpt2 = hf.GPT2Model(hf.GPT2Config(**hf_models.GPT2, reorder_and_upcast_attn=True))
    sites = corp.find_sites(gpt2)
    assert not sites.refused
    assert all(site.padded for site in (*sites.attention, *sites.values))


def test_chunked_mlps_are_refused() -> None:
    bert = hf.BertModel(hf.BertConfig(**hf_models.TEXT, chunk_size_feed_forward=4))
    assert {(r.kind, r.reason.partition(";")[2]) for r in corp.find_sites(bert).refused} == {
        ("mlp", " set config.chunk_size_feed_forward = 0")
    }


def test_replaced_modules_are_refused_by_name() -> None:
    class Other(nn.Linear):
        pass

    model: Any = build("hf-bert")
    model.encoder.layer[0].attention.self.query = Other(24, 24)
    model.encoder.layer[1].output.dense = Other(40, 24)
    model.encoder.layer[1].attention.self = nn.Identity()
    reasons = {(r.name, r.kind): r.reason for r in corp.find_sites(model).refused}
    assert "query is a" in reasons["encoder.layer.0.attention.self", "attn"]
    assert "not a plain linear layer" in reasons["encoder.layer.1.mlp", "mlp"]
    assert "Identity is not understood" in reasons["encoder.layer.1.attention.self", "attn"]


# Storage.


def save(result: Result, path: Path) -> Path:
    corp.save(result, path)
    return path


@pytest.mark.parametrize("family", by_kind(HF, STORED))
def test_saved_models_come_back_bit_identical_from_their_config(family: str, tmp_path: Path) -> None:
    data = batches(family, dtype=torch.float32)
    result = prune(build(family, torch.float32), data, BOTH)
    loaded = corp.load(save(result, tmp_path / "model"))
    assert type(loaded) is type(result.model)
    assert torch.equal(run(loaded, data[0]), run(result.model, data[0]))
    assert count_params(loaded) == count_params(result.model)
    twice = prune(loaded, data, Recipe.paper(mlp=0.2, attn=0.3))
    assert torch.equal(run(corp.load(save(twice, tmp_path / "twice")), data[0]), run(twice.model, data[0]))


def test_card_and_page_of_a_transformers_model_say_how_to_load_it(tmp_path: Path) -> None:
    corp.save(corp.prune(build("hf-bert"), batches("hf-bert"), Recipe.paper(mlp=0.5)), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# BertModel, pruned" in card
    assert "base=" not in card
    assert "BertModel" in (tmp_path / "out" / "report.html").read_text()


def test_tied_weights_are_stored_once_counted_once_and_tied_again(tmp_path: Path) -> None:
    from safetensors import safe_open

    result = prune(build("hf-opt", torch.bfloat16), batches("hf-opt", dtype=torch.bfloat16), BOTH)
    loaded: Any = corp.load(save(result, tmp_path / "model"))
    assert loaded.lm_head.weight is loaded.model.decoder.embed_tokens.weight
    assert count_params(loaded) == result.report.params[1]
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_a_model_from_a_folder_keeps_its_generation_config_and_forgets_the_folder(tmp_path: Path) -> None:
    source: Any = build("hf-gpt2", torch.float32)
    source.generation_config.max_new_tokens = 5
    source.generation_config.repetition_penalty = 1.3
    source.save_pretrained(tmp_path / "source")
    model = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "source", attn_implementation="eager")
    data = batches("hf-gpt2", dtype=torch.float32)
    result = corp.prune(model.eval(), data, BOTH)
    loaded: Any = corp.load(save(result, tmp_path / "model"))
    assert torch.equal(run(loaded, data[0]), run(result.model, data[0]))
    assert loaded.config._attn_implementation == "eager"
    assert (loaded.generation_config.max_new_tokens, loaded.generation_config.repetition_penalty) == (5, 1.3)
    assert str(tmp_path) not in (tmp_path / "model" / "corp.json").read_text()


def test_a_model_from_a_folder_keeps_the_kernels_of_its_towers(tmp_path: Path) -> None:
    model: Any = build("hf-clip", torch.float32)
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    data = batches("hf-clip", dtype=torch.float32)
    result = corp.prune(model, data, BOTH)
    loaded: Any = corp.load(save(result, tmp_path / "model"))
    kernels = [part._attn_implementation for part in (loaded.config.text_config, loaded.config.vision_config)]
    assert kernels == ["eager", "sdpa"]
    assert torch.equal(run(loaded, data[0]), run(result.model, data[0]))


ATTACKS = {
    "a class that is no model": ("class", "pipeline"),
    "a model corp does not know": ("class", "T5Model"),
    "an abstract class": ("class", "PreTrainedModel"),
    "a path": ("class", "models.bert.modeling_bert.BertModel"),
    "no class": ("class", None),
    "config is a list": ("config", []),
    "other widths": ("config", {**hf_models.OPT, "hidden_size": 48}),
    "a million layers": ("config", {**hf_models.OPT, "num_hidden_layers": 10**6}),
    "nonsense values": ("config", {**hf_models.OPT, "num_attention_heads": "many"}),
    "a kernel from the hub": ("attention", "kernels-community/evil"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_identities_end_in_a_clear_error(attack: str, tmp_path: Path) -> None:
    result = prune(build("hf-opt", torch.float32), batches("hf-opt", dtype=torch.float32), BOTH)
    manifest = save(result, tmp_path / "model") / "corp.json"
    content = json.loads(manifest.read_text())
    key, value = ATTACKS[attack]
    content["base"]["identity"][key] = value
    manifest.write_text(json.dumps(content))
    with pytest.raises(CorpError) as caught:
        corp.load(tmp_path / "model")
    assert len(str(caught.value)) > 20


# nn.MultiheadAttention.


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_encoders_fast_path_is_not_taken_with_narrowed_attention() -> None:
    """In inference the dense layer computes from self_attn's parameters; narrowed ones would give nonsense."""
    model, data = build("torch-encoder", torch.float32), batches("torch-encoder", dtype=torch.float32)
    hidden = torch.arange(11)[None] >= torch.randint(4, 12, (20, 1))
    recipes = (BOTH, Recipe.paper(mlp=0.5), Recipe.paper(attn=0.5, skip="*.0.*"))
    for smaller in (prune(model, data, recipe).model for recipe in recipes):
        for mask in (None, hidden):
            batch = {**data[0], "src_key_padding_mask": mask}
            fast = run(smaller, batch)
            with torch.enable_grad():
                slow = smaller(**batch).detach()  # gradients close the fast path
            real = torch.ones_like(fast[..., 0], dtype=torch.bool) if mask is None else ~mask
            torch.testing.assert_close(fast[real], slow[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch_first", [True, False])
def test_narrow_multihead_takes_and_returns_what_the_dense_one_does(batch_first: bool) -> None:
    """Nothing is dropped, so all outputs must agree, whatever the masks."""
    from corp.sites import rows_of
    from corp.surgery.multihead import NarrowMultihead

    dense = nn.MultiheadAttention(24, 4, batch_first=batch_first).double().eval()
    site = corp.find_sites(dense).attention[0]
    narrow = NarrowMultihead(dense, rows_of(dense, site.q), rows_of(dense, site.k))
    q, k = torch.randn(5, 6, 24, dtype=torch.float64), torch.randn(5, 6, 24, dtype=torch.float64)
    B, n = (5, 6) if batch_first else (6, 5)
    padding = torch.arange(n)[None] >= torch.randint(1, n + 1, (B, 1))
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    calls: list[dict[str, Any]] = [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"key_padding_mask": padding},
        {"attn_mask": future, "is_causal": True, "need_weights": False},
        {"attn_mask": torch.randn(B * 4, n, n, dtype=torch.float64), "key_padding_mask": torch.zeros(B, n).double()},
    ]
    for options in calls:
        for inputs in ((q, q, q), (q, k, k)):
            expected, given = dense(*inputs, **options), narrow(*inputs, **options)
            torch.testing.assert_close(given[0], expected[0])
            assert (given[1] is None) == (expected[1] is None)
            if expected[1] is not None:
                torch.testing.assert_close(given[1], expected[1])
    torch.testing.assert_close(narrow(q[0], q[0], q[0])[0], dense(q[0], q[0], q[0])[0])
    with pytest.raises(CorpError, match="hint about attn_mask"):
        narrow(q, q, q, is_causal=True)


def test_unusual_multihead_attention_is_refused() -> None:
    for options, reason in (({"kdim": 16}, "kdim, vdim"), ({"add_bias_kv": True}, "extra keys")):
        refused = corp.find_sites(nn.MultiheadAttention(24, 4, **options)).refused  # type: ignore[arg-type]
        assert [reason in r.reason for r in refused] == [True, True]  # queries and keys, and values
