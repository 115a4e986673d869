"""Whole runs in multiples of one plain forward pass over the same data: time by stage, memory, growth.

    python -m benchmarks.scale              DeiT-T/S/B/L and SmolLM2 shapes, random weights: about an hour and a half
    python -m benchmarks.scale --large      also SmolLM2's shape on 128 texts and a Llama of 1 B (hours, 16 GB)
    python -m benchmarks.scale --quick      two small shapes: does it run?

Each run has a process of its own, one thread, and counts that process's CPU time, so that a busy machine matters less.
Memory is the most that the process held, less what it held before. Rows that are in results/scale.json stay and are not
made again. Writes that file, results/scale.md, and what follows from them for larger models on other machines:
results/scale_projection.md.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import corp
from benchmarks import scale_projection
from corp import Recipe
from corp.calibration.batches import evaluating, feed
from corp.errors import CorpWarning
from corp.io.observer import Observer
from corp.io.tables import markdown_table

RESULTS = Path(__file__).parent / "results"
RECIPES = {
    "paper": Recipe.paper(mlp=0.5, attn=0.5),
    "default": Recipe(target_macs=0.6),
    "tokens": Recipe(target_macs=0.6, tokens="auto"),
}
WIDTHS_ONLY = ("paper", "default")
STAGES = {
    "finding": "find",
    "calibrating": "calibrate",
    "error curves": "search",
    "sensitivities": "search",
    "trying": "search",
    "planning": "plan",
    "checking": "verify",
    "re": "refit",
}


class Case(NamedTuple):
    """A shape, how many layers of it, how many samples (images, or texts of 512 tokens), and the recipe."""

    shape: str
    depth: int
    samples: int
    recipe: str


WHOLE = [
    *(Case("deit_tiny", 12, 1000, recipe) for recipe in RECIPES),
    *(Case("deit_small", 12, 1000, recipe) for recipe in WIDTHS_ONLY),
    Case("deit_base", 12, 500, "paper"),
    Case("deit3_large", 24, 48, "paper"),
    *(Case("smollm2", 30, 32, recipe) for recipe in WIDTHS_ONLY),
]
LARGE = [
    *(Case("smollm2", 30, 128, recipe) for recipe in WIDTHS_ONLY),
    Case("llama_1b", 21, 8, "paper"),
    Case("llama_1b", 21, 8, "default"),
]
GROWTH = {  # what grows, and the runs that differ in nothing else
    "width": [Case(shape, 2, 128, "default") for shape in ("deit_tiny", "deit_small", "deit_base")],
    "depth": [Case("deit_small", depth, 128, "default") for depth in (2, 4, 8)],
    "samples": [Case("deit_small", 2, samples, "default") for samples in (128, 256, 512)],
}
WIDTHS = {"deit_tiny": 192, "deit_small": 384, "deit_base": 768}
QUICK = [Case("deit_tiny", 2, 32, "default"), Case("smollm2", 2, 8, "paper")]


def built(case: Case) -> tuple[Any, list[Any]]:
    """The model, with random weights, and its batches."""
    torch.manual_seed(0)
    if case.shape.startswith("deit"):
        import timm

        model = timm.create_model(f"{case.shape}_patch16_224", depth=case.depth).eval()
        return model, list(torch.randn(case.samples, 3, 224, 224).split(32))
    import transformers

    sizes = {"smollm2": (49_152, 576, 1536, 9, 3), "llama_1b": (32_000, 2048, 5632, 32, 8)}[case.shape]
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = transformers.LlamaConfig(
        **dict(zip(names, sizes, strict=True)), num_hidden_layers=case.depth, tie_word_embeddings=True, use_cache=False
    )
    tokens = torch.randint(sizes[0], (case.samples, 512))
    return transformers.LlamaForCausalLM(config).eval(), [{"input_ids": part} for part in tokens.split(4)]


class Clock(Observer):
    """CPU seconds by stage; an inner stage's are not its outer one's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last, self.running = time.process_time(), ["other"]

    @contextmanager
    def stage(self, name: str, total: int | None, unit: str) -> Iterator[Any]:
        self.lap()
        self.running.append(next((short for start, short in STAGES.items() if name.startswith(start)), "other"))
        yield lambda _done: None
        self.lap()
        self.running.pop()

    def lap(self) -> None:
        now = time.process_time()
        self.seconds[self.running[-1]] = self.seconds.get(self.running[-1], 0.0) + now - self.last
        self.last = now


