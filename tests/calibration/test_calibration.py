"""The calibration engine: statistics as an artefact, within memory, through kills, over workers."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import corp
from corp import CorpError, Recipe, Statistics
from corp.calibration.memory import human, parse_bytes, passes, site_bytes, working_bytes
from corp.calibration.moments import Moments
from corp.calibration.settings import Settings
from corp.calibration.tokens import choose_tokens
from tests.helpers import calibrate_process
from tests.helpers.command import run
from tests.helpers.models import build, images
from tests.helpers.observers import Recorder
from tests.helpers.seeds import seed, seeded

ROOT = Path(__file__).parents[2]
ALL = Settings(tokens="all")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a statistics folder, by site and name."""
    sites = json.loads((folder / "statistics.json").read_text())["sites"]
    return {f"{s}/{n}": t for s, e in sites.items() for n, t in load_file(folder / e["file"]).items()}


def assert_equal_folders(first: Path, second: Path, rtol: float = 0.0) -> None:
    a, b = tensors(first), tensors(second)
    assert a.keys() == b.keys()
    for name in a:
        if rtol == 0:
            assert torch.equal(a[name], b[name]), name
        else:
            scale = float(a[name].double().abs().max()) if a[name].numel() else 0.0
            torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=rtol * scale, msg=name)


# Statistics as an artefact.


def test_saved_statistics_give_the_same_plan(tmp_path: Path) -> None:
    model, data, recipe = build("vit"), images(12, 20), Recipe.paper(mlp=0.5, attn=0.5)
    stats = corp.calibrate(model, data)
    stats.save(tmp_path / "stats")
    loaded = Statistics.load(tmp_path / "stats")
    assert loaded.samples == 240
    plans = corp.plan(model, stats, recipe), corp.plan(model, loaded, recipe)
    assert plans[0] == plans[1]
    results = [corp.apply(model, s, p).model.state_dict() for s, p in zip((stats, loaded), plans, strict=True)]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_folder_run_equals_a_run_in_memory(tmp_path: Path) -> None:
    model, data = build("vit"), images(12, 20)
    corp.calibrate(model, data).save(tmp_path / "memory")
    corp.calibrate(model, data, out=tmp_path / "folder")
    assert_equal_folders(tmp_path / "memory", tmp_path / "folder")
    assert {path.name for path in tmp_path.iterdir()} == {"memory", "folder"}


def test_statistics_of_other_weights_are_refused(tmp_path: Path) -> None:
    corp.calibrate(build("vit"), images()).save(tmp_path / "stats")
    with pytest.raises(CorpError, match="other weights"):
        corp.plan(build("dinov2"), Statistics.load(tmp_path / "stats"), Recipe.paper(mlp=0.5))


DAMAGE = {
    "no manifest": lambda f: (f / "statistics.json").unlink(),
    "manifest is no JSON": lambda f: (f / "statistics.json").write_text("{"),
    "other format": lambda f: (f / "statistics.json").write_text('{"format": "zip"}'),
    "site file missing": lambda f: site_file(f, "mlp").unlink(),
    "site file truncated": lambda f: os.truncate(site_file(f, "mlp"), 200),
    "sites swapped": lambda f: site_file(f, "mlp").write_bytes(site_file(f, "attn").read_bytes()),
    "path out of the folder": lambda f: edit(f, "file", "../../etc/passwd"),
    "width of a trillion": lambda f: edit(f, "width", 10**12),
    "width is text": lambda f: edit(f, "width", "96"),
}


def site_file(folder: Path, kind: str) -> Path:
    content = json.loads((folder / "statistics.json").read_text())
    return folder / str(content["sites"][f"blocks.0.{kind}"]["file"])


def edit(folder: Path, key: str, value: object) -> None:
    content = json.loads((folder / "statistics.json").read_text())
    content["sites"]["blocks.0.mlp"][key] = value
    (folder / "statistics.json").write_text(json.dumps(content))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_statistics_end_in_a_clear_error(damage: str, tmp_path: Path) -> None:
    model = build("vit")
    corp.calibrate(model, images()).save(tmp_path / "stats")
    DAMAGE[damage](tmp_path / "stats")
    with pytest.raises(CorpError):
        corp.plan(model, Statistics.load(tmp_path / "stats"), Recipe.paper(mlp=0.5, attn=0.5))


# Memory.


def test_sums_that_do_not_fit_take_more_passes_with_the_same_result(tmp_path: Path) -> None:
    model, data = build("vit"), images(12, 20)
    sites = list(corp.find_sites(model))
    budget = working_bytes(sites) + max(site_bytes(site, 240) for site in sites)
    told, tight = Recorder(), Settings(memory=budget)
    corp.calibrate(model, data, out=tmp_path / "tight", settings=tight, observer=told)
    corp.calibrate(model, data, out=tmp_path / "wide")
    assert "passes over the data" in told.notes[0]
    assert_equal_folders(tmp_path / "tight", tmp_path / "wide")
    with pytest.raises(CorpError, match="pass out="):
        corp.calibrate(model, data, settings=tight)


