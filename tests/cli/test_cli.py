"""The command line, in real processes where exit codes and signals matter."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import corp
from corp.adapters import registry
from corp.cli.sweep import parse_range
from tests.helpers import small_timm
from tests.helpers.command import content, failure, run
from tests.helpers.seeds import seed_all, seeded

MODEL = small_timm.NAME  # blocks of 64 channels
XCIT = "xcit_nano_12_p16_224"


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_timm.in_place():
        yield


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed_all(0)
    path = tmp_path_factory.mktemp("weights") / "vit.safetensors"
    save_file(timm.create_model(MODEL).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for i in range(4):
        noise = torch.randint(0, 255, (40, 40, 3), dtype=torch.uint8, generator=seeded(i))
        Image.fromarray(noise.numpy()).resize((240, 240)).save(folder / f"{i}.png")
    return folder


def test_prune_writes_a_folder_that_loads(weights: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--mlp", 0.75, "--attn", 0.5, "--batch-size", 2, "--device", "cpu")
    result = run("prune", MODEL, "--weights", weights, "--calib", photos, "-o", out, *options)
    assert result.exit_code == 0, result.output
    assert "blocks.0.mlp" in result.output
    assert "before and after" in result.output
    assert corp.load(out)(torch.zeros(1, 3, small_timm.SIDE, small_timm.SIDE)).shape == (1, 1000)

    shown = run("inspect", out, "--json")
    assert shown.exit_code == 0, shown.output
    sites = {site["name"]: site for site in json.loads(shown.stdout)["sites"]}
    assert (sites["blocks.0.mlp"]["width"], sites["blocks.0.mlp"]["dense_width"]) == (48, 192)
    assert (sites["blocks.0.attn"]["width"], sites["blocks.0.attn"]["dense_width"]) == (16, 32)

    again = run("prune", MODEL, "--weights", weights, "--calib", photos, "-o", out, *options)
    assert again.exit_code == 1
    assert "overwrite" in again.output


def test_plan_is_a_dry_run_with_json(weights: Path, photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    options = (
        "--sparsity",
        0.75,
        "--skip",
        "blocks.[1-9]*",
        "--override",
        "blocks.0.attn:attn=0.25",
        "--device",
        "cpu",
    )
    result = run("plan", MODEL, "--weights", weights, "--calib", photos, "--json", "-o", file, *options)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert [(site["name"], site["keep"]) for site in plan["sites"]] == [("blocks.0.attn", 24), ("blocks.0.mlp", 48)]
    assert json.loads(file.read_text()) == plan


def test_inspect_names_what_cannot_be_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    made = timm.models._registry._model_entrypoints
    monkeypatch.setitem(made, XCIT, functools.partial(made[XCIT], depth=2))  # of twelve
    result = run("inspect", XCIT, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert {entry["kind"] for entry in content["refused"]} == {"attn", "vo"}
    assert all(entry["reason"].startswith("tried out on the model") for entry in content["refused"])
    assert sum(content["coverage"].values()) == pytest.approx(1)
    assert "in layers that cannot be pruned" in run("inspect", XCIT).output


def test_one_calibration_serves_prune_plan_and_sweep(weights: Path, photos: Path, tmp_path: Path) -> None:
    stats, model = tmp_path / "stats", (MODEL, "--weights", weights)
    made = run("calibrate", *model, "--calib", photos, "-o", stats, "--device", "cpu", "--json", "--memory", "2GB")
    assert made.exit_code == 0, made.output
    origin = json.loads(made.stdout)["origin"]
    assert origin["samples"] == 4
    assert {"data fingerprint", "seed", "preprocessing", "torch"} <= origin.keys()

    common = ("--stats", stats, "--device", "cpu")
    pruned = run("prune", *model, *common, "-o", tmp_path / "out", "--mlp", 0.75, "--no-sequential", "--json")
    assert pruned.exit_code == 0, pruned.output
    options = ("-o", tmp_path / "direct", "--mlp", 0.75, "--no-sequential", "--device", "cpu")
    direct = run("prune", *model, "--calib", photos, *options)
    assert direct.exit_code == 0, direct.output
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "direct")]
    assert files[0] == files[1]

    swept = run(
        "sweep", *model, *common, "--sparsity", "0.8:0.9:0.1", "--kinds", "mlp,attn", "--data", photos, "--json"
    )
    assert swept.exit_code == 0, swept.output
    rows = json.loads(swept.stdout)["rows"]
    assert [(row["mlp"], row["attn"]) for row in rows] == [(0.8, 0), (0.9, 0), (0, 0.8), (0, 0.9)]
    assert all(0 <= row["agreement"] <= 1 and row["kl"] >= 0 for row in rows)

    both = run("plan", *model, *common, "--calib", photos, "--mlp", 0.5)
    assert both.exit_code == 1
    assert "leave out either --stats or --calib" in both.output
    neither = run("plan", *model, "--mlp", 0.5)
    assert neither.exit_code == 1
    assert "--calib" in neither.output
    other = run("plan", "deit_tiny_distilled_patch16_224", "--weights", tmp_path / "no", *common, "--mlp", 0.5)
    assert other.exit_code == 1


@pytest.mark.parametrize(
    ("text", "expected"), [("0.1:0.3:0.1", [0.1, 0.2, 0.3]), ("0.5", [0.5]), ("0.3,0.7", [0.3, 0.7])]
)
def test_ranges_of_sparsity(text: str, expected: list[float]) -> None:
    assert parse_range(text) == expected


def test_a_share_of_a_sweep_is_named_by_its_own_option() -> None:
    with pytest.raises(corp.CorpError, match=r"sparsity=30.0 is not a share to remove.* write 0.3 for 30 %"):
        parse_range("30")


@pytest.mark.parametrize("text", ["0.5:0.1:0.1", "a", "0.1:0.5:0", "0.1:0.5"])
def test_odd_ranges_are_errors(text: str) -> None:
    with pytest.raises(corp.CorpError, match="should look like"):
        parse_range(text)


BAD = {
    "unknown model, near ones suggested": (["deit_tny_patch16_224"], "did you mean deit_tiny_patch16_224"),
    "sparsity of one": ([MODEL, "--mlp", "1.0"], "--mlp 1.0 is not a share to remove"),
    "sparsity in percent": (
        [MODEL, "--sparsity", "50"],
        "error: --sparsity 50.0 is not a share to remove, 0 <= sparsity < 1; write 0.5 for 50 %",
    ),
    "target in percent": ([MODEL, "--target-macs", "60"], "0 < --target-macs <= 1; write 0.6 for 60 %"),
    "target out of reach": ([MODEL, "--target-macs", "0.01"], "error: --target-macs 0.01 is out of reach"),
    "sparsity twice": ([MODEL, "--sparsity", "0.5", "--mlp", "0.5"], "give either"),
    "nothing to prune": ([MODEL, "--no-defaults"], "nothing to prune"),
    "odd rounding": ([MODEL, "--mlp", "0.5", "--round-to", "mlp=x"], "--round-to: 'x' is not a number"),
    "odd override": ([MODEL, "--mlp", "0.5", "--override", "mlp=0.2"], "--override 'mlp=0.2' should look like"),
    "unknown device": (
        [MODEL, "--mlp", "0.5", "--device", "tpu9"],
        "--device tpu9 is not a device; give cpu, cuda, cuda:1, mps or auto",
    ),
    "glob of nothing": ([MODEL, "--mlp", "0.5", "--skip", "layer*"], "matches no site"),
    "no weights file": ([MODEL, "--mlp", "0.5", "--weights", "nothing.pth"], "no weights file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_message_and_no_output(case: str, weights: Path, photos: Path, tmp_path: Path) -> None:
    args, message = BAD[case]
    given = [arg for arg in args if arg != "--no-defaults"]
    if len(given) == 1 and "--no-defaults" not in args:
        given += ["--mlp", "0.5"]
    if "--weights" not in given and given[0] == MODEL:
        given += ["--weights", str(weights)]
    result = run("prune", *given, "--calib", photos, "-o", tmp_path / "out")
    assert result.exit_code == 1, result.output
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_unknown_choices_are_answered_with_the_known_ones(photos: Path, tmp_path: Path) -> None:
    for option in ("--rank", "--preset", "--attn-basis"):
        result = run("prune", MODEL, "--calib", photos, "-o", tmp_path / "out", "--mlp", "0.5", option, "magic")
        assert result.exit_code == 2, result.output
        assert option in result.output
        assert "is not one of" in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == []


def test_weights_of_another_architecture_are_refused(weights: Path, photos: Path, tmp_path: Path) -> None:
    result = run(
        "prune", "deit_small_patch16_224", "--weights", weights, "--calib", photos, "-o", tmp_path / "o", "--mlp", "0.5"
    )
    assert result.exit_code == 1
    assert "of another shape" in result.output


def test_a_pickle_with_code_is_not_run(photos: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'pwned'}",)

    torch.save({"model": Evil()}, tmp_path / "evil.pth")
    result = run(
        "prune", MODEL, "--weights", tmp_path / "evil.pth", "--calib", photos, "-o", tmp_path / "o", "--mlp", "0.5"
    )
    assert result.exit_code == 1
    assert "more than weights" in result.output
    assert not (tmp_path / "pwned").exists()


def test_folders_without_images_and_damaged_images(weights: Path, tmp_path: Path) -> None:
    common = ("prune", MODEL, "--weights", weights, "-o", tmp_path / "out", "--mlp", "0.5", "--device", "cpu")
    (tmp_path / "empty").mkdir()
    assert "no images in" in run(*common, "--calib", tmp_path / "empty").output
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.jpg").write_text("no image")
    assert "cannot be decoded" in run(*common, "--calib", tmp_path / "bad").output
    assert not (tmp_path / "out").exists()


def test_version_and_help() -> None:
    assert corp.__version__ in run("--version").output
    for name in (
        "prune",
        "plan",
        "calibrate",
        "merge",
        "sweep",
        "eval",
        "bench",
        "analyze",
        "report",
        "export",
        "inspect",
        "demo",
    ):
        assert run(name, "--help").exit_code == 0


def _opened_by_reader(pipe: Path, seconds: float = 120.0) -> int:
    """The writing end of a pipe, once somebody has opened the other."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads yet
            time.sleep(0.1)
    raise TimeoutError(pipe)


