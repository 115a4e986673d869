"""Save and load: bit-identical, whole or absent, and suspicious of strangers' files."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import corp
from corp import CorpError, Recipe, Result
from corp.errors import CorpWarning
from corp.planning.plan import Plan
from tests.helpers import small_timm
from tests.helpers.kinds import by_kind
from tests.helpers.models import FAMILIES, batches, build, run, vit
from tests.helpers.seeds import seed_all, seeded

NAME = small_timm.NAME  # blocks of 64 channels, a name that timm knows


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_timm.in_place():
        yield


def named_model(**args: object) -> nn.Module:
    seed_all(3)
    return timm.create_model(NAME, img_size=32, num_classes=7, **args).eval()


def inputs() -> list[torch.Tensor]:
    generator = seeded(4)
    return [torch.randn(8, 3, 32, 32, generator=generator) for _ in range(40)]


@pytest.fixture(scope="module")
def result() -> Result:
    return corp.prune(named_model(), inputs(), Recipe.paper(mlp=0.6, attn=0.5))


@pytest.fixture(scope="module")
def pristine(result: Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(result, tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def saved(pristine: Path, tmp_path: Path) -> Path:
    """A folder that a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def test_loading_gives_bit_identical_outputs(result: Result, saved: Path) -> None:
    loaded, x = corp.load(saved), inputs()[0]
    assert torch.equal(loaded(x), result.model(x))
    assert not loaded.training
    assert {path.name for path in saved.iterdir()} == {
        "model.safetensors", "plan.json", "corp.json", "report.json", "report.html", "README.md"
    }  # fmt: skip


def test_identity_and_preprocessing_come_back(saved: Path) -> None:
    manifest = json.loads((saved / "corp.json").read_text())
    identity = manifest["base"]["identity"]
    assert identity["architecture"] == NAME
    assert identity["args"] == {"num_classes": 7, "img_size": [32, 32]}
    loaded = corp.load(saved)
    assert loaded.num_classes == 7
    assert loaded.pretrained_cfg["mean"] == identity["preprocessing"]["mean"]


def test_a_model_pruned_twice_comes_back(result: Result, tmp_path: Path) -> None:
    twice = corp.prune(corp.load(_save(result, tmp_path / "once")), inputs(), Recipe.paper(mlp=0.3, attn=0.3))
    corp.save(twice, tmp_path / "twice")
    x = inputs()[0]
    assert torch.equal(corp.load(tmp_path / "twice")(x), twice.model(x))


def _save(result: Result, path: Path) -> Path:
    corp.save(result, path)
    return path


@pytest.mark.parametrize("family", by_kind(name for name in FAMILIES if not name.startswith("hf-")))
def test_models_without_a_name_load_into_a_dense_model(family: str, tmp_path: Path) -> None:
    model, data = build(family), batches(family)
    result = corp.prune(model, data, Recipe.paper(mlp=0.5, attn=0.5, intercept=True))
    with pytest.warns(CorpWarning, match=r"so loading it needs the dense model: corp\.load\(.*, base=model"):
        corp.save(result, tmp_path / "model")
    with pytest.raises(CorpError, match=r"corp\.load\(path, base=model\)"):
        corp.load(tmp_path / "model")
    loaded = corp.load(tmp_path / "model", base=build(family))
    assert torch.equal(run(loaded, data[0]), run(result.model, data[0]))


def test_unusual_arguments_are_noticed_when_saving(tmp_path: Path) -> None:
    """A model that its name does not rebuild must not be rebuilt from its name."""
    model = named_model(qkv_bias=False)
    result = corp.prune(model, inputs(), Recipe.paper(mlp=0.6))
    with pytest.warns(CorpWarning, match="loading it needs the dense model"):
        corp.save(result, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "corp.json").read_text())["base"] is None
    x = inputs()[0]
    assert corp.load(tmp_path / "model", base=model)(x).isfinite().all()


def test_half_precision_survives(tmp_path: Path) -> None:
    data = [x.bfloat16() for x in inputs()]
    result = corp.prune(named_model().bfloat16(), data, Recipe.paper(mlp=0.6))
    corp.save(result, tmp_path / "model")
    loaded = corp.load(tmp_path / "model")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded(data[0]), result.model(data[0]))


def test_existing_output_is_refused_unless_told(result: Result, saved: Path) -> None:
    with pytest.raises(CorpError, match=r"exists.*overwrite"):
        corp.save(result, saved)
    corp.save(result, saved, overwrite=True)
    corp.load(saved)
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


