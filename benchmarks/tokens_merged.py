"""How much faster DeiT shapes are with merged tokens, against what their MACs promise: torch and ONNX Runtime.

Weights hardly change the time, so they are random. The model without merging and its merged versions are timed in turn
in one process; what is reported is the median of the ratios within rounds. `half` merges twice as many tokens in every
second block: as many operations, fewer small kernels.

    python -m benchmarks.tokens_merged [--models deit_tiny deit_small] [--shares 0.617] [--batches 1 8]
                                       [--runtimes torch onnx] [--rounds 10] [--out results/tokens_merged.json]
"""

from __future__ import annotations

import argparse
import json
import platform
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed import MODELS, RESULTS, RUNTIMES, runner, sample
from corp.io.files import write_text
from corp.io.tables import markdown_table
from corp.measure.timing import interleave, speed_up, summarize
from corp.planning.merging import Merging
from corp.steps.allocation.tokens import Shape, fitting, in_every_second, mac_share, merged_copy, rising

# isort: split
import timm

SHAPE = rising(12)  # what the search starts from, and ends with for DeiT-Tiny
SHAPES = {"every block": SHAPE, "every second block": in_every_second(SHAPE)}
TOKENS = 197
SHARES = (0.617, 0.467)
COLUMNS = ("model", "merging in", "runtime", "batch", "MAC ratio", "speed-up", "95 % interval", "/ MAC ratio")


def schedule(model: Any, shape: Shape, share: float) -> tuple[Merging, float]:
    """The merging of this shape that leaves `share` of the operations, and the share that it leaves."""
    template = Merging("blocks", (0,) * len(shape), 1, read=1)
    cost = mac_share(model, sample(1), template)
    merging = fitting(template, shape, share, cost, TOKENS)
    return merging, cost(merging)


def measure(name: str, share: float, runtime: str, batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """Time and operations of the merged versions of one model against the model itself."""
    dense = timm.create_model(MODELS[name]).eval()
    chosen = {what: schedule(dense, shape, share) for what, shape in SHAPES.items()}
    runs = [runner(model, runtime) for model in (dense, *(merged_copy(dense, one) for one, _ in chosen.values()))]
    found = []
    for batch in batches:
        with torch.inference_mode():
            times = interleave([partial(run, sample(batch)) for run in runs], rounds=rounds, warm_up=2)
        for (what, (merging, left)), seconds in zip(chosen.items(), times[1:], strict=True):
            gain = speed_up(times[0], seconds)
            found.append(
                {
                    **{"model": name, "merging": what, "schedule": list(merging.schedule), "runtime": runtime},
                    **{"batch": batch, "rounds": rounds, "dense_ms": 1e3 * summarize(times[0]).p50},
                    **{"ms": 1e3 * summarize(seconds).p50, "mac_ratio": 1 / left, "speed_up": gain.to_dict()},
                    "share": gain.value * left,
                }
            )
    return found


def table(found: list[dict[str, Any]]) -> str:
    def cells(row: dict[str, Any]) -> list[str]:
        gain = row["speed_up"]
        verdict = " noise" if gain["within_noise"] else ""
        return [
            *(row["model"], row["merging"], row["runtime"], str(row["batch"]), f"{row['mac_ratio']:.2f}"),
            *(f"{gain['value']:.2f}", f"{gain['low']:.2f}–{gain['high']:.2f}{verdict}", f"{row['share']:.2f}"),
        ]

    return markdown_table(COLUMNS, [cells(row) for row in found])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=RUNTIMES)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS / "tokens_merged.json")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    machine = {"threads": torch.get_num_threads(), "machine": platform.machine(), "torch": torch.__version__}
    found: list[dict[str, Any]] = []
    for name, share, runtime in product(asked.models, asked.shares, asked.runtimes):
        found += measure(name, share, runtime, asked.batches, asked.rounds)
        write_text(asked.out, json.dumps({"machine": machine, "measured": found}, indent=1) + "\n")
        print(f"{name} {share} {runtime}", flush=True)
    write_text(asked.out.with_suffix(".md"), table(found) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
