"""Recipes made for a program: what they lead to is exported there whole, with nothing padded."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
import transformers as hf

import corp
from corp import CorpError, Recipe
from corp.storage import folder as storage
from corp.storage.export import llama_cpp
from corp.storage.export.possible import Exports
from tests.helpers import decoders, models
from tests.helpers.command import run

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
pytest.importorskip("gguf", reason="GGUF files are written with the package gguf")
BUDGET = Recipe(target_params=0.75)


@pytest.mark.parametrize(
    ("program", "family"),
    [
        ("transformers", "qwen2"),
        ("transformers", "llama-biased-tied"),
        ("vllm", "mistral-window"),
        ("gguf", "llama"),
        ("gguf", "llama-biased-tied"),
    ],
)
def test_a_budget_for_a_program_fits_it_without_padding(program: str, family: str, tmp_path: Path) -> None:
    model = decoders.build(family)
    recipe = Exports(model).recipe_for(program, BUDGET)
    assert not Exports(model).pads_heads({"transformers": "hf"}.get(program, program), recipe)
    result = corp.prune(model, decoders.batches(), recipe)
    decoders.tokenizer().save_pretrained(tmp_path / "tokenizer")
    corp.save(result, tmp_path / "small", companions=[tmp_path / "tokenizer"])
    made = storage.export(tmp_path / "small", tmp_path / "out", to={"transformers": "hf"}.get(program, program))
    assert made.params[0] == made.params[1] <= 0.75 * sum(p.numel() for p in model.parameters())
    assert made.difference is None or made.difference < 1e-4
    assert made.difference is not None or not llama_cpp.available()


def test_plain_transformers_loads_what_was_made_for_it(tmp_path: Path) -> None:
    model = decoders.build("llama")
    recipe = Exports(model).recipe_for("transformers", Recipe(mlp=0.5, attn=0.5))
    result = corp.prune(model, decoders.batches(), recipe)
    corp.save(result, tmp_path / "plain", profile="standard")
    plain = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert (plain.config.intermediate_size, plain.config.head_dim) == (20, 4)
    batch = decoders.batches(1)[0]
    with torch.no_grad():
        torch.testing.assert_close(plain(**batch).logits, result.model(**batch).logits, rtol=1e-4, atol=1e-4)


def test_heads_that_a_format_cannot_narrow_are_left_alone_under_a_budget() -> None:
    model = models.build("hf-opt")
    recipe = Exports(model).recipe_for("transformers", BUDGET)
    result = models.prune(model, models.batches("hf-opt"), recipe)
    assert {site.kind for site in result.plan.sites} == {"mlp"}
    assert Exports(model).under(recipe)["hf"] is None


def test_what_cannot_be_held_is_refused_before_anything_is_pruned() -> None:
    with pytest.raises(CorpError, match=r"gguf: OPTForCausalLM cannot be written as a Llama"):
        Exports(models.build("hf-opt")).recipe_for("gguf", BUDGET)
    with pytest.raises(CorpError, match="compensation made 2 biases"):
        Exports(decoders.build("qwen2")).recipe_for("transformers", Recipe(mlp=0.5, intercept=True))
    with pytest.raises(CorpError, match="'llamafile' is not one of transformers, timm, vllm, gguf, onnx"):
        Exports(decoders.build("llama")).recipe_for("llamafile", BUDGET)


def test_a_recipe_tells_its_exports_as_the_plan_will() -> None:
    model = decoders.build("llama")
    for recipe in (BUDGET, Recipe(target_macs=0.8), Recipe(mlp=0.5), Recipe(mlp=0.5, overrides=decoders.UNEVEN)):
        possible = {target for target, reason in Exports(model).under(recipe).items() if reason is None}
        uneven = recipe.has_target or bool(recipe.overrides)
        beyond = {"hf", "compat", "vllm", "gguf"} if recipe.has_target else {"hf"} if uneven else set()
        assert possible == {"hf", "compat", "onnx", "pt2", "vllm", "gguf"} - beyond


def test_widths_for_k_quants() -> None:
    wide, narrow = (Recipe(mlp=0.3, round_to="gguf").multiple("mlp", width) for width in (4864, 1536))
    assert (wide, narrow, Recipe(round_to="gguf").multiple("attn", 64)) == (256, 32, 1)


def test_corp_prune_says_where_its_result_can_go(tmp_path: Path) -> None:
    decoders.build("llama").save_pretrained(tmp_path / "dense")
    decoders.tokenizer().save_pretrained(tmp_path / "dense")
    (tmp_path / "texts.txt").write_text("\n".join(decoders.sentences(60, 20)))
    start = ("prune", f"hf:{tmp_path / 'dense'}", "--calib", str(tmp_path / "texts.txt"), "--seq-len", "16")
    budget = ("--target-params", "0.8")
    told = run(*start, *budget, "-o", str(tmp_path / "free")).stderr
    assert "exports: onnx, pt2; with --for also transformers, vllm, gguf" in " ".join(told.split())
    told = run(*start, *budget, "--for", "gguf", "-o", str(tmp_path / "small")).stderr
    possible = "exports: compat (heads padded), onnx, pt2, vllm, gguf; with --for also transformers"
    assert possible in " ".join(told.split())
    told = run("export", str(tmp_path / "small"), "--to", "gguf", "-o", str(tmp_path / "file")).stderr
    assert "padded" not in told
    assert (tmp_path / "file" / "model.gguf").is_file()


@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
def test_for_timm_leaves_merged_tokens_out_and_the_result_loads_in_timm(tmp_path: Path) -> None:
    model, data = timm.create_model("test_vit", img_size=32).eval(), [torch.randn(10, 3, 32, 32) for _ in range(6)]
    recipe = Exports(model).recipe_for("timm", Recipe(target_macs=0.8, tokens="auto"))
    assert (recipe.tokens, recipe.allocate) == (None, "uniform")
    result = corp.prune(model, data, recipe)
    assert {site.kind for site in result.plan.sites} == {"mlp"}
    assert len({site.keep for site in result.plan.sites}) == 1
    corp.save(result, tmp_path / "small")
    written = run("export", str(tmp_path / "small"), "--to", "timm", "-o", str(tmp_path / "timm"))
    assert written.exit_code == 0, written.output
