"""hf: models on the command line: loading and its errors, calibration on texts, evaluation, timing."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import nn

import corp
from corp.adapters import hf_models
from corp.calibration.batches import without_cache
from corp.cli.models import ENCODER, kind_of, load_model
from corp.cli.texts import sequences_per_batch
from corp.errors import DataError, ModelError
from tests.helpers import hf_folders
from tests.helpers.command import content, failure, run
from tests.helpers.seeds import seed


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folders.opt(tmp_path_factory.mktemp("models") / "opt")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folders.bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folders.vit(tmp_path_factory.mktemp("models") / "vit")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folders.texts(tmp_path_factory.mktemp("texts") / "texts.jsonl")


@pytest.fixture(scope="module")
def pruned(opt: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pruned") / "opt-50"
    result = run("prune", f"hf:{opt}", "--calib", texts, "--mlp", 0.5, "--attn", 0.25, "-o", out, "--device", "cpu")
    assert result.exit_code == 0, result.output
    return out


def perplexity(model: nn.Module, rows: list[list[int]]) -> float:
    """One sequence at a time, by the library's own loss."""
    total, tokens = 0.0, 0
    for row in rows:
        ids = torch.tensor([row])
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=ids).loss) * (len(row) - 1)
        tokens += len(row) - 1
    return math.exp(total / tokens)


def test_the_class_is_the_one_the_config_names(opt: Path, bert: Path, vit: Path, tmp_path: Path) -> None:
    assert type(hf_models.create(str(opt))) is transformers.OPTForCausalLM
    assert type(hf_models.create(str(bert))) is transformers.BertModel
    assert type(hf_models.create(str(vit))) is transformers.ViTForImageClassification
    masked = transformers.BertForMaskedLM(transformers.AutoConfig.from_pretrained(bert))
    masked.save_pretrained(tmp_path / "masked")
    assert kind_of(hf_models.create(str(tmp_path / "masked"))) == ENCODER


