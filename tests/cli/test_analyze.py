"""Redundancy: the table against the data it is about, and the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import corp
from corp.adapters.registry import find_sites
from corp.calibration.grams import Grams
from corp.calibration.site_sums import SiteSums
from corp.calibration.statistics import Statistics
from corp.errors import StatisticsError
from corp.evaluate.redundancy import analyze
from tests.helpers.command import run
from tests.helpers.models import build, images
from tests.helpers.seeds import seed_all
from tests.helpers.spectra import brute_k, brute_rank


def capture(model: torch.nn.Module, batches: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What goes into the first block's second linear (n, D), and out of its qkv (N, tokens, 3 H d)."""
    hidden, qkv = [], []
    block = model.get_submodule("blocks.0")
    hooks = [
        block.get_submodule("mlp.fc2").register_forward_pre_hook(lambda _m, args: hidden.append(args[0].flatten(0, 1))),
        block.get_submodule("attn.qkv").register_forward_hook(lambda _m, _a, out: qkv.append(out)),
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for hook in hooks:
        hook.remove()
    return torch.cat(hidden), torch.cat(qkv)


def test_rows_describe_the_activations() -> None:
    model = build("vit")
    batches = images(12, 3)  # the tenth batch is held out: it counts here too
    # d = 8: at most 72 samples stay one by one, which is all of these
    found = analyze(find_sites(model), corp.calibrate(model, batches))
    x, qkv = capture(model, batches)
    rows = {(row.site, row.what, row.head): row for row in found.rows}
    assert found.unavailable == {}
    assert len(found.of("mlp")) == 2
    assert len(found.of("q")) == len(found.of("k")) == 2 * 3

    mlp = rows["blocks.0.mlp", "mlp", None]
    spectrum = (torch.linalg.svdvals(x - x.mean(0)) ** 2).tolist()
    assert mlp.dim == 96
    assert mlp.effective_rank == pytest.approx(brute_rank(spectrum))
    assert mlp.k95_eigenvalues == brute_k(spectrum, 0.95)
    assert mlp.k95_channels == brute_k(x.var(0).tolist(), 0.95)
    assert mlp.sparsity == pytest.approx(float((x.abs() <= 0.01).double().mean()))

    for what, start in (("q", 0), ("k", 24)):
        for head in range(3):
            part = qkv[..., start + 8 * head : start + 8 * head + 8].reshape(-1, 8)  # not centred
            row = rows["blocks.0.attn", what, head]
            spectrum = (torch.linalg.svdvals(part) ** 2).tolist()
            assert row.effective_rank == pytest.approx(brute_rank(spectrum), rel=1e-5)
            assert row.k95_eigenvalues == brute_k(spectrum, 0.95)
            assert row.k95_channels == brute_k(part.square().sum(0).tolist(), 0.95)
            assert row.sparsity is None


def test_folded_grams_are_said_to_be_gone() -> None:
    model = build("vit")
    stats = corp.calibrate(model, images(1, 40))
    grams = stats.grams_of("blocks.1.attn").fit
    assert grams.gram_sums() is not None
    grams.fold()
    assert grams.gram_sums() is None
    found = analyze(find_sites(model), stats)
    assert list(found.unavailable) == ["blocks.1.attn"]
    assert "at most 72 samples" in found.unavailable["blocks.1.attn"]
    assert {row.site for row in found.of("q", "k")} == {"blocks.0.attn"}


def test_the_held_out_part_does_not_fold_what_fits_apart() -> None:
    """60 + 20 samples are past the 72 that stay one by one when added; each part alone is not."""
    model = build("vit")
    q, k = (torch.randn(80, 17, 24, dtype=torch.float64) for _ in range(2))
    fit, held = Grams(3, 8), Grams(3, 8)
    fit.update(q[:60], k[:60])
    held.update(q[60:], k[60:])
    stats = corp.calibrate(model, images(1, 5))
    sums = {**stats.sums, "blocks.0.attn": SiteSums(fit, held)}
    found = analyze(find_sites(model), Statistics(sums))
    row = next(row for row in found.of("q") if (row.site, row.head) == ("blocks.0.attn", 1))
    spectrum = (torch.linalg.svdvals(q[..., 8:16].reshape(-1, 8)) ** 2).tolist()
    assert row.effective_rank == pytest.approx(brute_rank(spectrum))


def test_statistics_of_another_model_are_refused() -> None:
    stats = corp.calibrate(build("swiglu-packed"), images(1, 5))
    with pytest.raises(StatisticsError, match="calibrate this one"):
        analyze(find_sites(build("vit")), stats)
    with pytest.raises(StatisticsError, match="no statistics of site"):
        analyze(find_sites(build("vit")), Statistics())


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of a named model over noise: the command needs no weights for them."""
    import timm

    seed_all(0)
    path = tmp_path_factory.mktemp("analyze") / "stats"
    corp.calibrate(timm.create_model("deit_tiny_patch16_224"), [torch.randn(2, 3, 224, 224)]).save(path)
    return path


def test_the_command_writes_picture_table_and_data(stats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("analyze", "deit_tiny_patch16_224", "--stats", stats, "-o", out, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["samples"] == 2
    assert [row["site"] for row in content["rows"] if row["what"] == "mlp"] == [f"blocks.{i}.mlp" for i in range(12)]
    assert sum(row["what"] in "qk" for row in content["rows"]) == 12 * 3 * 2
    assert all(0 < row["rank_ratio"] <= 1 and row["k95_channels_ratio"] <= 1 for row in content["rows"])
    assert {path.name for path in out.iterdir()} == {"redundancy.svg", "redundancy.csv", "redundancy.json"}
    assert json.loads((out / "redundancy.json").read_text()) == content
    with (out / "redundancy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["effective_rank"]) for row in rows] == [row["effective_rank"] for row in content["rows"]]
    assert (out / "redundancy.svg").read_bytes().startswith(b"<svg")

    again = run("analyze", "deit_tiny_patch16_224", "--stats", stats, "-o", out)
    assert again.exit_code == 1
    assert "overwrite" in again.output


def test_the_command_shows_tables_and_says_what_is_missing(stats: Path, tmp_path: Path) -> None:
    folded = Statistics.load(stats)
    sums = dict(folded.sums)
    sums["blocks.3.attn"].fit.fold()  # type: ignore[union-attr]
    Statistics(sums, folded.samples, folded.weights, folded.inputs, folded.origin).save(tmp_path / "folded")
    result = run("analyze", "deit_tiny_patch16_224", "--stats", tmp_path / "folded")
    assert result.exit_code == 0, result.output
    assert "blocks.0.mlp" in result.output
    assert "blocks.11.attn k head 2" in result.output
    assert "blocks.3.attn: queries and keys are not available" in result.output


def test_bad_requests_end_with_one_message(stats: Path, tmp_path: Path) -> None:
    for args, message in (
        (("deit_tiny_patch16_224", "--stats", stats, "--calib", tmp_path), "--stats replaces the data"),
        (("deit_tiny_patch16_224",), "--calib"),
        (("deit_small_patch16_224", "--stats", stats), "in the statistics"),
    ):
        result = run("analyze", *args)
        assert result.exit_code == 1
        assert message in " ".join(result.output.split())
        assert "Traceback" not in result.output
