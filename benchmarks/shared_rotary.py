"""What one set of rotary pairs for all heads costs against every head's own choice: perplexity of both.

Only queries and keys are pruned, without a refit, so that nothing makes up for the difference.

    CORP_ASSETS=... python -m benchmarks.shared_rotary [stories smollm2] [--samples 150] [--shares 0.25]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import corp
from benchmarks.language import MODELS, Benchmark
from corp.io.tables import markdown_table
from corp.recipe import ROTARY, Recipe

RESULTS = Path(__file__).parent / "results"


def rows(benchmark: Benchmark, shares: Sequence[float]) -> Iterator[dict[str, Any]]:
    """The dense model first, then every share, both ways."""
    yield {"share": 0.0, "rotary": "dense", **benchmark.measure(benchmark.model)}
    stats = corp.calibrate(benchmark.model, benchmark.calibration)
    for share in shares:
        for rotary in ROTARY:
            recipe = Recipe(attn=share, rotary=rotary, sequential=False)
            made = corp.apply(benchmark.model, stats, corp.plan(benchmark.model, stats, recipe))
            yield {"share": share, "rotary": rotary, **benchmark.measure(made.model)}


def table(title: str, samples: int, found: list[dict[str, Any]]) -> str:
    columns = [key for key in found[0] if key not in ("share", "rotary")]
    cells = [(f"{row['share']:.1%}", row["rotary"], *(f"{row[column]:.3f}" for column in columns)) for row in found]
    return f"{markdown_table((f'{title}: Q/K removed', 'pairs', *columns), cells)}\n\nCalibrated on {samples} texts.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["stories", "smollm2"])
    parser.add_argument("--samples", type=int, default=150, help="texts that calibrate, at the most")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.125, 0.25, 0.375, 0.5])
    args = parser.parse_args()
    if "CORP_ASSETS" not in os.environ:
        sys.exit("CORP_ASSETS is not set: this benchmark needs real weights and texts")
    torch.set_num_threads(1)
    path = RESULTS / "shared_rotary.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for name in args.models:
        benchmark = MODELS[name].load(Path(os.environ["CORP_ASSETS"]))
        calibration = benchmark.calibration
        few = replace(calibration, spans=calibration.spans[: args.samples])
        measured = list(rows(replace(benchmark, calibration=few), args.shares))
        found[name] = {"title": MODELS[name].title, "samples": len(few.spans), "rows": measured}
        path.write_text(json.dumps(found, indent=1) + "\n")
        tables = [table(one["title"], one["samples"], one["rows"]) for one in found.values()]
        (RESULTS / "shared_rotary.md").write_text("\n".join(tables))
    print((RESULTS / "shared_rotary.md").read_text())


if __name__ == "__main__":
    main()