def test_a_failed_save_leaves_nothing(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("corp.storage.folder.write_tensors", full)
    with pytest.raises(CorpError, match="No space left"):
        corp.save(result, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_plans_survive_json(result: Result, tmp_path: Path) -> None:
    result.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == result.plan


def edit(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return apply


def kept(plan: dict) -> list[int]:
    return plan["sites"][0]["kept"][0]


def lying_header(folder: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


ATTACKS: dict[str, Callable[[Path], object]] = {
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "no plan": lambda f: (f / "plan.json").unlink(),
    "no manifest": lambda f: (f / "corp.json").unlink(),
    "truncated weights": lambda f: os.truncate(f / "model.safetensors", 1000),
    "weights are noise": lambda f: (f / "model.safetensors").write_bytes(os.urandom(5000)),
    "lying header": lying_header,
    "plan is not JSON": lambda f: (f / "plan.json").write_text("{"),
    "plan is a list": lambda f: (f / "plan.json").write_text("[]"),
    "deep nesting": lambda f: (f / "plan.json").write_text("[" * 100_000),
    "index out of range": edit("plan.json", lambda p: kept(p).__setitem__(-1, 10**9)),
    "negative index": edit("plan.json", lambda p: kept(p).__setitem__(0, -1)),
    "index twice": edit("plan.json", lambda p: kept(p).__setitem__(0, kept(p)[1])),
    "index is text": edit("plan.json", lambda p: kept(p).__setitem__(0, "0")),
    "fewer channels than the weights": edit("plan.json", lambda p: kept(p).pop()),
    "site of another model": edit("plan.json", lambda p: p["sites"][0].__setitem__("name", "blocks.99.mlp")),
    "site twice": edit("plan.json", lambda p: p["sites"].append(p["sites"][0])),
    "other kind": edit("plan.json", lambda p: p["sites"][0].__setitem__("kind", "mlp")),
    "other width": edit("plan.json", lambda p: p["sites"][0].__setitem__("width", 10**12)),
    "not a number": edit("plan.json", lambda p: p["sites"][0]["costs"][0].__setitem__("J", float("nan"))),
    "plan of the future": edit("plan.json", lambda p: p.__setitem__("version", 99)),
    "format of the future": edit("corp.json", lambda m: m.__setitem__("version", 99)),
    "other format": edit("corp.json", lambda m: m.__setitem__("format", "zip")),
    "unknown adapter": edit("corp.json", lambda m: m["base"].__setitem__("adapter", "os")),
    "base is a list": edit("corp.json", lambda m: m.__setitem__("base", [])),
    "no base": edit("corp.json", lambda m: m.pop("base")),
    "hub name": edit("corp.json", lambda m: m["base"]["identity"].__setitem__("architecture", "hf-hub:evil/model")),
    "path for a name": edit("corp.json", lambda m: m["base"]["identity"].__setitem__("architecture", "local-dir:/etc")),
    "foreign argument": edit("corp.json", lambda m: m["base"]["identity"]["args"].__setitem__("checkpoint_path", "/x")),
    "absurd argument": edit("corp.json", lambda m: m["base"]["identity"]["args"].__setitem__("img_size", "big")),
    "other classes": edit("corp.json", lambda m: m["base"]["identity"]["args"].__setitem__("num_classes", 10)),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_damaged_or_hostile_folders_end_in_a_clear_error(saved: Path, attack: str) -> None:
    ATTACKS[attack](saved)
    with pytest.raises(CorpError) as caught:
        corp.load(saved)
    assert len(str(caught.value)) > 20


def test_links_out_of_the_folder_are_not_followed(saved: Path, tmp_path: Path) -> None:
    shutil.move(saved / "model.safetensors", tmp_path / "elsewhere.safetensors")
    (saved / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(CorpError, match="link that leaves its folder"):
        corp.load(saved)


def test_loading_what_is_not_a_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(CorpError, match="not a folder that corp saved"):
        corp.load(tmp_path / "nothing")
    with pytest.raises(CorpError, match="takes the Result"):
        corp.save(vit(), tmp_path / "x")  # type: ignore[arg-type]


@pytest.mark.parametrize("profile", ["standard", "compat"])
def test_plain_timm_creates_the_other_profiles(result: Result, profile: str, tmp_path: Path) -> None:
    corp.save(result, tmp_path / "out", profile=profile)
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    x = inputs()[0]
    torch.testing.assert_close(model(x), result.model(x), rtol=0, atol=1e-5)
    assert type(model) is type(named_model())
    assert model.num_classes == 7
    assert tuple(model.pretrained_cfg["mean"]) == named_model().pretrained_cfg["mean"]
    assert model.blocks[0].mlp.fc1.out_features == (77 if profile == "standard" else 192)  # ceil(0.4 x 192)


def test_mlp_widths_as_a_ratio_that_timm_takes() -> None:
    from corp.adapters.timm_export import resize

    packed = {"architecture": "vit_giant_patch14_dinov2", "args": {}}  # gate and up in one linear
    wanted = dict.fromkeys((f"blocks.{i}.mlp" for i in range(40)), 1001)
    assert int(resize(packed, wanted, False)["args"]["mlp_ratio"] * 1536) == 2002
    with pytest.raises(CorpError, match=r"7 to 1001 channels wide.*one mlp_ratio.*compat"):
        resize(packed, {**wanted, "blocks.3.mlp": 7}, False)


def test_saved_files_may_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        corp.save(corp.prune(named_model(), inputs(), Recipe.paper(mlp=0.6)), tmp_path / "model")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {0o644}