def test_too_little_memory_says_the_least_that_would_do() -> None:
    model, data = build("vit"), images()
    with pytest.raises(CorpError, match=r"needs at least .*, but 1\.0KB is allowed; give memory=") as caught:
        corp.calibrate(model, data, settings=Settings(memory=1024))
    told = str(caught.value).rpartition("memory=")[2].split()[0]
    sites = list(corp.find_sites(model))
    assert len(passes(sites, 150, parse_bytes(told))) >= 1


def test_amounts_of_memory_are_parsed() -> None:
    assert parse_bytes("4GB") == parse_bytes("4 GiB") == parse_bytes("4g") == 4 * 2**30
    assert parse_bytes("1.5k") == 1536
    assert human(1536) == "1.5KB"
    with pytest.raises(CorpError, match="not an amount of memory"):
        parse_bytes("lots")


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_weights_give_the_same_statistics_and_come_back(place: str, tmp_path: Path) -> None:
    model, data = build("vit"), images()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    corp.calibrate(model, data).save(tmp_path / "plain")
    corp.calibrate(model, data, settings=Settings(offload=place)).save(tmp_path / "offloaded")
    assert_equal_folders(tmp_path / "plain", tmp_path / "offloaded")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# Tokens.


def test_tokens_are_chosen_by_sample_not_by_batch() -> None:
    x = torch.arange(8 * 30 * 2, dtype=torch.float32).reshape(8, 30, 2)
    whole = choose_tokens(x, 7, 100)
    parts = torch.cat([choose_tokens(x[:3], 7, 100), choose_tokens(x[3:], 7, 103)])
    assert torch.equal(whole, parts)
    assert whole.shape == (56, 2)
    assert len(whole.unique(dim=0)) == 56
    assert choose_tokens(x, 0, 0) is None
    assert choose_tokens(x, 99, 0) is None


def test_every_position_gets_its_turn() -> None:
    x = torch.arange(30.0)[None, :, None].expand(600, 30, 1)
    counts = choose_tokens(x, 5, 0).long().flatten().bincount(minlength=30)
    assert counts.min() > 0.8 * counts.double().mean()
    assert counts.max() < 1.2 * counts.double().mean()


def test_a_number_of_tokens_per_sample() -> None:
    model, data = build("vit"), images()
    some, whole = (corp.calibrate(model, data, settings=Settings(tokens=t)) for t in (3, "all"))
    few, many = (stats.moments_of("blocks.0.mlp").total() for stats in (some, whole))
    assert (few.n, few.seen, many.n) == (3 * 150, 17 * 150, 17 * 150)
    # Ranking and bias do not depend on which tokens were sampled.
    torch.testing.assert_close(few.energy, many.energy)
    torch.testing.assert_close(few.mean, many.mean)
    plans = [corp.plan(model, stats, Recipe.paper(mlp=0.5, compensate="mean")).sites for stats in (some, whole)]
    assert [site.kept for site in plans[0]] == [site.kept for site in plans[1]]
    with pytest.raises(CorpError, match="tokens=0"):
        Settings(tokens=0)


