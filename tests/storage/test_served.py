"""Exports for vLLM and llama.cpp: per-layer widths, one head width, tokenizers; llama.cpp itself runs the files."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import corp
from corp import CorpError, Recipe
from corp.storage import folder as storage
from corp.storage.export import gguf_file, llama_cpp
from corp.storage.export.gguf_file import vocabulary_of
from corp.storage.export.possible import Exports
from corp.storage.export.rotary import common_heads, rope_factors
from tests.helpers import decoders, models
from tests.helpers.command import run
from tests.helpers.deci import Deci
from tests.helpers.kinds import by_kind
from tests.helpers.llama import greedy, score
from tests.helpers.seeds import seed_all

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
gguf = pytest.importorskip("gguf", reason="GGUF files are written with the package gguf")
needs_llama = pytest.mark.skipif(not llama_cpp.available(), reason="llama.cpp comes with the package xllamacpp")
ALL = Recipe(mlp=0.5, attn=0.5, vo=0.25, overrides=decoders.UNEVEN)
IDS = torch.tensor([1, 7, 33, 250, 90, 41, 41, 5, 300, 12])
SOME = ["llama-biased-tied", "llama-3-frequencies", "mistral-window", "phi3"]


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    found: Tensor = models.run(model, {"input_ids": ids[None]})[0].view(len(ids), -1).double()
    return found


def fields(path: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


@pytest.fixture(params=by_kind(decoders.FAMILIES, SOME))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_a_reader_of_vllms_fields_computes_what_the_pruned_model_does(family: str, tmp_path: Path) -> None:
    intercept = family != "phi3"  # biases that compensation makes, where the dense model has none
    result = decoders.saved(family, tmp_path / "small", Recipe(**{**ALL.to_dict(), "intercept": intercept}))
    made = storage.export(tmp_path / "small", tmp_path / "out", to="vllm")
    assert made.difference is not None
    assert made.difference < 1e-5
    reader = Deci(tmp_path / "out")
    torch.testing.assert_close(reader.logits(IDS), logits(result.model), rtol=1e-5, atol=1e-4)
    widths = [block["ffn"]["intermediate_size"] for block in reader.config["block_configs"]]
    assert widths == [28, 20]
    assert all("ffn_mult" not in block["ffn"] for block in reader.config["block_configs"])
    assert reader.config["max_position_embeddings"] == (24 if family == "mistral-window" else 64)
    assert any("vLLM itself was not run" in note for note in made.notes)
    assert "vllm serve out --trust-remote-code" in (tmp_path / "out" / "README.md").read_text()


@needs_llama
def test_llama_cpp_computes_what_the_pruned_model_does(family: str, tmp_path: Path) -> None:
    result = decoders.saved(family, tmp_path / "small", ALL)
    made = storage.export(tmp_path / "small", tmp_path / "out", to="gguf")
    assert made.difference is not None
    assert made.difference < 1e-5
    assert made.params[0] < made.params[1]
    assert "heads are padded with zeros to" in made.notes[0]
    llama = llama_cpp.Llama(tmp_path / "out" / "model.gguf")
    expected = logits(result.model).log_softmax(-1)
    scores = torch.tensor(score(llama, IDS.tolist()), dtype=torch.float64)
    torch.testing.assert_close(scores, expected[:-1].gather(1, IDS[1:, None])[:, 0], rtol=1e-5, atol=1e-4)
    model: Any = result.model
    told = model.generate(input_ids=IDS[None], max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert greedy(llama, IDS.tolist(), 8) == told[0, len(IDS) :].tolist()
    assert fields(tmp_path / "out" / "model.gguf")["deci.feed_forward_length"] == [28, 20]


NARROW = Recipe(mlp=0.5, attn=0.5, vo=0.5, overrides=decoders.UNEVEN)


@pytest.mark.parametrize(
    "family", by_kind(["llama", "llama-biased-tied", "llama-3-frequencies", "qwen2"], ["llama-3-frequencies", "qwen2"])
)
def test_one_set_of_rotary_pairs_makes_heads_narrower_everywhere(family: str, tmp_path: Path) -> None:
    """Pairs 1 and 3 of 4 in all heads: half the cache in llama.cpp, vLLM and, of one MLP width, plain transformers."""
    uniform = Recipe(mlp=0.5, attn=0.5, vo=0.5)
    result = decoders.saved(family, tmp_path / "small", uniform, [1, 3])
    heads = [(site.width, head) for site in result.plan.sites if site.kind == "attn" for head in site.kept]
    kept = {tuple(i for i in head if i < width // 2) for width, head in heads}  # a pair by its first dimension
    assert kept == {(1, 3)}
    expected = logits(result.model)
    storage.export(tmp_path / "small", tmp_path / "hf", to="hf")
    plain = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert plain.config.head_dim == 4
    assert plain.config.rope_parameters["rope_type"] == "longrope"
    assert {tuple(p.shape) for p in plain.parameters()} == {tuple(p.shape) for p in result.model.parameters()}
    torch.testing.assert_close(logits(plain), expected, rtol=1e-5, atol=1e-4)
    cached = plain.generate(input_ids=IDS[None], max_new_tokens=6, do_sample=False)
    model: Any = result.model
    assert cached.tolist() == model.generate(input_ids=IDS[None], max_new_tokens=6, do_sample=False).tolist()
    storage.export(tmp_path / "small", tmp_path / "vllm", to="vllm")
    torch.testing.assert_close(Deci(tmp_path / "vllm").logits(IDS), expected, rtol=1e-5, atol=1e-4)
    made = storage.export(tmp_path / "small", tmp_path / "gguf", to="gguf")
    assert made.params[0] == made.params[1]
    assert made.notes == ()
    assert made.difference is None or made.difference < 1e-5
    written = fields(tmp_path / "gguf" / "model.gguf")
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        assert written[f"deci.{key}"] == 4


def test_heads_of_different_pairs_share_the_union_of_them() -> None:
    """Layers keep pairs {0, 2} and {2, 3}: heads are written with the three, and values wider than that decide."""
    result, other = (decoders.pruned(decoders.build("llama"), NARROW, pairs) for pairs in ([0, 2], [2, 3]))
    heads = common_heads(result.model)
    assert heads is not None
    assert (heads.dense, heads.width, heads.pairs) == (8, 4, (0, 2))
    mixed: Any = other.model
    mixed.model.layers[0] = result.model.model.layers[0]  # type: ignore[union-attr, index]
    heads = common_heads(mixed)
    assert heads is not None
    assert (heads.width, heads.pairs) == (6, (0, 2, 3))
    factors = torch.tensor(rope_factors(mixed, heads, 10000.0), dtype=torch.float64)
    plain = torch.tensor([10000.0 ** (-2 * j / 6) for j in range(3)], dtype=torch.float64)
    dense = torch.tensor([10000.0 ** (-2 * j / 8) for j in (0, 2, 3)], dtype=torch.float64)
    torch.testing.assert_close(plain / factors, dense, rtol=1e-6, atol=0)
    wide = common_heads(decoders.pruned(decoders.build("llama"), Recipe(attn=0.5, vo=0.25), [0, 2]).model)
    assert wide is not None
    assert (wide.width, wide.pairs) == (6, (0, 1, 2))  # one spare pair, whose weights are zero


def test_half_precision_keeps_its_dtype(tmp_path: Path) -> None:
    decoders.tokenizer().save_pretrained(tmp_path / "tokenizer")
    result = decoders.pruned(decoders.build("llama", torch.bfloat16), Recipe(mlp=0.5, attn=0.5, vo=0.5), [1, 3])
    corp.save(result, tmp_path / "small", companions=[tmp_path / "tokenizer"])
    for target in ("hf", "vllm", "gguf"):
        made = storage.export(tmp_path / "small", tmp_path / target, to=target)
        assert made.params[0] == made.params[1]
        assert made.difference is None or made.difference < 5e-2
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16
    stored = {tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "gguf" / "model.gguf").tensors}
    assert stored == {"BF16", "F32"}


def test_precisions_of_a_gguf_file(tmp_path: Path) -> None:
    decoders.saved("llama", tmp_path / "small", Recipe(mlp=0.2))  # 32 of 40 channels: a row that q8_0 can cut
    decoders.saved("llama", tmp_path / "odd", Recipe(mlp=0.5))
    for source, quant, down in (("small", "f16", "F16"), ("small", "q8_0", "Q8_0"), ("odd", "q8_0", "F16")):
        out = tmp_path / f"{source}-{quant}"
        storage.export(tmp_path / source, out, to="gguf", quant=quant)
        types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(out / "model.gguf").tensors}
        assert types["blk.0.ffn_down.weight"] == down
        assert types["blk.0.ffn_gate.weight"] == quant.upper()
        assert types["blk.0.attn_norm.weight"] == "F32"


@needs_llama
def test_a_wrong_permutation_is_noticed_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoders.saved("llama", tmp_path / "small", Recipe(mlp=0.5))
    monkeypatch.setattr(gguf_file, "_interleaved", lambda _name, tensor, _decoder: tensor)
    with pytest.raises(CorpError, match=r"llama.cpp disagrees with the pruned model by .* nothing was written"):
        storage.export(tmp_path / "small", tmp_path / "out", to="gguf")
    assert not (tmp_path / "out").exists()


@needs_llama
def test_a_file_that_llama_cpp_refuses_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF, but no more")
    with pytest.raises(CorpError, match=r"llama\.cpp does not load what was written"):
        gguf_file.check_gguf(tmp_path / "x.gguf", [1], torch.zeros(3), "f32")


TEXTS = (
    "the cat sat on the mat.",
    "A dog  ran, then 1234\n\ntrees",
    "naïve — 猫 sat",
    "it was 5pm!",
)


@needs_llama
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_llama_cpp_cuts_texts_as_the_tokenizer_does(kind: str, tmp_path: Path) -> None:
    tokenizer = decoders.tokenizer(kind)
    result = decoders.pruned(decoders.build("llama"), Recipe(mlp=0.5))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    corp.save(result, tmp_path / "small", companions=[tmp_path / "tokenizer"])
    storage.export(tmp_path / "small", tmp_path / "out", to="gguf")
    llama = llama_cpp.Llama(tmp_path / "out" / "model.gguf")
    for text in TEXTS:
        request = urllib.request.Request(
            f"{llama.server.listening_address}/tokenize",
            json.dumps({"content": text, "add_special": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["tokens"] == tokenizer(text)["input_ids"], text


def test_tokenizers_that_a_gguf_file_cannot_hold() -> None:
    from tests.helpers.hf_folders import tokenizer

    with pytest.raises(CorpError, match="tokenizer of type 'WordLevel', only BPE"):
        vocabulary_of(tokenizer(), 32)
    with pytest.raises(CorpError, match="the tokenizer has 317 tokens, the model's embedding 100"):
        vocabulary_of(decoders.tokenizer(), 100)
    odd = decoders.tokenizer()
    from tokenizers import pre_tokenizers

    odd.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()]
    )
    with pytest.raises(CorpError, match=r"does not know llama\.cpp's name for the way .* splits texts"):
        vocabulary_of(odd, 320)


def test_widths_of_256_are_written_for_programs_that_know_only_the_ratio(tmp_path: Path) -> None:
    config = hf.LlamaConfig(**{**decoders.SIZE, "intermediate_size": 768})
    seed_all(0)
    recipe = Recipe(mlp=1 / 3, overrides={"model.layers.0.*": {"mlp": 2 / 3}})
    result = decoders.pruned(hf.LlamaForCausalLM(config).eval(), recipe)
    corp.save(result, tmp_path / "small")
    storage.export(tmp_path / "small", tmp_path / "out", to="vllm")
    reader = Deci(tmp_path / "out")
    ffns = [block["ffn"] for block in reader.config["block_configs"]]
    assert [ffn["ffn_mult"] for ffn in ffns] == [1.5 * 256 / 32, 1.5 * 512 / 32]
    assert [reader.width(ffn) for ffn in ffns] == [256, 512]
    torch.testing.assert_close(reader.logits(IDS), logits(result.model), rtol=1e-5, atol=1e-5)


READ = """
import copy, json, sys
from transformers import AutoConfig
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
copy.deepcopy(config), config.to_json_string()
first = config.block_configs[0]
print(json.dumps([config.model_type, first.attention.no_op, first.attention.n_heads_in_group,
    first.ffn.intermediate_size, hasattr(first.ffn, "ffn_mult"), config.rope_parameters["rope_theta"],
    config.head_dim]))
