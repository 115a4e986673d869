"""Half-precision checkpoints: pruned in float32 if told so, saved as they came."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import corp
from corp.cli.main import app
from corp.data import digits
from tests.helpers import hf_folders, small_timm
from tests.helpers.kinds import by_kind
from tests.helpers.seeds import seed_all, seeded

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
RECIPES = {"paper": corp.Recipe.paper(mlp=0.5, attn=0.5), "default": corp.Recipe(mlp=0.5, sequential=False)}
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_timm.in_place():
        yield


def prune(model: object, data: Path, out: Path, *options: object) -> Any:
    arguments = ("prune", model, "--calib", data, "--sparsity", 0.5, "-o", out, "--device", "cpu", *options)
    made = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert made.exit_code == 0, made.output
    return made


def dtypes(folder: Path) -> set[torch.dtype]:
    return {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(hf_folders.sentences(40, 20)))
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for i in range(4):
        noise = torch.randint(0, 255, (40, 40, 3), dtype=torch.uint8, generator=seeded(i))
        Image.fromarray(noise.numpy()).save(folder / f"{i}.png")
    return folder


@pytest.mark.parametrize("name", by_kind(HALF, ["bfloat16"]))
def test_transformers_checkpoints_keep_their_dtype(name: str, texts: Path, tmp_path: Path) -> None:
    dtype = HALF[name]
    hf.OPTForCausalLM.from_pretrained(hf_folders.opt(tmp_path / "single")).to(dtype).save_pretrained(tmp_path / "half")
    hf_folders.tokenizer(bos="</s>").save_pretrained(tmp_path / "half")
    prune(tmp_path / "half", texts, tmp_path / "in-half")
    prune(tmp_path / "half", texts, tmp_path / "in-single", "--dtype", "float32")
    for folder in ("in-half", "in-single"):
        assert dtypes(tmp_path / folder) == {dtype}
        model: Any = corp.load(tmp_path / folder)
        assert model(torch.tensor([[1, 4, 5]])).logits.dtype == dtype
    # The arithmetic was float32's: what was saved is its result, rounded once.
    record = json.loads((tmp_path / "in-single" / "corp.json").read_text())
    assert record["calibration"]["dtype"] == "float32"
    wide = hf.OPTForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32)
    wide.save_pretrained(tmp_path / "wide")
    hf_folders.tokenizer(bos="</s>").save_pretrained(tmp_path / "wide")
    prune(tmp_path / "wide", texts, tmp_path / "all-single")
    assert dtypes(tmp_path / "all-single") == {torch.float32}
    rounded = load_file(tmp_path / "in-single" / "model.safetensors")
    for key, tensor in load_file(tmp_path / "all-single" / "model.safetensors").items():
        assert torch.equal(rounded[key], tensor.to(dtype)), key


def test_asking_for_half_precision_saves_it(texts: Path, tmp_path: Path) -> None:
    hf_folders.opt(tmp_path / "single")
    prune(tmp_path / "single", texts, tmp_path / "out", "--dtype", "bfloat16")
    assert dtypes(tmp_path / "out") == {torch.bfloat16}


@pytest.mark.parametrize("name", by_kind(HALF, ["bfloat16"]))
def test_timm_weights_keep_their_dtype(name: str, photos: Path, tmp_path: Path) -> None:
    dtype = HALF[name]
    seed_all(0)
    save_file(timm.create_model(small_timm.NAME).to(dtype).state_dict(), tmp_path / "half.safetensors")
    options = ("--weights", tmp_path / "half.safetensors", "--batch-size", 2)
    for folder, more in (("in-half", ()), ("in-single", ("--dtype", "float32"))):
        prune(small_timm.NAME, photos, tmp_path / folder, *options, *more, "--eval-data", photos)
        assert dtypes(tmp_path / folder) == {dtype}
        assert (
            corp.load(tmp_path / folder)(torch.zeros(1, 3, small_timm.SIDE, small_timm.SIDE, dtype=dtype)).dtype
            == dtype
        )


@cache
def plan_in(dtype: torch.dtype, recipe: str) -> corp.Plan:
    """Of the built-in model; both half precisions are compared with the same."""
    model = digits.load_model().to(dtype)
    images = digits.load_split().calibration_images[:256].to(dtype).split(64)
    return corp.plan(model, corp.calibrate(model, images), RECIPES[recipe])


@pytest.mark.parametrize(("name", "same", "cost"), [("bfloat16", 0.85, 0.03), ("float16", 0.95, 0.01)])
@pytest.mark.parametrize("recipe", by_kind(RECIPES, ["paper"]))
def test_how_far_the_plan_moves_in_half_precision(recipe: str, name: str, same: float, cost: float) -> None:
    """Of the built-in model's plan at 50 %: the share of what every site keeps, and its predicted error."""
    plans = [plan_in(dtype, recipe) for dtype in (torch.float32, HALF[name])]
    for single, half in zip(*(plan.sites for plan in plans), strict=True):
        kept = [{(g, i) for g, group in enumerate(site.kept) for i in group} for site in (single, half)]
        assert len(kept[0] & kept[1]) >= same * len(kept[0]), single.name
        assert half.relative_error == pytest.approx(single.relative_error, rel=cost), single.name
