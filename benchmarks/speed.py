"""How much faster pruned DeiT shapes are than the dense ones, against what their MACs promise: torch and ONNX Runtime.

Weights do not change the time, so they are random, and models are given the widths without calibration. All variants
of a model at one sparsity are timed in turn in one process, together with the dense model; what is reported is the
median of the ratios within rounds. Every finished part is kept in results/speed.json and not measured again (--fresh
forgets them), so that a run can be made in parts and goes on where it was interrupted.

    python -m benchmarks.speed [--models deit_small deit_base] [--variants joint equal] [--sparsities 0.5]
                               [--batches 1 8] [--runtimes torch onnx] [--rounds 15] [--fresh]
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

import corp
from benchmarks.params import shapes_only_plan
from corp.io.files import write_text
from corp.io.tables import markdown_table
from corp.measure.cost import count_macs
from corp.measure.timing import interleave, speed_up, summarize
from corp.recipe import KINDS, Recipe
from corp.storage.export.formats import FILES, write_format
from corp.surgery.apply import shrink

# isort: split
import timm

RESULTS = Path(__file__).parent / "results"
MODELS = {name: f"{name}_patch16_224" for name in ("deit_tiny", "deit_small", "deit_base")}
VARIANTS: dict[str, tuple[str, ...]] = {  # what is pruned, by the kinds of sites
    "mlp": ("mlp",),
    "qk": ("attn",),
    "joint": ("mlp", "attn"),
    "vo": ("vo",),
    "equal": ("mlp", "attn", "vo"),  # one width for q, k and v
}
TITLES = {"mlp": "MLP", "qk": "Q/K", "joint": "Q/K + MLP", "vo": "V/O", "equal": "Q/K + V/O + MLP (equal heads)"}
KNOWN = [name for name, kinds in VARIANTS.items() if set(kinds) <= set(KINDS)]
SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
RUNTIMES = ("torch", "onnx")
COLUMNS = ("model", "variant", "sparsity", "runtime", "batch", "MAC ratio", "speed-up", "95 % interval", "/ MAC ratio")


@dataclass(frozen=True)
class Part:
    """What is built and timed together: the dense model and its variants at one sparsity."""

    model: str
    sparsity: float
    runtime: str

    def key(self, variant: str, batch: int) -> str:
        return f"{self.model} {variant} {self.sparsity:.2f} {self.runtime} {batch}"


def build(name: str, kinds: tuple[str, ...], sparsity: float) -> nn.Module:
    """The model with random weights, pruned by `sparsity` at the sites of these kinds."""
    model: nn.Module = timm.create_model(MODELS[name]).eval()
    if kinds:
        shrink(model, corp.find_sites(model), shapes_only_plan(model, Recipe.paper(**dict.fromkeys(kinds, sparsity))))
    return model


def sample(batch: int) -> Tensor:
    return torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def runner(model: nn.Module, runtime: str) -> Callable[[Tensor], object]:
    """The model as a function of a batch, in torch or as an ONNX file in ONNX Runtime, on as many threads as torch."""
    if runtime == "torch":
        return model
    with tempfile.TemporaryDirectory() as folder:
        write_format(model, Path(folder), "onnx", sample(2))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        path = Path(folder) / FILES["onnx"]
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"input": x.numpy()})


class Book:
    """Finished measurements, on disk after each part."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        self.found: dict[str, Any] = {} if fresh or not path.is_file() else json.loads(path.read_text())["measured"]

    def add(self, measured: dict[str, Any], machine: dict[str, Any]) -> None:
        self.found |= measured
        write_text(self.path, json.dumps({"machine": machine, "measured": self.found}, indent=1) + "\n")


def measure(part: Part, variants: list[str], batches: list[int], rounds: int) -> dict[str, Any]:
    """Time and MACs of every variant against the dense model, by key."""
    names = ["dense", *variants]
    models = [build(part.model, VARIANTS.get(name, ()), part.sparsity) for name in names]
    macs = [count_macs(model, sample(1)) for model in models]
    runs = [runner(model, part.runtime) for model in models]
    found = {}
    for batch in batches:
        with torch.inference_mode():
            times = interleave([partial(run, sample(batch)) for run in runs], rounds=rounds, warm_up=2)
        for name, cost, seconds in zip(names[1:], macs[1:], times[1:], strict=True):
            gain, ideal = speed_up(times[0], seconds), macs[0] / cost
            found[part.key(name, batch)] = {
                **{"model": part.model, "variant": name, "sparsity": part.sparsity},
                **{"runtime": part.runtime, "batch": batch, "rounds": rounds},
                **{"dense_ms": 1e3 * summarize(times[0]).p50, "ms": 1e3 * summarize(seconds).p50},
                **{"mac_ratio": ideal, "speed_up": gain.to_dict(), "share": gain.value / ideal},
            }
    return found


def table(found: dict[str, Any]) -> str:
    def cells(row: dict[str, Any]) -> list[str]:
        gain = row["speed_up"]
        verdict = " noise" if gain["within_noise"] else ""
        return [
            *(row["model"], TITLES[row["variant"]], f"{row['sparsity']:.0%}", row["runtime"], str(row["batch"])),
            *(f"{row['mac_ratio']:.2f}", f"{gain['value']:.2f}", f"{gain['low']:.2f}–{gain['high']:.2f}{verdict}"),
            f"{row['share']:.2f}",
        ]

    return markdown_table(COLUMNS, [cells(found[key]) for key in sorted(found)])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["deit_small", "deit_base"])
    parser.add_argument("--variants", nargs="+", choices=KNOWN, default=KNOWN)
    parser.add_argument("--sparsities", nargs="+", type=float, default=SPARSITIES)
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 8))
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=RUNTIMES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "speed.json")
    parser.add_argument("--fresh", action="store_true")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    machine = {
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
        "corp": corp.__version__,
    }
    book = Book(given.out, fresh=given.fresh)
    parts = [Part(*chosen) for chosen in product(given.models, given.sparsities, given.runtimes)]
    for part in parts:
        wanted = list(product(given.variants, given.batches))
        missing = [(variant, batch) for variant, batch in wanted if part.key(variant, batch) not in book.found]
        if missing:
            variants, batches = (list(dict.fromkeys(column)) for column in zip(*missing, strict=True))
            made = measure(part, variants, batches, given.rounds)
            book.add(made, machine)
            print("\n".join(f"{key}: {row['speed_up']['value']:.2f}x" for key, row in made.items()), flush=True)
    text = f"Threads: {machine['threads']}. Speed-up over the dense model, median of ratios within rounds.\n\n"
    given.out.with_suffix(".md").write_text(f"{text}{table(book.found)}\n")
    print(table(book.found))


if __name__ == "__main__":
    main()