"""


def test_the_config_class_in_the_folder_gives_attributes(tmp_path: Path) -> None:
    decoders.saved("llama", tmp_path / "small", Recipe(mlp=0.5))
    storage.export(tmp_path / "small", tmp_path / "out", to="vllm")
    command = [sys.executable, "-c", READ, str(tmp_path / "out")]
    environment = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["nemotron-nas", False, 2, 20, False, 10000.0, 8]


def test_a_uniform_model_of_the_best_options_is_a_plain_llama(tmp_path: Path) -> None:
    """Exact ranking, refitted layer by layer, one width: nothing to trust, nothing padded."""
    model = decoders.build("llama")
    for intercept in (False, True):
        recipe = Recipe(mlp=0.5, rank="exact", sequential=True, intercept=intercept)
        result = corp.prune(model, decoders.batches(), recipe)
        corp.save(result, tmp_path / f"{intercept}", profile="standard")
        plain = hf.LlamaForCausalLM.from_pretrained(tmp_path / f"{intercept}").eval()
        assert (plain.config.intermediate_size, plain.config.mlp_bias) == (20, intercept)
        torch.testing.assert_close(logits(plain), logits(result.model), rtol=1e-5, atol=1e-4)
        assert set(Exports(model).of(result.plan).values()) - {None} == (
            {Exports(model).of(result.plan)["compat"]} if intercept else set()
        )


def test_a_model_with_two_tables_of_frequencies_is_no_llama(tmp_path: Path) -> None:
    seed_all(0)
    model = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**decoders.SIZE, sliding_window=8)).eval()
    result = decoders.pruned(model, Recipe(mlp=0.5))
    assert common_heads(result.model) is None
    corp.save(result, tmp_path / "plain", profile="standard")
    assert "Gemma3ForCausalLM cannot be written as a Llama: it normalises" in str(
        Exports(model).of(result.plan)["vllm"]
    )


def test_what_a_plan_allows() -> None:
    model = decoders.build("llama")
    reasons = Exports(model).of(decoders.pruned(model, ALL).plan)
    assert {target for target, reason in reasons.items() if reason is None} == {"compat", "onnx", "pt2", "vllm", "gguf"}
    assert "one intermediate_size for all" in str(reasons["hf"])
    other = models.build("hf-opt")
    plan = models.prune(other, models.batches("hf-opt"), Recipe(mlp=0.5)).plan
    reasons = Exports(other).of(plan)
    assert reasons["hf"] is None
    assert "OPTForCausalLM cannot be written as a Llama: its positions are learned" in str(reasons["gguf"])


def test_refusals_say_what_can_be_done(tmp_path: Path) -> None:
    decoders.saved("llama", tmp_path / "small", ALL)
    for arguments, message in (
        (("--to", "gguf", "--quant", "q4_k"), "is not one of f32, f16, bf16, q8_0; llama-quantize"),
        (("--to", "gguf", "--profile", "compat"), "--profile compat goes with --to timm or hf"),
        (("--to", "vllm", "--quant", "f16"), "--quant f16 goes with --to gguf"),
        (("--to", "hf"), "can be exported with --profile compat, --to onnx, --to pt2, --to vllm, --to gguf"),
    ):
        failed = run("export", tmp_path / "small", "-o", tmp_path / "out", *arguments)
        assert failed.exit_code == 1
        assert message in " ".join(failed.output.split())
    made = run("export", tmp_path / "small", "-o", tmp_path / "out", "--to", "vllm")
    assert made.exit_code == 0, made.output
    assert f"run it with vllm serve {tmp_path / 'out'}" in " ".join(made.output.split())
    corp.save(decoders.pruned(decoders.build("llama"), Recipe(mlp=0.5)), tmp_path / "bare")
    with pytest.raises(CorpError, match="a GGUF file includes the tokenizer, but corp found none"):
        storage.export(tmp_path / "bare", tmp_path / "x", to="gguf")
    told = " ".join(run("export", tmp_path / "bare", "-o", tmp_path / "x", "--to", "gguf").output.split())
    assert "can be exported with" in told
    assert "--to vllm error" in told  # not with --to gguf, which was just refused
    opt = models.prune(models.build("hf-opt"), models.batches("hf-opt"), Recipe(mlp=0.5))
    corp.save(opt, tmp_path / "opt")
    with pytest.raises(CorpError, match="OPTForCausalLM cannot be written as a Llama"):
        storage.export(tmp_path / "opt", tmp_path / "x", to="gguf")