@pytest.mark.parametrize(("family", "expected"), [("opt", "OPTForCausalLM"), ("bert", "BertModel")])
def test_without_a_named_class_the_family_decides(
    family: str, expected: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source: Path = request.getfixturevalue(family)
    config = json.loads((source / "config.json").read_text())
    for architectures in (None, ["SomebodysOwnModel"], 0.5, [7]):
        folder = tmp_path / str(architectures)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
        assert type(hf_models.create(str(folder))).__name__ == expected


def test_a_backbone_saved_under_the_name_of_a_class_with_a_head(bert: Path, tmp_path: Path) -> None:
    config = json.loads((bert / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForSequenceClassification"]}))
    (tmp_path / "model.safetensors").write_bytes((bert / "model.safetensors").read_bytes())
    assert type(hf_models.create(str(tmp_path))) is transformers.BertModel


def test_a_checkpoint_keeps_its_dtype(opt: Path, tmp_path: Path) -> None:
    transformers.OPTForCausalLM.from_pretrained(opt).to(torch.bfloat16).save_pretrained(tmp_path)
    assert next(hf_models.create(str(tmp_path)).parameters()).dtype == torch.bfloat16


def test_folders_that_cannot_be_loaded(opt: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        load_model(f"hf:{tmp_path / 'nowhere'}", None)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(f"hf:{tmp_path}", None)
    with pytest.raises(ModelError, match="takes a folder or a hub id"):
        load_model("hf:", None)
    config = json.loads((opt / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="has no weights"):
        load_model(f"hf:{tmp_path}", None)
    assert isinstance(load_model(f"hf:{tmp_path}", None, pretrained=False), transformers.OPTForCausalLM)
    with pytest.raises(ModelError, match="own weights; leave out --weights"):
        load_model(f"hf:{tmp_path}", tmp_path / "w.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"only as pickle \(\.bin\).*save_pretrained"):
        load_model(f"hf:{tmp_path}", None)
    (tmp_path / "model.safetensors").write_bytes(4096 * b"nonsense")
    with pytest.raises(ModelError, match=r"the weights of .* cannot be loaded"):
        load_model(f"hf:{tmp_path}", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    with pytest.raises(ModelError, match="does not know the architecture"):
        load_model(f"hf:{tmp_path}", None)


def test_incomplete_weights_are_refused(opt: Path, tmp_path: Path) -> None:
    config = json.loads((opt / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    (tmp_path / "model.safetensors").write_bytes((opt / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"not complete: OPTForCausalLM lacks 16 tensors, such as .*layers\.2"):
        load_model(f"hf:{tmp_path}", None)


def test_code_of_the_checkpoint_is_never_run(opt: Path, tmp_path: Path) -> None:
    config = json.loads((opt / "config.json").read_text())
    evil = {**config, "model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(evil))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(ModelError, match="comes with its own code, which corp does not run"):
        load_model(f"hf:{tmp_path}", None)
    assert not (tmp_path / "ran").exists()


def test_a_missing_tokenizer_is_said(opt: Path, texts: Path, tmp_path: Path) -> None:
    transformers.OPTForCausalLM.from_pretrained(opt).save_pretrained(tmp_path / "bare")
    given = ("calibrate", f"hf:{tmp_path / 'bare'}", "--calib", texts, "-o", tmp_path / "stats", "--device", "cpu")
    assert "give its folder as --tokenizer FOLDER" in failure(*given)
    assert run(*given, "--tokenizer", opt).exit_code == 0


def test_the_context_is_what_the_model_can_take(opt: Path, bert: Path, tmp_path: Path) -> None:
    assert hf_models.context_length(hf_models.create(str(opt)), hf_models.tokenizer(str(opt))) == 24
    roberta = transformers.RobertaModel(
        transformers.RobertaConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=20, pad_token_id=1,
        )
    )  # fmt: skip
    length = hf_models.context_length(roberta)
    assert length == 18
    roberta(input_ids=torch.full((1, length), 5))  # and no more: the next would have no position
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        roberta(input_ids=torch.full((1, length + 1), 5))


def test_pruning_a_language_model_shows_perplexity_before_and_after(opt: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ("prune", f"hf:{opt}", "--calib", texts, "--mlp", 0.5, "-o", out, "--device", "cpu")
    shown = content(*given, "--samples", 20, "--seq-len", 16, "--eval-data", texts)
    before, after = shown["evaluation"]["models"]
    tokens = transformers.AutoTokenizer.from_pretrained(opt)
    stream = [
        token for line in texts.read_text().splitlines() for token in tokens(json.loads(line)["text"])["input_ids"]
    ]
    rows = [stream[i : i + 16] for i in range(0, len(stream) - 15, 16)]
    assert before["perplexity"]["value"] == pytest.approx(perplexity(hf_models.create(str(opt)), rows), rel=1e-4)
    assert after["perplexity"]["value"] == pytest.approx(perplexity(corp.load(out), rows), rel=1e-4)
    ratio = after["perplexity"]["value"] / before["perplexity"]["value"]
    assert after["perplexity_ratio"]["value"] == pytest.approx(ratio, rel=1e-4)
    assert before["perplexity_ratio"] is before["kl"] is None
    assert after["kl"]["value"] > 0
    made = json.loads((out / "corp.json").read_text())["calibration"]
    assert (made["samples"], made["preprocessing"][:11]) == (20, "packed into")
    text = run(*given, "--overwrite", "--eval-data", texts)
    assert text.exit_code == 0, text.output
    assert "perplexity" in text.output


def test_a_pruned_folder_brings_its_tokenizer(pruned: Path, opt: Path, texts: Path) -> None:
    shown = content("eval", pruned, "--dense", f"hf:{opt}", "--data", texts, "--per-document", "--device", "cpu")
    alone = content("eval", pruned, "--data", texts, "--per-document", "--device", "cpu")
    assert shown["models"][1]["perplexity"] == alone["models"][0]["perplexity"]
    assert shown["dense"] == f"hf:{opt}"
    assert alone["models"][0]["agreement"] is None
    tokens = transformers.AutoTokenizer.from_pretrained(pruned)
    rows = [tokens(json.loads(line)["text"])["input_ids"][:24] for line in texts.read_text().splitlines()]
    assert alone["models"][0]["perplexity"]["value"] == pytest.approx(perplexity(corp.load(pruned), rows), rel=1e-4)
    assert alone["data"]["sequences"] == 60


def test_a_stride_gives_every_token_more_context(opt: Path, texts: Path) -> None:
    plain = content("eval", f"hf:{opt}", "--data", texts, "--seq-len", 8, "--device", "cpu")
    strided = content("eval", f"hf:{opt}", "--data", texts, "--seq-len", 8, "--stride", 2, "--device", "cpu")
    assert strided["data"]["sequences"] > 3 * plain["data"]["sequences"]
    assert "leaves out text" in failure("eval", f"hf:{opt}", "--data", texts, "--seq-len", 8, "--stride", 9)
    assert "context of 24 tokens" in failure("eval", f"hf:{opt}", "--data", texts, "--seq-len", 99)


def test_calibrate_plan_analyze_and_inspect_take_texts(opt: Path, texts: Path, tmp_path: Path) -> None:
    model, stats = f"hf:{opt}", tmp_path / "stats"
    made = content("calibrate", model, "--calib", texts, "-o", stats, "--samples", 10, "--device", "cpu")
    assert (made["samples"], made["origin"]["dtype"]) == (10, "float32")
    planned = content("plan", model, "--stats", stats, "--mlp", 0.5, "--device", "cpu")
    assert {site["kind"] for site in planned["sites"]} == {"mlp"}
    assert content("analyze", model, "--stats", stats)["samples"] == 10
    assert sorted(site["kind"] for site in content("inspect", model)["sites"]) == sorted(["attn", "vo", "mlp"] * 2)
    documents = content("calibrate", model, "--calib", texts, "-o", tmp_path / "d", "--no-pack", "--device", "cpu")
    assert documents["samples"] == 60
    assert "one document per sequence" in documents["origin"]["preprocessing"]


def test_an_encoder_is_judged_by_its_embeddings(bert: Path, texts: Path, tmp_path: Path) -> None:
    out, sts = tmp_path / "out", tmp_path / "sts.tsv"
    done = run(
        "prune", f"hf:{bert}", "--calib", texts, "--mlp", 0.7, "--compensate", "none", "-o", out, "--device", "cpu"
    )
    assert done.exit_code == 0, done.output
    lines = hf_folders.sentences(20, 5, seed=3)
    sts.write_text(
        "score\tsentence1\tsentence2\n" + "".join(f"{i % 5}\t{lines[i]}\t{lines[i + 10]}\n" for i in range(10))
    )
    shown = content("eval", f"hf:{bert}", out, "--data", texts, "--sts", sts, "--device", "cpu")
    tokens = transformers.AutoTokenizer.from_pretrained(bert)

    def embed(model: nn.Module, line: str) -> torch.Tensor:
        ids = torch.tensor([tokens(line, truncation=True, max_length=24)["input_ids"]])
        with torch.no_grad():
            hidden: torch.Tensor = model(input_ids=ids).last_hidden_state
        return hidden[0].mean(0)

    dense, smaller = hf_models.create(str(bert)), corp.load(out)
    cosines = [
        float(torch.cosine_similarity(embed(dense, line), embed(smaller, line), dim=0))
        for line in (json.loads(line)["text"] for line in texts.read_text().splitlines())
    ]
    assert shown["models"][1]["cosine"]["value"] == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)
    assert sum(cosines) / len(cosines) < 0.9995  # else the tolerance would hide a difference
    stats = pytest.importorskip("scipy.stats")
    alike = [
        float(torch.cosine_similarity(embed(smaller, lines[i]), embed(smaller, lines[i + 10]), dim=0))
        for i in range(10)
    ]
    expected = stats.spearmanr(alike, [i % 5 for i in range(10)]).statistic
    assert shown["models"][1]["spearman"]["value"] == pytest.approx(expected)
    assert shown["models"][0]["cosine"] is None
    assert shown["models"][0]["spearman"] is not None
    assert "give --dense MODEL, or --sts FILE" in failure("eval", f"hf:{bert}", "--data", texts)


def test_image_models_of_transformers(vit: Path, tmp_path: Path) -> None:
    photos, out = tmp_path / "photos", tmp_path / "out"
    for label in range(5):
        (photos / str(label)).mkdir(parents=True)
        for i in range(3):
            noise = np.random.default_rng(seed(10 * label + i)).integers(0, 255, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(noise).save(photos / str(label) / f"{i}.png")
    done = run("prune", f"hf:{vit}", "--calib", photos, "--mlp", 0.5, "-o", out, "--device", "cpu")
    assert done.exit_code == 0, done.output
    shown = content("eval", f"hf:{vit}", out, "--data", photos, "--device", "cpu")
    assert shown["labelled"]
    processor = transformers.AutoImageProcessor.from_pretrained(vit, backend="pil")
    right = 0
    model = corp.load(out)
    for label in range(5):
        for path in sorted((photos / str(label)).iterdir()):
            with torch.no_grad():
                pixels = processor(Image.open(path).convert("RGB"), return_tensors="pt")
                right += int(model(**pixels).logits.argmax()) == label
    assert shown["models"][1]["top1"]["value"] == pytest.approx(right / 15)
    assert shown["models"][1]["features"]["final"]["cosine"] < 1
    assert len(shown["models"][1]["features"]["blocks"]) == 2


def test_a_batch_is_bounded_by_its_logits_too(opt: Path) -> None:
    tokens = hf_models.tokenizer(str(opt))
    assert sequences_per_batch(tokens, 256) == 32
    assert sequences_per_batch(range(50_000), 2048) == 1  # anything with a length: 2048 x 50,000 logits, and no more
    assert sequences_per_batch(range(4_096), 2048) == 4


def test_no_keys_and_values_are_kept_for_evaluation(opt: Path) -> None:
    model = hf_models.create(str(opt))
    ids = torch.ones(1, 3, dtype=torch.int64)
    with without_cache(model, nn.Linear(1, 1)):
        assert model(input_ids=ids).past_key_values is None
    assert model(input_ids=ids).past_key_values is not None


def test_bench_times_texts(opt: Path, pruned: Path) -> None:
    shown = content("bench", f"hf:{opt}", pruned, "--seq-len", 16, "--batch", 2, "--rounds", 6, "--device", "cpu")
    assert shown["input"] == [16]
    for model in shown["models"]:
        assert model["tokens_per_second"] == pytest.approx(16 * model["throughput"]["p50"])
    assert shown["models"][1]["macs"] < shown["models"][0]["macs"]
    assert "tokens/s" in run("bench", pruned, "--batch", 1, "--rounds", 6, "--device", "cpu").output
    assert "--seq-len" in failure("bench", f"hf:{opt}", "--input", "3x8x8", "--batch", 1, "--device", "cpu")


def test_options_that_do_not_go_together(opt: Path, bert: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = f"hf:{opt}"
    assert "no data: give" in failure("eval", model)
    assert "--sts is for sentence encoders" in failure("eval", model, "--sts", texts)
    assert "--labels is for images" in failure("eval", model, "--data", texts, "--labels", "none")
    assert "combined with --per-document" in failure("eval", model, "--data", texts, "--stride", 2, "--per-document")
    assert "--tasks is for causal" in failure("eval", f"hf:{bert}", "--tasks", "arc")
    assert "take different data" in failure("eval", model, f"hf:{bert}", "--data", texts)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # whether it is installed or not
    assert "pip install lm-eval" in failure("eval", model, "--tasks", "arc")


def test_models_that_a_folder_cannot_feed(tmp_path: Path, texts: Path) -> None:
    config = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        architectures=["T5ForConditionalGeneration"],
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    assert "takes neither images alone nor texts alone" in failure("eval", f"hf:{tmp_path / 't5'}", "--data", texts)


def test_errors_are_data_errors_where_the_data_is_at_fault(opt: Path) -> None:
    with pytest.raises(DataError, match="no folder"):
        hf_models.tokenizer("/nowhere/at/all")
