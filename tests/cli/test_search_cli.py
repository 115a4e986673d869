"""Searches, ranges and deployment data on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import corp
from corp.measure.cost import count_params
from corp.measure.timing import Ratio
from corp.steps.allocation.budget import Sample
from corp.surgery.apply import history
from tests.helpers import small_timm
from tests.helpers.command import content, failure, run
from tests.helpers.seeds import seed_all, seeded

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
MODEL = small_timm.NAME


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_timm.in_place():
        yield


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed_all(0)
    path = tmp_path_factory.mktemp("weights") / "vit.safetensors"
    model = timm.create_model(MODEL)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that nothing in it is nearly linear
            if parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[1] ** 0.5)
    save_file(model.state_dict(), path)
    return path


def pictures(folder: Path, count: int, *, dark: bool) -> Path:
    for i in range(count):
        noise = torch.randint(0, 255, (20, 20, 3), dtype=torch.uint8, generator=seeded(i))
        noise = noise // 16 if dark else noise
        Image.fromarray(noise.numpy()).resize((80, 80)).save(folder / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("photos"), 16, dark=False)


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("day"), 64, dark=False)


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("night"), 32, dark=True)


def test_prune_to_an_agreement(weights: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    common = (MODEL, "--weights", weights, "-o", out, "--min-agreement", 0.5, "--batch-size", 2)
    shown = content("prune", *common, "--calib", photos)
    why = shown["why"]["agreement"]
    assert (shown["samples"], why["samples"]) == (16, 4)
    assert shown["recipe"]["target_macs"] == why["chosen"]
    assert shown["macs"]["after"] <= why["chosen"] * shown["macs"]["before"]
    assert history(corp.load(out))[-1].why["agreement"] == why
    assert "--calib" in failure("prune", *common, "--overwrite", "--stats", statistics(weights, photos, tmp_path))
    assert "not both" in failure("prune", *common, "--overwrite", "--calib", photos, "--target-macs", 0.5)


def statistics(weights: Path, photos: Path, tmp_path: Path) -> Path:
    out = tmp_path / "stats"
    done = run("calibrate", MODEL, "--weights", weights, "--calib", photos, "-o", out, "--batch-size", 4)
    assert done.exit_code == 0, done.output
    return out


def test_ranges_and_targets(weights: Path, photos: Path) -> None:
    common = ("plan", MODEL, "--weights", weights, "--calib", photos, "--batch-size", 4)
    shown = content(*common, "--target-macs", 0.8, "--override", "blocks.0.*:mlp=0-0.05")
    first = next((site for site in shown["sites"] if site["name"] == "blocks.0.mlp"), None)
    assert first is None or first["achieved"] <= 0.05
    assert shown["why"]["allocation"]["target"] == 0.8
    assert "only under a target" in failure(*common, "--mlp", 0.5, "--override", "blocks.0.*:mlp=0-0.05")
    text = " ".join(run(*common, "--target-macs", 0.8).output.split())
    assert "0.800 of the dense macs, allocation gain" in text


def test_prune_says_what_merging_would_bring(weights: Path, photos: Path, tmp_path: Path) -> None:
    common = ("prune", MODEL, "--weights", weights, "--calib", photos, "--batch-size", 4, "--preset", "paper")
    done = run(*common, "-o", tmp_path / "out", "--target-macs", 0.7)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "try --merge-tokens" in said
    assert "on 8 held-out samples" in said
    shares = run(*common, "-o", tmp_path / "shares", "--mlp", 0.5)
    assert "merging tokens" not in shares.output


def test_a_target_of_time(weights: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(_sample: Sample, dense: nn.Module, other: nn.Module) -> Ratio:
        value = count_params(dense) / count_params(other)
        return Ratio(value, value, value)

    monkeypatch.setattr("corp.steps.allocation.latency.compare_times", timed)
    common = ("plan", MODEL, "--weights", weights, "--calib", photos, "--batch-size", 4, "--target-latency", 0.8)
    found = content(*common)["why"]["latency"]
    assert 0.75 < found["measured"]["value"] <= 0.8
    assert set(found["table"]) == {"mlp", "attn", "vo"}
    assert "of the dense model's (0." in " ".join(run(*common).output.split())


def test_deployment_data_is_held_against_the_plan(weights: Path, day: Path, night: Path) -> None:
    common = ("plan", MODEL, "--weights", weights, "--calib", day, "--batch-size", 16, "--mlp", 0.5)
    found = {
        name: content(*common, "--deploy-data", folder, *more)["shift"]
        for name, folder, more in (("same", day, ()), ("night", night, ()), ("mixed", night, ("--mix-deploy",)))
    }
    assert not any(site["alarming"] for site in found["same"]["sites"])
    assert any(site["alarming"] for site in found["night"]["sites"])
    assert found["night"]["samples"] == {"calibration": 64, "deployment": 32}
    assert found["mixed"]["samples"] == {"calibration": 96, "deployment": 32}
    for before, after in zip(found["night"]["sites"], found["mixed"]["sites"], strict=True):
        assert after["deployed"] < before["deployed"]
    shown = run(*common, "--deploy-data", night).output
    assert "warning" in shown
    assert "calibration against deployment" in shown


def test_deployment_options_that_make_no_sense_are_errors(weights: Path, photos: Path, tmp_path: Path) -> None:
    common = ("plan", MODEL, "--weights", weights, "--calib", photos, "--mlp", 0.5)
    assert "--deploy-data" in failure(*common, "--mix-deploy")
    assert "does not exist" in failure(*common, "--deploy-data", tmp_path / "nothing")