def test_the_output_projections_input_is_remembered_too() -> None:
    model, data = build("vit"), images()
    stats = corp.calibrate(model, data, settings=ALL)
    seen: list[torch.Tensor] = []
    model.blocks[1].attn.proj.register_forward_pre_hook(lambda _m, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in data:
            model(batch)
    torch.testing.assert_close(
        stats.moments_of("blocks.1.attn.proj").total().cov(), torch.cov(torch.cat(seen).T, correction=0)
    )


# Held-out data.


def test_an_eighth_of_the_batches_is_held_out_and_still_used() -> None:
    stats = corp.calibrate(build("vit"), images(16, 10), settings=ALL)
    sums = stats.moments_of("blocks.0.mlp")
    assert (sums.fit.n, sums.held.n) == (14 * 10 * 17, 2 * 10 * 17)
    assert sums.total().n == 16 * 10 * 17
    assert stats.grams_of("blocks.0.attn").held.samples == 20


def test_fits_that_do_not_generalise_are_warned_of_with_a_remedy() -> None:
    model, data = build("vit"), images(5, 4)
    with pytest.warns(
        corp.errors.CorpWarning, match=r"larger on data that was not fitted; about \d+ samples \(now 20\)"
    ):
        plan = corp.plan(model, corp.calibrate(model, data), Recipe.paper(mlp=0.3, ridge=1e-6))
    assert plan.sites[0].costs[0].held > plan.sites[0].costs[0].fit


# Numerics: hard cases against a float64 two-pass reference.

HARD = {
    "huge mean, tiny variance": lambda g: 1e4 + 1e-2 * torch.randn(3000, 12, generator=g),
    "constant and dead channels": lambda g: torch.randn(3000, 12, generator=g) * torch.tensor([0.0, 1.0] * 6) + 3.0,
    "fewer tokens than channels": lambda g: torch.randn(7, 12, generator=g),
    "one token": lambda g: torch.randn(1, 12, generator=g),
    "outlier features": lambda g: torch.randn(3000, 12, generator=g) * torch.tensor([1e3] + [1.0] * 11),
    "float16": lambda g: torch.randn(3000, 12, generator=g).half(),
    "bfloat16": lambda g: (5 + torch.randn(3000, 12, generator=g)).bfloat16(),
}


@pytest.mark.parametrize("case", HARD)
def test_hard_cases_stay_close_to_two_passes(case: str) -> None:
    x = HARD[case](seeded(0))
    moments = Moments(12)
    for part in x.split(700):
        moments.update(part)
    exact = x.double()
    centred = exact - exact.mean(0)
    cov = centred.T @ centred / len(x)
    scale = cov.diagonal().clamp(min=1e-12).sqrt()
    error = ((moments.cov() - cov) / torch.outer(scale, scale).clamp(min=1e-9)).abs().max()
    assert float(error) < 2e-4
    assert float(torch.linalg.eigvalsh(moments.cov()).min()) > -1e-5 * float(cov.diagonal().max()) - 1e-12
    size = exact.square().mean(0).sqrt()  # a mean may be small beside what it is taken of
    assert bool(((moments.mean - exact.mean(0)).abs() <= 1e-6 * (1 + size)).all())


# Kills, in real processes.


def run_calibration(out: Path, *extra: str) -> list[str]:
    return [sys.executable, "-m", "tests.helpers.calibrate_process", str(out), *extra]


def finished(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, **options)


def started(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)


def calibrated_here(out: Path, *extra: str) -> None:
    """What a process of its own does, without its imports."""
    calibrate_process.main([str(out), *extra])


def test_a_killed_run_continues_to_the_same_bits(tmp_path: Path) -> None:
    calibrated_here(tmp_path / "whole")
    generator, kills = random.Random(seed()), 0
    partial = tmp_path / ".killed.partial"
    for _ in range(2):
        with started(run_calibration(tmp_path / "killed", "--pause", "0.4")) as process:
            deadline = time.monotonic() + 60
            while not any(partial.glob("checkpoint-*.json")) and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(generator.uniform(0.0, 0.5))
            kills += process.poll() is None
            process.send_signal(signal.SIGKILL)
    if not (tmp_path / "killed").exists():
        calibrated_here(tmp_path / "killed")
    assert kills >= 1
    assert_equal_folders(tmp_path / "whole", tmp_path / "killed")
    assert not (tmp_path / ".killed.partial").exists()


class InterruptedByTestError(Exception):
    pass


def stopping(stop: int) -> Iterator[torch.Tensor]:
    for i, batch in enumerate(images(8, 10)):
        if i == stop:
            raise InterruptedByTestError
        yield batch


OFTEN = Settings(tokens="all", checkpoint_seconds=0)


def test_a_changed_command_is_refused_until_fresh(tmp_path: Path) -> None:
    model, out = build("vit"), tmp_path / "stats"
    with pytest.raises(InterruptedByTestError):
        corp.calibrate(model, stopping(5), out=out, settings=OFTEN, origin={"seed": 0})
    with pytest.raises(CorpError, match=r"seed: 0 then, 1 now.*fresh=True"):
        corp.calibrate(model, stopping(9), out=out, settings=OFTEN, origin={"seed": 1})
    corp.calibrate(model, stopping(9), out=out, settings=Settings(tokens="all", fresh=True), origin={"seed": 1})
    assert Statistics.load(out).samples == 80


def test_what_a_kill_left_half_written_is_not_published(tmp_path: Path) -> None:
    model, out = build("vit"), tmp_path / "stats"
    with pytest.raises(InterruptedByTestError):
        corp.calibrate(model, stopping(5), out=out, settings=OFTEN)
    (tmp_path / ".stats.partial" / ".tmpUdLV18").write_bytes(b"half")  # as safetensors names what it is writing
    corp.calibrate(model, stopping(9), out=out, settings=OFTEN)
    named = {entry["file"] for entry in json.loads((out / "statistics.json").read_text())["sites"].values()}
    assert {path.name for path in out.iterdir()} == {"statistics.json", *named}


def test_two_runs_into_one_folder_one_says_so(tmp_path: Path) -> None:
    with started(run_calibration(tmp_path / "stats", "--wait-for", str(tmp_path / "go"))) as first:
        partial, deadline = tmp_path / ".stats.partial", time.monotonic() + 300
        while not any(partial.glob("checkpoint-*")) and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(CorpError, match="another run is writing"):
            calibrated_here(tmp_path / "stats")
        (tmp_path / "go").touch()
        assert first.wait(timeout=120) == 0
    assert Statistics.load(tmp_path / "stats").samples == 120


# Workers.


def torchrun(count: int, *args: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return [*launcher, "-m", "tests.helpers.calibrate_process", *args]


EMPTY_SHARD = pytest.param(1, id="empty shard", marks=pytest.mark.slow)


@pytest.mark.parametrize("batches", [pytest.param(3, id="uneven"), EMPTY_SHARD])
def test_workers_add_up_to_the_single_process(batches: int, tmp_path: Path) -> None:
    calibrated_here(tmp_path / "alone", "--single", "--batches", str(batches))
    together = finished(torchrun(2, str(tmp_path / "together"), "--single", "--batches", str(batches)))
    assert together.returncode == 0, together.stderr
    assert_added_up(tmp_path, 10 * batches)


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_and_the_same_command_again_gives_the_whole(tmp_path: Path) -> None:
    calibrated_here(tmp_path / "alone", "--single")
    command = torchrun(2, str(tmp_path / "together"), "--single")
    killed = finished([*command, "--kill-on", "1"])
    assert killed.returncode != 0
    assert "Signal 9 (SIGKILL)" in killed.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"alone", ".together.partial"}
    again = finished(command)
    assert again.returncode == 0, again.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"alone", "together"}
    assert_added_up(tmp_path, 120)