@pytest.mark.parametrize(
    ("kill", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_interrupted_runs_leave_nothing(kill: int, code: int, photos: Path, tmp_path: Path) -> None:
    many = tmp_path / "many"
    many.mkdir()
    for i in range(40):
        (many / f"{i:03}.png").symlink_to(photos / f"{i % 4}.png")
    os.mkfifo(many / "020.pipe.png")  # an image that never comes: whoever waits for it is in the midst of calibrating
    save_file(small_timm.whole().state_dict(), tmp_path / "weights.safetensors")
    command = [sys.executable, "-m", "corp", "prune", MODEL, "--weights", str(tmp_path / "weights.safetensors")]
    command += ["--calib", str(many), "-o", str(tmp_path / "out")]
    command += ["--mlp", "0.5", "--batch-size", "2", "--device", "cpu"]
    # A suite that runs in the background may have been told to ignore SIGINT; a user's shell has not.
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heeding)
    pipe = _opened_by_reader(many / "020.pipe.png")
    process.send_signal(kill)
    time.sleep(0.2)
    os.close(pipe)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert {path.name for path in tmp_path.iterdir()} == {"many", "weights.safetensors"}


def test_check_on_the_command_line(weights: Path, photos: Path, tmp_path: Path) -> None:
    out, data = tmp_path / "out", ("--weights", weights, "--calib", photos)
    only = [option for i in range(1, small_timm.BLOCKS) for option in ("--skip", f"blocks.{i}.*")]
    made = run("prune", MODEL, *data, "-o", out, "--mlp", 0.75, "--attn", 0.5, "--equal-heads", *only)
    assert made.exit_code == 0, made.output
    found = content("check", out, *data)
    assert [(site["site"], site["agrees"]) for site in found["sites"]] == [
        ("blocks.0.attn", True), ("blocks.0.attn.proj", True), ("blocks.0.mlp", True),
    ]  # fmt: skip
    assert "all 3 sites compute what their weights predict" in run("check", out, *data).output
    assert "is not a folder that corp saved" in failure("check", photos / "no-such", *data)
    tensors = load_file(out / "model.safetensors")
    tensors["blocks.0.mlp.fc1.weight"] *= 1.5  # still a valid file, and another function
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert "1 of 3 sites do not compute what their weights predict: blocks.0.mlp" in failure("check", out, *data)


def test_a_dry_run_tells_time_and_memory_and_writes_nothing(weights: Path, photos: Path, tmp_path: Path) -> None:
    options = ("--weights", weights, "--calib", photos, "--sparsity", 0.5, "--batch-size", 2, "--device", "cpu")
    shown = run("prune", MODEL, *options, "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert f"pruning {MODEL}" in shown.output
    made = content("prune", MODEL, *options, "--dry-run", "-o", tmp_path / "out")
    names = [stage["stage"] for stage in made["stages"]]
    assert names[0] == "calibrating on cpu"
    assert {"planning", "checking"} < set(names)
    assert made["seconds"] == pytest.approx(sum(stage["seconds"] for stage in made["stages"]))
    assert not list(tmp_path.iterdir())
    assert "--dry-run" in failure("prune", MODEL, *options)  # no output was named


@pytest.mark.parametrize("asked", [("--sparsity", 0.5), ("--target-macs", 0.7)])  # a budget has more to tell at the end
def test_prune_finds_the_sites_once(
    asked: tuple[str, float], weights: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def counting(model: torch.nn.Module, *args: object) -> object:
        found.append(next(model.parameters()).device.type)
        return search(model, *args)

    search = registry.search
    monkeypatch.setattr(registry, "search", counting)
    options = ("--weights", weights, "--calib", photos, *asked, "--batch-size", 2, "--device", "cpu")
    result = run("prune", MODEL, *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "exports: " in result.output
    assert found[0] == "cpu"  # what exports there are is told from these
    assert found.count("cpu") == 1  # saving rebuilds the architecture, without weights, and searches that
