"""The profiles that need no corp: padded or resized, equal to the pruned model, read by timm or transformers alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import corp
from corp import CorpError, Recipe, Result
from corp.adapters import torchvision_import as _torchvision
from corp.recipe import KINDS
from corp.storage import folder as storage
from tests.helpers import hf_folders, models, rotary_models
from tests.helpers.command import run
from tests.helpers.kinds import by_kind
from tests.helpers.seeds import seed_all

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
BOTH = Recipe.paper(mlp=0.5, attn=0.5)
ROTARY = [f"rotary-{name}" for name in rotary_models.FAMILIES]
PROFILES = ("standard", "compat")
EXPORTED = ["hf-bert", "hf-whisper", "hf-dinov2-swiglu", "rotary-llama"]


def pruned(family: str, recipe: Recipe = BOTH, dtype: torch.dtype = torch.float64) -> tuple[Result, list[Any]]:
    """A pruned model and batches for it; rotary ones get no padding here."""
    if family in ROTARY:
        data = [{"input_ids": batch["input_ids"]} for batch in rotary_models.batches()]
        model = rotary_models.build(family.removeprefix("rotary-"), dtype)
    else:
        data, model = models.batches(family, dtype=dtype), models.build(family, dtype)
    return models.prune(model, data, recipe), data


def reread(model: nn.Module, folder: Path) -> Any:
    return type(model).from_pretrained(folder, dtype="auto").eval()  # type: ignore[attr-defined]


def mlp_shapes(model: nn.Module) -> set[int]:
    return {site.width for site in corp.find_sites(model).mlp}


HF = [name for name in models.FAMILIES if name.startswith("hf-")]


@pytest.mark.parametrize("family", by_kind(HF + ROTARY, EXPORTED))
def test_both_profiles_compute_what_the_pruned_model_does(family: str, tmp_path: Path) -> None:
    result, data = pruned(family, Recipe.paper(mlp=0.5, attn=0.5, vo=0.25))
    expected = models.run(result.model, data[0])
    dense = models.build(family) if family not in ROTARY else rotary_models.build(family.removeprefix("rotary-"))
    for profile in PROFILES:
        corp.save(result, tmp_path / profile, profile=profile)
        model = reread(result.model, tmp_path / profile)
        # Gemma multiplies by a constant that casting to float64 left in float32.
        torch.testing.assert_close(
            models.run(model, data[0]), expected, rtol=0, atol=1e-5 if "gemma" in family else 1e-9
        )
        assert mlp_shapes(model) == mlp_shapes(dense if profile == "compat" else result.model)
        sites = corp.find_sites(model)
        assert {site.width for site in (*sites.attention, *sites.values)} == {8}
        assert type(model) is type(result.model)


@pytest.mark.parametrize("family", ["hf-vit", "hf-deit"])
@pytest.mark.parametrize("basis", ["coordinates", "subspace"])
def test_heads_of_one_width_need_no_padding_where_the_config_can_say_it(
    family: str, basis: str, tmp_path: Path
) -> None:
    result, data = pruned(family, Recipe.paper(mlp=0.5, attn=0.5, equal_heads=True, attn_basis=basis))
    corp.save(result, tmp_path / "vit", profile="standard")
    model = reread(result.model, tmp_path / "vit")
    torch.testing.assert_close(models.run(model, data[0]), models.run(result.model, data[0]), rtol=0, atol=1e-9)
    assert json.loads((tmp_path / "vit" / "config.json").read_text())["head_dim"] == 4
    assert {tuple(p.shape) for p in model.parameters()} == {tuple(p.shape) for p in result.model.parameters()}


def test_what_was_removed_is_zero_and_the_rest_is_where_it_was(tmp_path: Path) -> None:
    """Grouped rotary heads and packed, transposed ones, by indices that are worked out here."""
    result, _ = pruned("rotary-llama")
    corp.save(result, tmp_path / "llama", profile="compat")
    state, small = load_file(tmp_path / "llama" / "model.safetensors"), result.model.state_dict()
    for site in result.plan.sites:
        if site.kind == "attn":
            wide = state[f"{site.name}.q_proj.weight"].view(4, 8, -1)
            narrow = small[f"{site.name}.q_proj.weight"].view(4, 4, -1)
            for head in range(4):
                kept = list(site.kept[head // 2])
                assert torch.equal(wide[head, kept], narrow[head])
                assert not wide[head, [i for i in range(8) if i not in kept]].any()
        else:
            (kept,) = map(list, site.kept)
            assert torch.equal(state[f"{site.name}.gate_proj.weight"][kept], small[f"{site.name}.gate_proj.weight"])
            assert torch.equal(state[f"{site.name}.down_proj.weight"][:, kept], small[f"{site.name}.down_proj.weight"])
            assert int((state[f"{site.name}.down_proj.weight"] != 0).any(0).sum()) == len(kept)

    result, _ = pruned("hf-gpt2")
    corp.save(result, tmp_path / "gpt2", profile="compat")
    state, small = load_file(tmp_path / "gpt2" / "model.safetensors"), result.model.state_dict()
    for site in result.plan.sites:
        if site.kind == "attn":
            name = f"{site.name}.c_attn.weight"
            wide = state[name if name in state else name.removeprefix("transformer.")]  # (in, q k v)
            narrow = small[name]
            assert torch.equal(wide[:, -24:], narrow[:, -24:])  # values
            keys = [24 + 8 * head + i for head, kept in enumerate(site.kept) for i in kept]
            assert torch.equal(wide[:, keys], narrow[:, 12:24])
            assert int((wide != 0).any(0).sum()) == narrow.shape[1]


def test_a_model_pruned_twice(tmp_path: Path) -> None:
    once, data = pruned("hf-opt", Recipe.paper(mlp=0.3, attn=0.25))
    twice = models.prune(once.model, data, Recipe.paper(mlp=0.3, attn=0.5))
    for profile in PROFILES:
        corp.save(twice, tmp_path / profile, profile=profile)
        model = reread(twice.model, tmp_path / profile)
        torch.testing.assert_close(models.run(model, data[0]), models.run(twice.model, data[0]), rtol=0, atol=1e-9)
    assert len(json.loads((tmp_path / "compat" / "corp-export.json").read_text())["plans"]) == 2


def test_widths_that_the_config_cannot_say(tmp_path: Path) -> None:
    uneven, data = pruned("hf-bert", Recipe.paper(mlp=0.5, attn=0, overrides={"encoder.layer.0.*": {"mlp": 0.25}}))
    with pytest.raises(CorpError, match=r"20 to 30 channels wide.*one intermediate_size.*compat"):
        corp.save(uneven, tmp_path / "x", profile="standard")
    corp.save(uneven, tmp_path / "uneven", profile="compat")
    model = reread(uneven.model, tmp_path / "uneven")
    torch.testing.assert_close(models.run(model, data[0]), models.run(uneven.model, data[0]), rtol=0, atol=1e-9)
    ratio, _ = pruned("hf-dinov2", Recipe.paper(mlp=0.3))
    with pytest.raises(CorpError, match=r"cannot say that .*mlp has 34 of 48 channels; use profile='compat'"):
        corp.save(ratio, tmp_path / "x", profile="standard")
    assert [path.name for path in tmp_path.iterdir()] == ["uneven"]


def test_towers_may_have_widths_of_their_own(tmp_path: Path) -> None:
    towers, data = pruned("hf-siglip", Recipe.paper(mlp=0.5, overrides={"text_model.*": {"mlp": 0.25}}))
    corp.save(towers, tmp_path / "towers", profile="standard")
    config = json.loads((tmp_path / "towers" / "config.json").read_text())
    assert [config[f"{tower}_config"]["intermediate_size"] for tower in ("text", "vision")] == [30, 20]
    model = reread(towers.model, tmp_path / "towers")
    torch.testing.assert_close(models.run(model, data[0]), models.run(towers.model, data[0]), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("family", "field"), [("rotary-llama", "mlp_bias"), ("hf-opt-no-biases", "enable_bias")])
def test_biases_that_compensation_made(family: str, field: str, tmp_path: Path) -> None:
    result, data = pruned(family, Recipe.paper(mlp=0.5, attn=0.5, intercept=True))
    corp.save(result, tmp_path / "standard", profile="standard")
    model = reread(result.model, tmp_path / "standard")
    assert getattr(model.config, field) is True
    torch.testing.assert_close(models.run(model, data[0]), models.run(result.model, data[0]), rtol=0, atol=1e-9)
    with pytest.raises(CorpError, match=r"made 2 biases, such as .*intercept=False"):
        corp.save(result, tmp_path / "compat", profile="compat")


def test_biases_that_no_config_holds(tmp_path: Path) -> None:
    result, _ = pruned("rotary-phi3", Recipe.paper(mlp=0.5, intercept=True))
    with pytest.raises(CorpError, match=r"no place for in transformers; prune it again with intercept=False"):
        corp.save(result, tmp_path / "standard", profile="standard")
    assert list(tmp_path.iterdir()) == []


def test_a_generation_config_that_the_library_would_not_write(tmp_path: Path) -> None:
    """Sampling settings without do_sample, as Llama 2 was published with: loaded with a warning, never saved."""
    model = rotary_models.build("llama", torch.float32)
    model.generation_config.temperature = 0.6
    data = [{"input_ids": batch["input_ids"]} for batch in rotary_models.batches()]
    result = models.prune(model, data, Recipe.paper(mlp=0.5))
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        model.save_pretrained(tmp_path / "library")
    corp.save(result, tmp_path / "ours", profile="standard")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert loaded.generation_config.temperature == 0.6
    assert loaded.generation_config.eos_token_id == model.generation_config.eos_token_id == 2


def test_half_precision_is_compared_in_single(tmp_path: Path) -> None:
    for family in ("rotary-gemma", "rotary-llama-ungrouped-tied"):
        result, data = pruned(family, dtype=torch.bfloat16)
        corp.save(result, tmp_path / family, profile="compat")
        record = json.loads((tmp_path / family / "corp-export.json").read_text())
        assert 0 <= record["difference"] < 1e-5
        assert {tensor.dtype for tensor in load_file(tmp_path / family / "model.safetensors").values()} == {
            torch.bfloat16
        }
        model = reread(result.model, tmp_path / family)
        assert model.dtype == torch.bfloat16
        assert models.run(model, data[0]).isfinite().all()


def test_an_export_that_disagrees_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import corp.storage.export.profiles as profiles

    result, _ = pruned("hf-opt", dtype=torch.float32)
    real = profiles.pad

    def wrong(*args: Any) -> dict[str, Tensor]:
        state = real(*args)
        name = "model.decoder.layers.1.self_attn.q_proj.weight"
        state[name] = state[name].roll(1, 0)  # queries one dimension away from their keys
        return state

    monkeypatch.setattr(profiles, "pad", wrong)
    with pytest.raises(CorpError, match=r"disagrees with the pruned one: by .* more than 0\.0001; nothing was written"):
        corp.save(result, tmp_path / "x", profile="compat")
    assert list(tmp_path.iterdir()) == []


def test_models_of_no_library_are_refused(tmp_path: Path) -> None:
    result, _ = pruned("torch-encoder")
    with pytest.raises(CorpError, match="profile='compact'"):
        corp.save(result, tmp_path / "x", profile="standard")
    with pytest.raises(CorpError, match="profile 'small' is not one of compact, standard, compat"):
        corp.save(result, tmp_path / "x", profile="small")
    assert list(tmp_path.iterdir()) == []


PLAIN = {
    "hf-opt": "AutoModelForCausalLM",
    "hf-gpt2": "AutoModelForCausalLM",
    "rotary-llama": "AutoModelForCausalLM",
    "rotary-gpt-neox": "AutoModelForCausalLM",
    "hf-bert": "AutoModel",
    "hf-vit": "AutoModelForImageClassification",
}


def expect(model: Any, batch: dict[str, Tensor], folder: Path, auto: str) -> None:
    """Put inputs, the pruned model's outputs and what it generates (with its cache, from padded prompts) beside."""
    with torch.no_grad():
        outputs = model(**batch)
        saved = {f"in.{key}": value for key, value in batch.items()}
        saved["out.states"] = outputs["logits"] if "logits" in outputs else outputs["last_hidden_state"]
        if model.can_generate():
            saved["out.tokens"] = model.generate(**batch, max_new_tokens=6, do_sample=False)
    save_file({key: value.contiguous() for key, value in saved.items()}, folder / "expected.safetensors")
    (folder / "auto.txt").write_text(auto)


