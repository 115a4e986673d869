"""What calibration costs, against a plain forward pass and against the paper's way (cache all activations, then loop).

All three run on the same batches in one process, interleaved; medians and ratios are reported. Random weights: the
cost does not depend on them. Also: plan and apply, and peak memory.

    python -m benchmarks.calibration [--models deit_tiny_patch16_224,...] [--rounds 5]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import corp
from corp.calibration.collector import Collector
from corp.calibration.settings import Settings
from corp.io.tables import markdown_table
from corp.measure.cost import count_params
from corp.measure.estimate import summed
from corp.recipe import Recipe
from corp.sites import AttentionSite, MLPSite, ValueSite

# isort: split
import timm

RESULTS = Path(__file__).parent / "results"
MODELS = ("deit_tiny_patch16_224", "deit_small_patch16_224", "deit_base_patch16_224")
TOTAL = 1000  # images of the run whose tokens "auto" is sized for
TOKENS = {"all tokens": "all", "auto": "auto"}


class Naive:
    """The paper's Algorithm 1: run and cache activations, then loop over samples and heads."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.sites = model, list(corp.find_sites(model))

    def __call__(self, x: Tensor) -> None:
        cache: dict[str, Tensor] = {}
        handles = []
        for site in self.sites:
            if isinstance(site, MLPSite | ValueSite):
                module = self.model.get_submodule(site.down)
                handles.append(module.register_forward_pre_hook(lambda _m, a, n=site.name: cache.update({n: a[0]})))
            else:
                module = self.model.get_submodule(site.q.module)
                handles.append(module.register_forward_hook(lambda _m, _a, o, n=site.name: cache.update({n: o})))
        with torch.no_grad():
            self.model(x)
        for handle in handles:
            handle.remove()
        for site in self.sites:
            if isinstance(site, AttentionSite):
                self._attention(site, cache[site.name])
            else:
                tokens = cache[site.name].flatten(0, 1)
                centred = tokens - tokens.mean(0)
                _ = centred.T @ centred

    def _attention(self, site: AttentionSite, qkv: Tensor) -> None:
        """Per sample and head, the Kronecker product of half of the dimensions."""
        d, half = site.width, site.width // 2
        for sample in qkv:
            for h in range(site.heads):
                q = sample[:, site.q.start + h * d : site.q.start + h * d + half]
                k = sample[:, site.k.start + h * d : site.k.start + h * d + half]
                _ = torch.kron(k.T @ k, q.T @ q)


def timings(name: str, batch: int, rounds: int) -> dict[str, Any]:
    """Seconds per image of a forward pass, of calibration on all and on enough tokens, and of the naive way."""
    model = timm.create_model(name).eval()
    x = torch.randn(batch, 3, 224, 224)
    sites = summed(corp.find_sites(model))
    collectors = {way: Collector(sites, Settings(tokens).per_sample(sites, TOTAL)) for way, tokens in TOKENS.items()}
    naive = Naive(model)

    def forward(collector: Collector | None) -> None:
        with torch.no_grad():
            if collector is None:
                model(x)
            else:
                with collector.watching(model):
                    model(x)

    ways = {"forward": None, **collectors}
    seconds: dict[str, list[float]] = {way: [] for way in (*ways, "naive")}
    for round_ in range(rounds + 1):
        for way, collector in ways.items():
            seconds[way].append(timed(lambda c=collector: forward(c)))
        if round_ < 2:  # it is slow, and its time is not in doubt
            seconds["naive"].append(timed(lambda: naive(x[:4])) * batch / 4)
    medians = {way: statistics.median(values[1:]) / batch for way, values in seconds.items()}
    tokens = sum(isinstance(site, MLPSite) for site in sites) and 197 / medians["all tokens"]
    return {
        "params": count_params(model),
        "batch": batch,
        "seconds per image": medians,
        "ratio": {way: value / medians["forward"] for way, value in medians.items()},
        "tokens per second": tokens,
    }


def timed(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def growth(name: str, samples: int, batch: int) -> dict[str, Any]:
    """A whole run on `samples` random images: calibrate, plan, apply, and the peak of memory above the model's."""
    model = timm.create_model(name).eval()
    x = torch.randn(batch, 3, 224, 224)
    with torch.no_grad():
        model(x)
    before = peak()
    batches = [x] * (samples // batch)
    seconds = {}
    start = time.perf_counter()
    stats = corp.calibrate(model, batches, settings=Settings(tokens="all"))
    seconds["calibrate"] = time.perf_counter() - start
    start = time.perf_counter()
    plan = corp.plan(model, stats, Recipe.paper(mlp=0.5, attn=0.5))
    seconds["plan"] = time.perf_counter() - start
    start = time.perf_counter()
    corp.apply(model, stats, plan)
    seconds["apply"] = time.perf_counter() - start
    return {"samples": samples, "seconds": seconds, "peak bytes above the forward pass": peak() - before}


def peak() -> int:
    """High-water mark of this process. Not ru_maxrss: Linux hands that on from the parent."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def in_own_process(function: str, *args: Any) -> Any:
    """Peak memory is a process's: measure each run in a fresh one."""
    code = f"import json; from benchmarks.calibration import {function}; print(json.dumps({function}(*{args!r})))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("timings", "growth"), help="measure this part again, keep the other")
    args = parser.parse_args()
    names, file = args.models.split(","), RESULTS / "calibration.json"
    found: dict[str, Any] = json.loads(file.read_text()) if args.only else {}
    if args.only != "growth":
        found |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
        found["models"] = {name: timings(name, args.batch, args.rounds) for name in names}
    if args.only != "timings":
        found["growth"] = {name: [in_own_process("growth", name, n, 16) for n in (64, 192)] for name in names[:2]}
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")
    file.with_suffix(".md").write_text(rendered(found))
    print(rendered(found))


def rendered(found: dict[str, Any]) -> str:
    rows = [
        (name, *(f"{r['ratio'][way]:.2f}" for way in ("all tokens", "auto", "naive")), f"{r['tokens per second']:.0f}")
        for name, r in found["models"].items()
    ]
    columns = ("model", "all tokens / forward", "auto / forward", "paper's way / forward", "tokens/s (all)")
    lines = [
        (name, str(run["samples"]), *(f"{run['seconds'][step]:.1f}" for step in ("calibrate", "plan", "apply")),
         f"{run['peak bytes above the forward pass'] / 2**20:.0f}")
        for name, runs in found["growth"].items() for run in runs
    ]  # fmt: skip
    steps = ("model", "images", "calibrate, s", "plan, s", "apply, s", "peak MiB above a forward pass")
    return (
        f"Marginal cost per image, relative to a plain forward pass:\n\n{markdown_table(columns, rows)}\n\n"
        f"Whole runs, all tokens, 50 % of both removed:\n\n{markdown_table(steps, lines)}\n"
    )


if __name__ == "__main__":
    main()