def assert_added_up(folder: Path, samples: int) -> None:
    a, b = Statistics.load(folder / "alone"), Statistics.load(folder / "together")
    assert a.samples == b.samples == samples
    for name in a.sums:
        if not name.endswith(".attn"):
            for part in ("fit", "held"):
                x, y = getattr(a.moments_of(name), part), getattr(b.moments_of(name), part)
                assert x.n == y.n
                if x.n:
                    torch.testing.assert_close(x.cov(), y.cov(), rtol=1e-9, atol=1e-9 * float(x.cov().abs().max()))
                    torch.testing.assert_close(x.mean, y.mean, rtol=1e-9, atol=1e-9)
        else:
            x, y = a.grams_of(name).total().head(0), b.grams_of(name).total().head(0)
            torch.testing.assert_close(x.cross(), y.cross(), rtol=1e-9, atol=1e-9 * float(x.cross().abs().max()))


@pytest.mark.slow
def test_a_failing_worker_fails_all_and_leaves_no_statistics(tmp_path: Path) -> None:
    done = finished(torchrun(2, str(tmp_path / "stats"), "--fail-on", "1"))
    assert done.returncode != 0
    assert "failed on 1 of 2 workers; worker 1" in done.stderr
    assert not (tmp_path / "stats").exists()


def test_merging_folders_equals_one_pass(tmp_path: Path) -> None:
    model, data = build("vit"), images(8, 20)
    corp.calibrate(model, data[:4], settings=ALL, origin={"data fingerprint": "a"}).save(tmp_path / "a")
    corp.calibrate(model, data[4:], settings=ALL, origin={"data fingerprint": "b"}).save(tmp_path / "b")
    done = run("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "c")
    assert done.exit_code == 0, done.output
    merged, whole = Statistics.load(tmp_path / "c"), corp.calibrate(model, data, settings=ALL)
    assert merged.samples == whole.samples
    x, y = merged.moments_of("blocks.1.mlp").total(), whole.moments_of("blocks.1.mlp").total()
    torch.testing.assert_close(x.cov(), y.cov(), rtol=1e-9, atol=1e-9)
    twice = run("merge", tmp_path / "a", tmp_path / "c", "-o", tmp_path / "d")
    assert twice.exit_code == 1
    assert "counted twice" in twice.output


@pytest.mark.parametrize("labelled", [False, True])
def test_logits_that_nothing_reads_are_not_computed(
    labelled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 300, (4, 2, 12))
    batches = [{"input_ids": part, **({"labels": part} if labelled else {})} for part in ids]
    computed: list[int] = []
    linear = torch.nn.functional.linear

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if len(weight) == config.vocab_size:
            computed.append(x.shape[1])
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    corp.calibrate(model, batches, out=tmp_path / "few", settings=ALL)
    assert computed[-4:] == [12 if labelled else 1] * 4
    corp.calibrate(model, batches, forward=lambda m, batch: m(**batch), out=tmp_path / "all", settings=ALL)
    assert computed[-4:] == [12] * 4
    assert_equal_folders(tmp_path / "few", tmp_path / "all")