def test_a_process_without_corp_computes_and_generates_the_same(tmp_path: Path) -> None:
    """Prompts of unequal length, padded on the left; the cache at work in generate."""
    for family, auto in PLAIN.items():
        result, data = pruned(family)
        batch = {key: value[:3] for key, value in data[0].items()}
        if "input_ids" in batch:
            mask = torch.ones_like(batch["input_ids"])
            mask[0, :4], mask[1, :1] = 0, 0
            batch = {"input_ids": batch["input_ids"] * mask, "attention_mask": mask}
        for profile in PROFILES:
            folder = tmp_path / f"{family}-{profile}"
            corp.save(result, folder, profile=profile)
            expect(result.model, batch, folder, auto)
    apart = without_corp(tmp_path)
    assert len(apart) == 2 * len(PLAIN)
    assert all(value < 1e-9 for value in apart.values()), apart


def without_corp(root: Path) -> dict[str, float]:
    """The largest difference in each folder under `root`, found by a process that cannot import corp."""
    script, torchvision = Path(__file__).parents[1] / "helpers" / "without_corp.py", _torchvision.__file__
    command = [sys.executable, str(script), torchvision, *sorted(map(str, root.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}


TIMM_RECIPES = {
    "attn": Recipe.paper(attn=0.6),
    "all": Recipe.paper(**dict.fromkeys(KINDS, 0.3)),
    "uneven": Recipe.paper(mlp=0.6, attn=0.4, overrides={"blocks.1.*": {"mlp": 0.3, "attn": 0.7}}),
}


@pytest.mark.slow
def test_a_process_without_corp_runs_timm_models_of_all_widths(tmp_path: Path) -> None:
    """MLP widths that no whole ratio gives, Q/K padded back; widths of their own for each block in compat alone."""
    seed_all(3)
    model: Any = timm.create_model("test_vit", img_size=32, num_classes=7).eval()
    data = [torch.randn(8, 3, 32, 32) for _ in range(10)]
    stats = corp.calibrate(model, data)
    for name, recipe in TIMM_RECIPES.items():
        result = corp.apply(model, stats, corp.plan(model, stats, recipe))
        if name == "uneven":
            with pytest.raises(CorpError, match=r"timm has one mlp_ratio for all of them; use profile='compat'"):
                corp.save(result, tmp_path / "refused", profile="standard")
        for profile in PROFILES if name != "uneven" else ("compat",):
            folder = tmp_path / f"{name}-{profile}"
            corp.save(result, folder, profile=profile)
            expected = {"in.input": data[0], "out.states": models.run(result.model, data[0])}
            save_file(expected, folder / "expected.safetensors")
            (folder / "auto.txt").write_text("timm")
            width = timm.create_model(f"local-dir:{folder}").blocks[0].mlp.fc1.out_features
            dense = model.blocks[0].mlp.fc1.out_features
            assert width == (result.model.blocks[0].mlp.fc1.out_features if profile == "standard" else dense)
    apart = without_corp(tmp_path)
    assert len(apart) == 2 * len(TIMM_RECIPES) - 1
    assert all(value < 1e-5 for value in apart.values()), apart


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What corp prune makes of an OPT with its tokenizer."""
    root = tmp_path_factory.mktemp("opt")
    hf_folders.opt(root / "dense")
    hf_folders.texts(root / "texts.jsonl")
    made = run(
        *("prune", f"hf:{root / 'dense'}", "--calib", root / "texts.jsonl", "--mlp", 0.5, "--attn", 0.25),
        *("-o", root / "pruned", "--device", "cpu"),
    )
    assert made.exit_code == 0, made.output
    return root


def test_export_on_the_command_line(opt: Path, tmp_path: Path) -> None:
    for profile in PROFILES:
        made = run("export", opt / "pruned", "--profile", profile, "-o", tmp_path / profile, "--json")
        assert made.exit_code == 0, made.output
        content = json.loads(made.stdout)
        assert content["difference"] < 1e-5
        assert content["params"]["pruned"] < content["params"]["written"]
        assert "tokenizer.json" in content["companions"]
        tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / profile)
        batch = tokenizer(["the cat sat on the mat", "a dog"], return_tensors="pt", padding=True, padding_side="left")
        batch.pop("token_type_ids", None)
        theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / profile)
        ours: Any = corp.load(opt / "pruned")
        torch.testing.assert_close(models.run(theirs, dict(batch)), models.run(ours, dict(batch)), rtol=0, atol=1e-5)
        tokens = [model.generate(**batch, max_new_tokens=5, do_sample=False).tolist() for model in (theirs, ours)]
        assert tokens[0] == tokens[1]
        assert (tmp_path / profile / "generation_config.json").is_file()
        # It is a model for the other commands too, with or without hf:
        assert run("inspect", tmp_path / profile).exit_code == 0
    assert theirs.config.ffn_dim == 32
    assert hf.OPTConfig.from_pretrained(tmp_path / "standard").ffn_dim == 16


def test_export_says_what_it_did_and_refuses_what_it_cannot(opt: Path, tmp_path: Path) -> None:
    made = run("export", opt / "pruned", "--to", "hf", "-o", tmp_path / "out")
    assert made.exit_code == 0, made.output
    assert "largest difference" in made.output
    assert f"OPTForCausalLM.from_pretrained('{tmp_path / 'out'}')" in made.output
    assert "OPTForCausalLM.from_pretrained('out')" in (tmp_path / "out" / "README.md").read_text()
    for arguments, message in (
        ((opt / "pruned", "-o", tmp_path / "out"), "exists; choose another output"),
        ((opt / "dense", "-o", tmp_path / "new"), "corp.json"),
        ((tmp_path / "out", "-o", tmp_path / "new"), "corp.json"),
    ):
        failed = run("export", *arguments)
        assert failed.exit_code == 1
        assert message in " ".join(failed.output.split())
    for option, wrong in (("--profile", "compact"), ("--to", "tflite")):
        failed = run("export", opt / "pruned", "-o", tmp_path / "new", option, wrong)
        assert failed.exit_code == 2
        assert f"'{wrong}' is not one of" in failed.output
    assert run("export", opt / "pruned", "-o", tmp_path / "out", "--overwrite").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def loaded(opt: Path) -> Result:
    """A model that knows where it was loaded from, pruned."""
    model = hf.OPTForCausalLM.from_pretrained(opt / "dense").eval()
    data = [{"input_ids": torch.randint(4, 24, (20, 12))} for _ in range(3)]
    return corp.prune(model, data, Recipe.paper(mlp=0.5))


def test_the_tokenizer_comes_from_where_the_model_was_loaded(opt: Path, loaded: Result, tmp_path: Path) -> None:
    for profile in ("compact", "standard"):
        corp.save(loaded, tmp_path / profile, profile=profile)
        assert len(hf.AutoTokenizer.from_pretrained(tmp_path / profile)) == 24
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "tokenizer.json").symlink_to(opt / "dense" / "tokenizer.json")
    from corp.adapters.hf_export import companions

    assert companions([str(tmp_path / "linked"), "no/such-model", "hf:/nowhere"], tmp_path) == []
    assert storage.PROFILES == ("compact", "standard", "compat")


def test_a_given_place_for_the_tokenizer_comes_first(loaded: Result, tmp_path: Path) -> None:
    hf_folders.tokenizer(both_ends=True).save_pretrained(tmp_path / "given")
    for profile in ("compact", "standard"):
        corp.save(loaded, tmp_path / profile, profile=profile, companions=[tmp_path / "given"])
        assert hf.AutoTokenizer.from_pretrained(tmp_path / profile)("cat")["input_ids"] == [3, 6, 1]  # <s> cat </s>


@pytest.mark.parametrize(
    ("failure", "seen"), [(OSError(28, "No space left on device"), CorpError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
@pytest.mark.parametrize("profile", ["compact", "standard"])
def test_a_copy_of_the_tokenizer_that_ends_halfway_leaves_nothing(
    loaded: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str, failure: BaseException, seen: Any
) -> None:
    def halfway(_source: object, target: Path) -> None:
        assert not (tmp_path / "out").exists()  # so that even a kill leaves no folder that lacks something
        target.write_text("{")
        raise failure

    monkeypatch.setattr("corp.adapters.hf_export.shutil.copyfile", halfway)
    with pytest.raises(seen):
        corp.save(loaded, tmp_path / "out", profile=profile)
    assert list(tmp_path.iterdir()) == []


def test_pruning_again_finds_the_tokenizer_and_says_when_there_is_none(opt: Path, tmp_path: Path) -> None:
    calib = ("--calib", opt / "texts.jsonl", "--samples", 8, "--device", "cpu")
    shutil.copytree(opt / "pruned", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    made = run("prune", tmp_path / "bare", *calib, "--mlp", 0.5, "-o", tmp_path / "again")
    assert "has no tokenizer" not in made.output  # it is where the first model came from
    assert len(hf.AutoTokenizer.from_pretrained(tmp_path / "again")) == 24
    shutil.copytree(opt / "dense", tmp_path / "dense", ignore=shutil.ignore_patterns("tokenizer*"))
    stats = tmp_path / "stats"
    assert run("calibrate", tmp_path / "dense", *calib, "--tokenizer", opt / "dense", "-o", stats).exit_code == 0
    made = run("prune", tmp_path / "dense", "--stats", stats, "--mlp", 0.5, "-o", tmp_path / "none", "--device", "cpu")
    assert "has no tokenizer.json" in " ".join(made.output.split())
