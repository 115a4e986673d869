"""Benchmarks: the statistics of ratios, the order of calls, footprints against known ones, causes. No timings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import corp
from corp.cli import bench
from corp.cli.bench import Contender, explain
from corp.cli.models import place
from corp.errors import ModelError, RecipeError
from corp.measure import timing
from corp.measure.footprint import disk_bytes, peak_bytes, weight_bytes
from tests.helpers import small_timm
from tests.helpers.command import run
from tests.helpers.models import build, vit
from tests.helpers.seeds import seed_all

MODEL, SIDE = small_timm.NAME, small_timm.SIDE


class FakeClock:
    """Time that passes only when a callable says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now

    def takes(self, name: str, *seconds: float) -> Callable[[], None]:
        series = itertools.cycle(seconds)

        def call() -> None:
            self.order.append(name)
            self.now += next(series)

        return call


def test_models_are_timed_in_turn_and_the_first_changes() -> None:
    clock = FakeClock()
    calls = [clock.takes("a", 2.0), clock.takes("b", 1.0), clock.takes("c", 4.0)]
    a, b, c = timing.interleave(calls, rounds=6, repeats=2, warm_up=3, clock=clock)
    assert (a, b, c) == ([[2.0] * 2] * 6, [[1.0] * 2] * 6, [[4.0] * 2] * 6)
    order = "".join(clock.order)
    assert order == "aabbccbbccaaccaabb" * 3  # 3 rounds of warm-up, 6 timed
    assert timing.speed_up(a, b) == timing.Ratio(2.0, 2.0, 2.0)


def test_warm_up_is_not_counted() -> None:
    clock = FakeClock()
    (timed,) = timing.interleave([clock.takes("a", 100.0, *[1.0] * 6)], rounds=6, warm_up=1, clock=clock)
    assert timed == [[1.0]] * 6


def test_drift_that_hits_both_leaves_the_ratio_alone() -> None:
    drift = [1.0, 1.3, 1.7, 2.5, 4.0, 6.0, 9.0]
    ratio = timing.speed_up([[3 * d] for d in drift], [[2 * d] for d in drift])
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((1.5, 1.5, 1.5))
    assert not ratio.within_noise


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(RecipeError, match="5 rounds give no 95% interval"):
        timing.interleave([lambda: None], rounds=5)
    assert [timing.tail_rank(count) for count in (5, timing.MIN_ROUNDS)] == [-1, 0]


@pytest.mark.parametrize("count", [6, 8, 9, 12, 15])
def test_interval_holds_the_median_as_often_as_it_says(count: int) -> None:
    """All 2^n patterns of below/above the median are equally likely: count those whose interval misses it."""
    cut = timing.tail_rank(count)

    def coverage(cut: int) -> float:
        missed = 0
        for pattern in range(2**count):
            below = pattern.bit_count()
            missed += below <= cut or below >= count - cut
        return 1 - missed / 2**count

    assert coverage(cut) >= 0.95
    assert coverage(cut + 1) < 0.95  # no wider than needed


def test_interval_of_known_ratios() -> None:
    ratio = timing.median_ratio([1.2, 0.9, 1.1, 1.0, 1.3, 0.8, 1.4, 1.5, 0.7])
    assert ratio == timing.Ratio(1.1, 0.8, 1.4)  # nine values: the second and the eighth
    assert ratio.within_noise
    assert not timing.Ratio(1.1, 1.01, 1.2).within_noise
    assert not timing.Ratio(0.9, 0.8, 0.99).within_noise


def test_summary_and_share() -> None:
    summary = timing.summarize([[float(v)] for v in range(101)])
    assert (summary.p50, summary.p95, summary.spread) == pytest.approx((50, 95, 1.0))
    assert timing.share_reached(1.3, 1.6) == pytest.approx(0.5)
    assert timing.share_reached(0.7, 1.6) == pytest.approx(-0.5)
    assert timing.share_reached(1.3, 1.0) is None