def forward(model: Any, batches: Sequence[Any]) -> float:
    """CPU seconds of one plain pass; a first batch warms up."""
    with torch.no_grad(), evaluating(model):
        feed(model, batches[0], None)
        start = time.process_time()
        for batch in batches:
            feed(model, batch, None)
    return time.process_time() - start


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(case: Case) -> dict[str, Any]:
    """One whole run."""
    warnings.simplefilter("ignore", CorpWarning)
    torch.set_num_threads(1)
    model, batches = built(case)
    plain, before, clock = forward(model, batches), peak(), Clock()
    result = corp.prune(model, batches, RECIPES[case.recipe], observer=clock)
    clock.lap()
    plain = (plain + forward(model, batches)) / 2  # the machine's speed changes within a run
    sizes = [sum(p.numel() * p.element_size() for p in m.parameters()) for m in (model, result.model)]
    params = sum(p.numel() for p in model.parameters())
    memory = {"dense": sizes[0], "pruned": sizes[1], "taken": peak() - before, "before": before}
    return {**case._asdict(), "params": params, "forward": plain, "stages": clock.seconds, "memory": memory}


def in_a_process(case: Case) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.scale", "--case", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(case, f"{sum(found['stages'].values()) / found['forward']:.2f} forward passes", flush=True)
    return found


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The power of the size with which the values grow, by least squares of logarithms."""
    x, y = ([math.log(max(v, 1e-3)) for v in part] for part in (sizes, values))
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def growth(runs: dict[str, list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    """A row per stage: its exponent in width, depth and samples."""
    sizes = {
        "width": [float(WIDTHS[case.shape]) for case in GROWTH["width"]],
        "depth": [float(case.depth) for case in GROWTH["depth"]],
        "samples": [float(case.samples) for case in GROWTH["samples"]],
    }
    rows = []
    for stage in ("forward", "find", "calibrate", "search", "plan", "verify", "refit", "other"):
        values = {
            what: [run["forward"] if stage == "forward" else run["stages"].get(stage, 0.0) for run in some]
            for what, some in runs.items()
        }
        rows.append((stage, *(f"{exponent(sizes[what], values[what]):.1f}" for what in sizes)))
    return rows


def page(found: dict[str, Any]) -> str:
    """The tables of results/scale.md."""
    stages = ("find", "calibrate", "search", "plan", "verify", "refit", "other")
    rows = []
    for run in found["whole"]:
        in_passes = [run["stages"].get(stage, 0.0) / run["forward"] for stage in stages]
        name = f"{run['shape']}, {run['depth']} layers, {run['samples']} samples"
        memory = run["memory"]["taken"] / run["memory"]["dense"]
        cells = [f"{value:.2f}" for value in (*in_passes, sum(in_passes))]
        rows.append((name, run["recipe"], f"{run['forward']:.0f}", *cells, f"{memory:.1f}"))
    head = ("model", "recipe", "forward pass, s", *stages, "whole", "memory taken, dense models")
    text = f"CPU time in plain forward passes over the same data, one thread.\n\n{markdown_table(head, rows)}\n"
    if all(len(found["growth"].get(what, [])) == len(cases) for what, cases in GROWTH.items()):
        table = markdown_table(("stage", "width", "depth", "samples"), growth(found["growth"]))
        text += f"\nTime grows with this power of the width, the depth and the samples:\n\n{table}\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measured(Case(*json.loads(args.case)))))
        return
    if args.quick:
        print(page({"whole": [in_a_process(case) for case in QUICK], "growth": {}}))
        return
    path = RESULTS / "scale.json"
    found = json.loads(path.read_text()) if path.is_file() else {"whole": [], "growth": {}}
    for case in [*WHOLE, *(LARGE if args.large else [])]:
        keep(found, found["whole"], case, path)
    for what, cases in GROWTH.items():
        for case in cases:
            keep(found, found["growth"].setdefault(what, []), case, path)
    print(page(found))
    scale_projection.main()


def keep(found: dict[str, Any], rows: list[dict[str, Any]], case: Case, path: Path) -> None:
    """Run a case that is not among the rows, and write them all."""
    if any(Case(*(row[name] for name in Case._fields)) == case for row in rows):
        return
    rows.append(in_a_process(case))
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(found))


if __name__ == "__main__":
    main()
