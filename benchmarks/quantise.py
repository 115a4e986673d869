"""DeiT-Tiny dense and pruned, each in single, half and 8-bit precision: top-1, size on disk, time.

Real weights and images (CORP_ASSETS/vision), as benchmarks.deit_tiny uses them. 8-bit: ONNX Runtime's dynamic
quantisation of the exported file and, where torchao is installed, its int8 weights.
Every top-1 is kept in results/quantise.json as soon as it is there, and not measured again under the same settings;
times are taken at the end, all variants in turn.

    CORP_ASSETS=... python -m benchmarks.quantise [--sparsity 0.3] [--rounds 20] [--images 1000]
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor, nn

import corp
from benchmarks.deit_tiny import Setup
from corp.io.files import write_text
from corp.io.tables import markdown_table
from corp.measure.footprint import disk_bytes
from corp.measure.timing import interleave, speed_up, summarize
from corp.recipe import Recipe
from corp.storage.export.formats import FILES, write_format

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("runtime", "precision", "model", "top-1 %", "MB on disk", "ms, batch 1", "gain", "ms, batch 8", "gain")
BATCHES = (1, 8)


@dataclass(frozen=True)
class Variant:
    """One way to run one model. `timed` is false where it is only kept in that precision, and computed in float32."""

    runtime: str
    precision: str
    model: str
    size: int
    call: Callable[[Tensor], Tensor]
    timed: bool = True


def torch_variants(name: str, model: nn.Module) -> list[Variant]:
    half = copy.deepcopy(model).bfloat16()
    size, half_size = disk_bytes(model), disk_bytes(half)
    made = [
        Variant("torch", "float32", name, size, model),
        Variant("torch", "bfloat16 on disk", name, half_size, half.float(), timed=False),
    ]
    if find_spec("torchao") is not None:
        # Its int8 activations too have no fast kernel on a CPU without VNNI: minutes where float32 takes seconds.
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        small = copy.deepcopy(model)
        quantize_(small, Int8WeightOnlyConfig())
        file = io.BytesIO()
        torch.save(small.state_dict(), file)
        made.append(Variant("torch", "int8 weights (torchao)", name, file.tell(), small))
    return made


def onnx_variants(name: str, model: nn.Module, folder: Path) -> list[Variant]:
    folder.mkdir()
    write_format(model, folder, "onnx", torch.randn(2, 3, 224, 224))
    single, small = folder / FILES["onnx"], folder / "int8.onnx"
    # Seven bits: without VNNI two products of eight overflow the 16 bits that they are added in.
    quantize_dynamic(
        single,
        small,
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        reduce_range=True,
        weight_type=QuantType.QInt8,
    )
    found = (("float32", single), ("int8 dynamic", small))
    return [Variant("ONNX Runtime", precision, name, path.stat().st_size, session(path)) for precision, path in found]


def session(path: Path) -> Callable[[Tensor], Tensor]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    running = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(running.run(None, {"input": x.numpy()})[0])


def accuracy(call: Callable[[Tensor], Tensor], batches: list[Tensor], labels: Tensor) -> float:
    right = torch.cat([call(batch).argmax(1) for batch in batches]) == labels
    return 100 * float(right.double().mean())


def measure(variants: list[Variant], setup: Setup, rounds: int, images: int, book: Book) -> list[dict[str, Any]]:
    batches, labels = setup.images[: images // 50], setup.labels[:images]
    rows = []
    for variant in variants:
        row = {key: getattr(variant, key) for key in ("runtime", "precision", "model", "size")}
        known = book.found(row)
        row["top1"] = accuracy(variant.call, batches, labels) if known is None else known
        rows.append(row)
        book.write(rows)
        print(row, flush=True)
    timed = [(row, variant) for row, variant in zip(rows, variants, strict=True) if variant.timed]
    for batch in BATCHES:
        x = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        times = interleave([partial(variant.call, x) for _, variant in timed], rounds=rounds)
        for (row, _), seconds in zip(timed, times, strict=True):
            row[f"ms_{batch}"] = 1e3 * summarize(seconds).p50
            row[f"gain_{batch}"] = speed_up(times[0], seconds).to_dict()
    book.write(rows)
    return rows


class Book:
    """What was measured, on disk after each variant: an interrupted run with the same settings goes on there."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        before = json.loads(path.read_text()) if path.is_file() else {}
        self.before = before.get("rows", []) if before.get("settings") == settings else []

    def found(self, row: dict[str, Any]) -> float | None:
        """The top-1 of the same variant."""
        return next((old["top1"] for old in self.before if identity(old) == identity(row)), None)

    def write(self, rows: list[dict[str, Any]]) -> None:
        made = {identity(row) for row in rows}
        rest = [old for old in self.before if identity(old) not in made]
        write_text(self.path, json.dumps({"settings": self.settings, "rows": [*rows, *rest]}, indent=1) + "\n")


def identity(row: dict[str, Any]) -> tuple[str, ...]:
    return row["runtime"], row["precision"], row["model"]


def table(rows: list[dict[str, Any]]) -> str:
    def cells(row: dict[str, Any]) -> list[str]:
        shown = [row["runtime"], row["precision"], row["model"], f"{row['top1']:.1f}", f"{row['size'] / 1e6:.1f}"]
        for batch in BATCHES:
            ms, gain = row.get(f"ms_{batch}"), row.get(f"gain_{batch}")
            shown += ["–", "–"] if ms is None or gain is None else [f"{ms:.1f}", f"{gain['value']:.2f}x"]
        return shown

    return markdown_table(COLUMNS, [cells(row) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--images", type=int, default=1000)
    given = parser.parse_args()
    assets = os.environ.get("CORP_ASSETS", "")
    if not assets:
        sys.exit("CORP_ASSETS is not set: this benchmark needs real weights and images")
    setup = Setup(Path(assets))
    recipe = Recipe.paper(mlp=given.sparsity, attn=given.sparsity)
    plan = corp.plan(setup.model, setup.stats, recipe)
    pair = {"dense": setup.model, "pruned": corp.apply(setup.model, setup.stats, plan).model}
    settings = {
        "sparsity": given.sparsity,
        "images": given.images,
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
    }
    book = Book(RESULTS / "quantise.json", settings)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        variants = [v for name, model in pair.items() for v in torch_variants(name, model)]
        variants += [v for name, model in pair.items() for v in onnx_variants(name, model, Path(folder) / name)]
        rows = measure(variants, setup, given.rounds, given.images, book)
    text = (
        f"DeiT-Tiny; pruned: MLP and Q/K {given.sparsity:.0%}, compensated. Top-1 on {given.images} images. "
        f"Threads: {torch.get_num_threads()}; gain: against dense float32 in torch, median of {given.rounds} "
        f"interleaved rounds.\n\n{table(rows)}\n"
    )
    (RESULTS / "quantise.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