def times(single: float, batched: float, batch: int = 10) -> timing.Times:
    return timing.Times(batch, [[single]] * 6, [[batched]] * 6)


def test_launch_bound_needs_idle_hardware_and_a_missing_gain() -> None:
    dense, pruned = times(5.0, 10.0), times(4.9, 6.0)  # a sample: 5 alone, 1 in a batch
    gain = timing.gain(dense, pruned, ideal=1.7)
    assert gain.reached == pytest.approx((10 / 6 - 1) / 0.7)
    assert timing.launch_bound(pruned, gain)
    assert not timing.launch_bound(times(3.0, 6.0), timing.gain(dense, times(3.0, 6.0), ideal=1.7))  # latency gained
    busy = times(0.65, 6.0)  # a sample costs alone what it costs in a batch
    assert not timing.launch_bound(busy, timing.gain(times(0.66, 10.0), busy, ideal=1.7))
    assert not timing.launch_bound(pruned, timing.gain(dense, pruned, ideal=1.0))


@pytest.mark.parametrize("family", ["vit", "swiglu", "relative-position"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_on_disk_are_those_of_the_file(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(family, dtype)
    model.register_buffer("steps", torch.tensor(7))  # another dtype, and a scalar
    save_file(
        {name: t.contiguous() for name, t in model.state_dict().items()}, tmp_path / "f", metadata={"format": "pt"}
    )
    assert disk_bytes(model) == (tmp_path / "f").stat().st_size


def test_shared_weights_are_counted_once() -> None:
    layer = nn.Linear(10, 10, bias=False)
    assert weight_bytes(nn.Sequential(layer, layer)) == 400


def test_peak_is_that_of_live_tensors() -> None:
    x = torch.randn(500, 500)  # 1 MB each; x itself was there before

    def call() -> Tensor:
        a = x @ x
        b = a @ a
        del a
        c = b + 1
        d = torch.cat([c, c])  # b, c and twice c are alive
        return d[0]

    assert peak_bytes(call, torch.device("cpu")) == 4_000_000


def test_peak_of_a_model_falls_with_its_widths() -> None:
    x = torch.randn(64, 3, 16, 16)
    with torch.inference_mode():
        peaks = [peak_bytes(partial(vit(mlp_ratio=ratio), x), x.device) for ratio in (8.0, 4.0)]
    assert peaks[0] > 1.5 * peaks[1]


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_timm.in_place():
        yield


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT with odd widths."""
    seed_all(0)
    path = tmp_path_factory.mktemp("bench") / "pruned"
    model = timm.create_model(MODEL).eval()
    recipe = corp.Recipe.paper(mlp=0.6, attn=0.4, compensate="none")
    corp.save(corp.prune(model, [torch.randn(4, 3, SIDE, SIDE)], recipe), path)
    return path


def test_a_lone_folder_is_compared_with_its_dense_base(pruned: Path) -> None:
    result = run("bench", pruned, "--batch", 16, "--rounds", 6, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert (content["input"], content["batch"], content["rounds"]) == ([3, SIDE, SIDE], 16, 6)
    dense, small = content["models"]
    assert dense["name"] == "dense base"
    assert "speed_up" not in dense
    assert dense["params"] == sum(p.numel() for p in timm.create_model(MODEL).parameters())
    assert small["disk_bytes"] == (pruned / "model.safetensors").stat().st_size
    assert small["speed_up"]["ideal"] == pytest.approx(dense["macs"] / small["macs"])
    ratio = small["speed_up"]["throughput"]
    assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]
    assert small["memory_bytes"]["activations"] < dense["memory_bytes"]["activations"]
    causes = "\n".join(content["causes"])
    assert "blocks.0.attn and 1 more: q/k of 20 beside v of 32" in causes
    assert "width 20 is not a multiple of 8" in causes
    assert "--round-to head=8" in causes
    assert "width 77 is not a multiple of 64" in causes
    assert "--round-to mlp=64" in causes


def test_several_are_compared_with_the_first_and_shown(pruned: Path) -> None:
    threads = torch.get_num_threads()
    result = run("bench", pruned, pruned, "--batch", 1, "--rounds", 6, "--device", "cpu", "--threads", 1)
    assert result.exit_code == 0, result.output
    assert "threads: 1" in result.output
    assert "speed-up" in result.output
    assert "warning: " in result.output
    assert torch.get_num_threads() == threads


def test_noise_is_called_noise() -> None:
    noisy = timing.Gain(timing.Ratio(1.02, 0.9, 1.1), timing.Ratio(1.3, 1.2, 1.4), 1.6)
    row = bench._gain_row("m", noisy)
    assert row == ["m", "1.02x", "0.90–1.10 within the noise", "1.30x", "1.20–1.40", "1.60x", "50%"]


def test_a_dense_model_has_no_causes() -> None:
    contender = Contender("m", vit(), {})
    same = timing.gain(times(1.0, 5.0), times(1.0, 5.0), ideal=1.0)
    assert explain(contender, times(1.0, 5.0), same) == []


def test_round_widths_and_mlp_pruning_have_no_causes_either() -> None:
    model = vit(embed_dim=48, mlp_ratio=4.0)  # 192 hidden channels
    result = corp.prune(model, [torch.randn(50, 3, 16, 16)], corp.Recipe.paper(mlp=0.5, round_to=64, compensate="none"))
    contender = Contender("m", result.model, {"blocks.0.mlp": 192, "blocks.1.mlp": 192})
    slow = times(4.9, 6.0)
    assert explain(contender, slow, timing.gain(slow, slow, ideal=1.0)) == []
    (text,) = explain(contender, slow, timing.gain(times(5.0, 10.0), slow, ideal=1.7))
    assert text.startswith("m: batch 1 is limited by kernel launches")
    assert "4900.00 ms alone but 600.00 ms in a batch of 10" in text


def test_inputs_are_those_of_the_model_or_given() -> None:
    small, large = (Contender(str(size), vit(img_size=size), {}) for size in (16, 32))
    assert bench.common_shape([small, small], None) == (3, 16, 16)
    assert bench.common_shape([small, large], "3x16x16") == (3, 16, 16)
    with pytest.raises(ModelError, match="16: 3x16x16, 32: 3x32x32"):
        bench.common_shape([small, large], None)
    with pytest.raises(ModelError, match="should look like"):
        bench.common_shape([small], "3x-1")
    with pytest.raises(ModelError, match="does not state its input shape"):
        bench.common_shape([Contender("own", nn.Linear(3, 3), {})], None)
    with pytest.raises(ModelError, match="a forward pass over 2 samples of 3x20x20 failed"):
        bench.measure([small], (3, 20, 20), 2, 6)


def test_a_folder_that_cannot_rebuild_its_base_says_what_to_do(pruned: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in pruned.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((copy / "corp.json").read_text())
    (copy / "corp.json").write_text(json.dumps({**manifest, "base": None}))
    result = run("bench", copy)
    assert result.exit_code == 1
    assert "corp bench DENSE" in " ".join(result.output.split())


def test_a_model_that_fails_without_a_word_is_an_error_with_its_class() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, _x: Tensor) -> Tensor:
            raise RuntimeError

    with pytest.raises(ModelError, match=r"2 samples of 3x4x4 failed: operations cannot .* its input: RuntimeError"):
        bench.measure([Contender("silent", Silent(), {})], (3, 4, 4), 2, 6)
    with pytest.raises(ModelError, match="cannot be used here: AssertionError"):
        place(Unplaced(), "cpu", "auto")


class Unplaced(nn.Module):
    """A model that cannot be moved, and does not say why."""

    def to(self, *_args: object, **_kwargs: object) -> Unplaced:  # type: ignore[override]
        raise AssertionError
