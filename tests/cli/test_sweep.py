"""Sweeps: one pass over the data serves every recipe and every calibration size, and a kill loses little."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import corp
from corp.calibration.settings import Settings
from corp.data.images import ImageBatches
from corp.errors import DataError, RecipeError, StorageError
from corp.evaluate import sweep as sweeping
from corp.evaluate.sweep import Sweep, grid
from corp.report import sweeps
from tests.helpers import small_timm
from tests.helpers.command import run
from tests.helpers.models import images, vit

MODEL = small_timm.NAME
GRID = grid([0.25, 0.5], ["mlp", "both"], compensations=["full", "none"])


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_timm.in_place():
        yield


def to_tensor(image: Image.Image) -> Tensor:
    return torch.tensor(list(image.resize((16, 16)).tobytes()), dtype=torch.float32).reshape(3, 16, 16) / 255


@pytest.fixture
def photos(tmp_path: Path) -> ImageBatches:
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(24):
        noise = torch.randint(256, (16 * 16 * 3,), dtype=torch.uint8)
        Image.frombytes("RGB", (16, 16), bytes(noise.tolist())).save(folder / f"{i:02}.png")
    return ImageBatches(sorted(folder.iterdir()), to_tensor, batch_size=4)


def statistics(model: nn.Module, data: Any, sizes: Sequence[int], folder: Path) -> list[tuple[Any, float | None]]:
    folder.mkdir(exist_ok=True)
    options = {"seed": 0, "origin": {}, "settings": Settings("all")}
    return list(sweeping.statistics_of_sizes(model, data, sizes, folder, **options))


def test_a_grid_is_every_combination_and_refuses_unknown_kinds() -> None:
    recipes = GRID
    assert len(recipes) == len(set(map(str, recipes))) == 8
    assert {(r.mlp, r.attn) for r in recipes} == {(0.25, 0), (0.5, 0), (0.25, 0.25), (0.5, 0.5)}
    assert grid([0.5], presets=["vbp"])[0].compensate == "mean"
    with pytest.raises(RecipeError, match="heads"):
        grid([0.5], ["heads"])


def test_sizes_from_one_pass_equal_separate_calibrations(photos: ImageBatches, tmp_path: Path) -> None:
    model = vit()
    seen = 0
    real = photos.transform

    def counting(image: Image.Image) -> Tensor:
        nonlocal seen
        seen += 1
        return real(image)

    photos.transform = counting
    found = statistics(model, photos, [4, 12, 24], tmp_path / "work")
    assert seen == 24 + 3 * 4  # every image once; sites are tried out on the first batch of each part
    assert [stats.samples for stats, _ in found] == [4, 12, 24]
    times = [seconds for _, seconds in found]
    assert times == sorted(times)
    for (stats, _), size in zip(found, (4, 12, 24), strict=True):
        order = [path for part in photos.parts([4, 12, 24], 0) for path in part.paths]
        alone = corp.calibrate(model, ImageBatches(order[:size], to_tensor), settings=Settings("all"))
        for site in corp.find_sites(model).mlp:
            a, b = (s.moments_of(site.name).total() for s in (stats, alone))
            assert a.n == b.n
            torch.testing.assert_close(a.cov(), b.cov(), rtol=1e-5, atol=1e-8)
        for site in corp.find_sites(model).attention:
            a, b = (s.grams_of(site.name).total().head(0).cross() for s in (stats, alone))
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def test_finished_sizes_are_not_calibrated_again(photos: ImageBatches, tmp_path: Path) -> None:
    model = vit()
    first = statistics(model, photos, [4, 12], tmp_path / "work")
    for path in photos.paths:
        path.write_bytes(b"gone")
    photos.max_bad = 1.0
    again = statistics(model, photos, [4, 12], tmp_path / "work")
    assert [s.samples for s, _ in again] == [4, 12]
    assert [seconds for _, seconds in again] == [seconds for _, seconds in first]


@pytest.mark.parametrize("sizes", [[8, 4], [4, 4], [0, 4], [4, 100]])
def test_impossible_sizes_are_refused(sizes: list[int], photos: ImageBatches, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="24 samples there are"):
        statistics(vit(), photos, sizes, tmp_path)


def test_an_interrupted_sweep_goes_on_and_ends_with_the_same_rows(tmp_path: Path) -> None:
    model, recipes = vit(), GRID
    stats = corp.calibrate(model, images(8))
    evaluated: list[int] = []
    probe = images(1, 2, torch.float32)[0]

    def evaluate(models: Sequence[nn.Module]) -> list[dict[str, Any]]:
        evaluated.append(len(models))
        return [{"agreement": m(probe).sum().item()} for m in models]

    whole = Sweep(model, recipes, evaluate)
    whole.run(stats)
    assert sum(evaluated) == len(recipes) + 1  # the dense model once

    def failing(models: Sequence[nn.Module]) -> list[dict[str, Any]]:
        if len(evaluated) > 2:
            raise KeyboardInterrupt
        return evaluate(models)

    evaluated.clear()
    broken = Sweep(model, recipes, failing, tmp_path)
    broken._at_once = lambda: 2  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        broken.run(stats)
    evaluated.clear()
    resumed = Sweep(model, recipes, evaluate, tmp_path)
    resumed.run(stats)
    assert sum(evaluated) == len(recipes) - 6

    def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in rows]

    assert timeless(resumed.rows) == timeless(whole.rows)
    assert resumed.dense_row == whole.dense_row


def test_the_folder_appears_whole_keeps_statistics_and_refuses_another_command(tmp_path: Path) -> None:
    out = tmp_path / "sweep"

    def die() -> None:
        with sweeping.working_folder(out, {"a": 1}, fresh=False) as folder:
            (folder / "rows.json").write_text("{}")
            raise KeyError

    with pytest.raises(KeyError):
        die()
    assert not out.exists()
    with (
        pytest.raises(StorageError, match="another command"),
        sweeping.working_folder(out, {"a": 2}, fresh=False),
    ):
        pass
    with sweeping.working_folder(out, {"a": 1}, fresh=False) as folder:
        assert (folder / "rows.json").is_file()
        for name in ("statistics-90", "statistics-100", "part-100"):
            (folder / name).mkdir()
        (folder / "statistics-100" / "x").write_text("")
    assert [path.name for path in out.iterdir()] == ["statistics"]
    assert [path.name for path in (out / "statistics").iterdir()] == ["x"]


def row(**changes: Any) -> dict[str, Any]:
    case = {"samples": 10, "mlp": 0.5, "attn": 0.5, "preset": "paper", "rank": "combined", "compensate": "full"}
    return {**case, "ridge": 1e-3, "top1": 0.5, **changes}


def test_lines_name_only_what_differs() -> None:
    rows = [row(compensate=c, mlp=s, attn=s, top1=s / 2) for c in ("full", "none") for s in (0.5, 0.3)]
    assert sweeps.lines(rows, "top1") == {
        "compensation full": [(0.3, 0.15), (0.5, 0.25)],
        "compensation none": [(0.3, 0.15), (0.5, 0.25)],
    }
    sizes = [row(samples=n, top1=n / 100) for n in (20, 10)]
    assert list(sweeps.lines(sizes, "top1", over="samples").values()) == [[(10, 0.1), (20, 0.2)]]
    assert sweeps.lines([row(top1=None)], "top1") == {}


def test_rankings_are_compared_where_the_paper_compares_them() -> None:
    rows = [
        row(rank=r, compensate=c, mlp=s, attn=s, top1=s) for r in "ab" for c in ("full", "none") for s in (0.3, 0.5)
    ]
    bars, title = sweeps.ranking(rows, "top1")
    assert bars == {f"compensation {c}": {"a": 0.5, "b": 0.5} for c in ("full", "none")}
    assert "50%" in title


def test_figures_are_drawn_for_what_varies_and_have_the_same_bytes_twice(tmp_path: Path) -> None:
    rows = [
        row(rank=r, samples=n, mlp=s, attn=s, top1=s)
        for r in ("combined", "magnitude")
        for n in (10, 20)
        for s in (0.3, 0.5)
    ]
    names = {"sparsity.svg", "ranking.svg", "calibration.svg"}
    contents = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert set(sweeps.draw(rows, {"top1": 0.9}, folder, "a model")) == names
        contents.append([(folder / name).read_bytes() for name in sorted(names)])
    assert contents[0] == contents[1]
    assert all(content.startswith(b"<svg") for content in contents[0])
    assert sweeps.draw([row()], {}, tmp_path, "one point") == []


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "deit.safetensors"
    save_file(timm.create_model(MODEL).state_dict(), path)
    return path


@pytest.fixture
def photos_folder(photos: ImageBatches) -> Path:
    for path in photos.paths[4:]:
        path.unlink()
    return photos.paths[0].parent


def test_the_command_writes_table_json_figures_and_a_page(weights: Path, photos_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    options = ("--calib", photos_folder, "--calib-sizes", "2,4", "--sparsity", "0.8,0.9", "--kinds", "mlp")
    options = (*options, "--compensate", "full,none", "--data", photos_folder, "--device", "cpu", "-o", out)
    made = run("sweep", MODEL, "--weights", weights, *options, "--json")
    assert made.exit_code == 0, made.output
    content = json.loads(made.stdout)
    assert json.loads((out / "sweep.json").read_text()) == content
    assert len(content["rows"]) == 8
    assert [part["samples"] for part in content["runtime"]] == [2, 4]
    assert all(part["calibrate"] > 0 and part["compensate"] > 0 for part in content["runtime"])
    with (out / "sweep.csv").open() as file:
        assert [float(r["agreement"]) for r in csv.DictReader(file)] == [r["agreement"] for r in content["rows"]]
    names = {path.name for path in out.iterdir()}
    assert {"sparsity.svg", "calibration.svg", "statistics"} <= names
    assert not names & {"rows.json", "run.json", "seconds.json"}
    page = run("report", out, "-o", tmp_path / "page.html")
    assert page.exit_code == 0, page.output
    assert "Sweep: sweep" in (tmp_path / "page.html").read_text()
    again = run("sweep", MODEL, "--weights", weights, *options)
    assert "exists" in again.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "no calibration data"),
        (("--stats", "x", "--calib", "y"), "--stats replaces the data"),
        (("--stats", "x", "--calib-sizes", "1,2"), "--calib-sizes needs"),
        (("--stats", "x", "--ridge", "a"), "--ridge"),
        (("--stats", "x", "--rank", "best"), "--rank best"),
    ],
)
def test_bad_requests_are_told_before_any_work(options: tuple[str, ...], message: str) -> None:
    result = run("sweep", MODEL, *options)
    assert result.exit_code == 1
    assert message in result.output


def test_a_changed_command_is_refused_and_a_failed_one_leaves_nothing(
    weights: Path, photos_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "sweep"
    command = (
        "sweep",
        MODEL,
        "--weights",
        weights,
        "--calib",
        photos_folder,
        "--data",
        photos_folder,
        "--kinds",
        "mlp",
    )
    command = (*command, "--sparsity", "0.5,0.8,0.5", "--device", "cpu", "-o", out)
    bad = run(*command, "--calib-sizes", "4,2")
    assert "must ascend" in bad.output
    assert not out.with_name(".sweep.partial").exists()

    real = Sweep._keep

    def die(self: Sweep) -> None:
        real(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "_keep", die)
    monkeypatch.setattr(Sweep, "_at_once", lambda self: 1)
    assert run(*command).exit_code == 130
    monkeypatch.setattr(Sweep, "_keep", real)
    labels = tmp_path / "labels.csv"
    labels.write_text("".join(f"{path.name},1\n" for path in photos_folder.iterdir()))
    for change in (("--labels", labels), ("--sample-tokens", "5"), ("--batch-size", "2")):
        refused = run(*command, *change)
        assert refused.exit_code == 1
        assert "another command" in refused.output
    done = run(*command, "--json")
    assert done.exit_code == 0, done.output
    assert [row["mlp"] for row in json.loads(done.stdout)["rows"]] == [0.5, 0.8]  # what is given twice counts once


def test_unreadable_images_are_named_and_counted_over_all_sizes(
    weights: Path, photos_folder: Path, tmp_path: Path
) -> None:
    (photos_folder / "x.png").write_text("no image")
    options = ("--calib", photos_folder, "--data", photos_folder, "--sparsity", "0.8", "--kinds", "mlp")
    options = (*options, "--device", "cpu", "--max-bad", "0.3", "--calib-sizes", "3,5", "-o", tmp_path / "out")
    made = run("sweep", MODEL, "--weights", weights, *options)
    assert made.exit_code == 0, made.output
    assert made.output.count("skipped ") == 2  # while calibrating, and while evaluating


def test_labels_and_samples_that_cannot_be_used_are_refused(weights: Path, photos_folder: Path, tmp_path: Path) -> None:
    stats = tmp_path / "stats"
    made = run("calibrate", MODEL, "--weights", weights, "--calib", photos_folder, "-o", stats, "--device", "cpu")
    assert made.exit_code == 0, made.output
    for command in ("sweep", "plan"):
        how = ("--sparsity", "0.5") if command == "sweep" else ("--mlp", "0.5")
        refused = run(command, MODEL, "--weights", weights, "--stats", stats, "--samples", 3, *how)
        assert "leave out either --stats or --samples" in refused.output


def test_timm_exports_are_taken_like_any_model(weights: Path, photos_folder: Path, tmp_path: Path) -> None:
    pruned, exported = tmp_path / "pruned", tmp_path / "exported"
    source = (MODEL, "--weights", weights, "--calib", photos_folder, "--device", "cpu")
    missing = run("prune", *source, "--mlp", 0.5, "-o", pruned, "--eval-data", tmp_path / "nothing")
    assert "does not exist" in missing.output
    assert not pruned.exists()
    assert run("prune", *source, "--mlp", 0.5, "-o", pruned).exit_code == 0
    made = run("export", pruned, "--profile", "standard", "-o", exported)
    assert made.exit_code == 0, made.output
    shown = run("eval", pruned, exported, "--data", photos_folder, "--labels", "none", "--json")
    assert shown.exit_code == 0, shown.output
    models = json.loads(shown.stdout)["models"]
    assert models[0]["params"] == models[1]["params"]
    assert models[1]["agreement"]["value"] == 1
