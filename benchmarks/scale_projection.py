"""Time and memory of the default for language models of 1, 7 and 70 B parameters on 1, 8 and 64 devices, worked out.

    python -m benchmarks.scale_projection        from results/scale.json to results/scale_projection.md

Operations are counted from the shapes. How fast they run is measured here as a share of what a plain forward pass
reaches (results/scale.json); a device is described by what it reaches in such a pass, and in float64 products.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from corp.io.tables import markdown_table

RESULTS = Path(__file__).parent / "results"
TOKENS = 65_536  # 128 texts of 512
HELD, TRIALS = 4096, 14  # tokens that trials run on, and how many there are
KEPT = 0.6  # of the operations
PER_CHANNEL, LEAST = 40, 30_000  # tokens that the sums of an MLP take (calibration/settings.py)
REFITTED, PER_INPUT = 49_152, 32  # tokens that the refit takes (surgery/refit/recording.py)
DOUBLE = 0.5  # of its float64 products' speed is what a factorisation reaches


class Model(NamedTuple):
    """A decoder: layers, stream, MLP and head widths, and parameters outside of the layers."""

    name: str
    layers: int
    stream: int
    mlp: int
    outside: float

    @property
    def params(self) -> float:
        return self.layers * (3 * self.stream * self.mlp + 3 * self.stream**2) + self.outside


class Device(NamedTuple):
    """What it reaches: operations per second of a plain pass, and of float64 products; bytes."""

    name: str
    forward: float
    double: float
    memory: float


MODELS = [
    Model("1 B", 21, 2048, 5632, 0.07e9),
    Model("7 B", 32, 4096, 11_008, 0.26e9),
    Model("70 B", 80, 8192, 28_672, 0.52e9),
]
DEVICES = [
    Device("2 CPU cores", 0.15e12, 0.08e12, 24e9),
    Device("A100", 120e12, 9e12, 80e9),
]


def operations(model: Model, workers: int) -> dict[str, tuple[float, float]]:
    """(operations of passes, operations in float64) of every stage, on the busiest of so many workers."""
    once = 2 * model.params * TOKENS
    tokens = max(LEAST, PER_CHANNEL * model.mlp)
    sums = model.layers * min(tokens, TOKENS) * (model.mlp**2 + model.stream**2)  # half of a product: a triangle
    eliminated = model.layers * (1 + 4 / 3 / 2) * model.mlp**3  # an inverse, and downdates in float32: half as long
    fits = model.layers * (KEPT * model.mlp) ** 2 * (KEPT * model.mlp / 3 + 4 * model.stream)
    share = -(-model.layers // workers) / model.layers  # whole sites
    streams = refitted_tokens(model)
    refitted = (1 + 1.1 * KEPT) * once * streams / TOKENS + model.layers * streams * (KEPT * model.mlp) ** 2
    return {
        "calibrate": ((once + sums) / workers, 0.0),
        "search": (TRIALS * HELD / TOKENS * KEPT * once, share * eliminated + TRIALS * fits),
        "plan": (0.0, 3 * share * fits),
        "refit": (refitted, 4 * fits),
    }


def refitted_tokens(model: Model) -> int:
    return min(TOKENS, max(REFITTED, PER_INPUT * model.mlp))


def seconds(model: Model, device: Device, workers: int, slower: dict[str, float]) -> dict[str, float]:
    """Seconds of every stage; `slower` is how much longer a stage took where it was measured than was counted."""
    return {
        stage: slower.get(stage, 1.0) * (passes / device.forward + wide / (DOUBLE * device.double))
        for stage, (passes, wide) in operations(model, workers).items()
    }


def memory(model: Model) -> dict[str, float]:
    """Bytes: weights in 16 bits, dense and pruned; the sums of all sites; the streams of the refit."""
    return {
        "weights": 2 * (1 + KEPT) * model.params,
        "statistics": model.layers * 2 * 8 * (model.mlp**2 + model.stream**2),
        "one layer's statistics": 2 * 8 * (model.mlp**2 + model.stream**2),
        "streams": 2 * refitted_tokens(model) * (6 * model.stream + KEPT * model.mlp),
    }


def slower_than_counted(found: dict[str, Any]) -> dict[str, float]:
    """The measured run of SmolLM2's shape over what the counts say, by stage; 1 where they were not slower."""
    run = next(run for run in found["whole"] if run["shape"] == "smollm2" and run["recipe"] == "default")
    small = Model("smollm2", run["depth"], 576, 1536, 49_152 * 576)
    rate = 2 * small.params * run["samples"] * 512 / run["forward"]
    counted = seconds(small, Device("here", rate, rate / 2, 0), 1, {})
    ratio = run["samples"] * 512 / TOKENS
    return {stage: max(1.0, run["stages"][stage] / (counted[stage] * ratio)) for stage in counted}


def main() -> None:
    slower = slower_than_counted(json.loads((RESULTS / "scale.json").read_text()))
    rows = []
    for model in MODELS:
        for device in DEVICES:
            for workers in (1, 8, 64):
                taken = seconds(model, device, workers, slower)
                whole = sum(taken.values())
                most = max(taken, key=taken.__getitem__)
                cells = [f"{value / 60:,.1f}" for value in (*taken.values(), whole)]
                rows.append((model.name, f"{workers} x {device.name}", *cells, f"{most} ({taken[most] / whole:.0%})"))
    table = markdown_table(("model", "devices", "calibrate", "search", "plan", "refit", "whole, min", "most"), rows)
    sizes = [(m.name, *(f"{value / 1e9:,.1f}" for value in memory(m).values())) for m in MODELS]
    bytes_table = markdown_table(("model", *memory(MODELS[0])), sizes)
    text = f"Minutes, worked out, not measured:\n\n{table}\n\nGigabytes:\n\n{bytes_table}\n"
    (RESULTS / "scale_projection.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
