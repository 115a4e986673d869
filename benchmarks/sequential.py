"""Sequential fitting against one-shot fitting of the same recipes, on the real models that it takes (CORP_ASSETS).

    CORP_ASSETS=... python -m benchmarks.sequential [deit-tiny stories]

DeiT-Tiny: calibrated on calibration/ (1,000 photographs), judged on imagenet-sample/ by top-1 and by the KL divergence
from the dense model's output. stories15M: as benchmarks.language. Both arms have the same statistics and, with a
target, the same widths; sequential fitting holds 512 samples, or all there are.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import corp
from benchmarks.deit_tiny import Setup
from benchmarks.language import load_stories
from corp.api import fit_sequentially
from corp.calibration import Settings
from corp.data.images import ImageBatches, list_images
from corp.recipe import Recipe
from corp.text import markdown_table

RESULTS = Path(__file__).parent / "results"
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "deit-tiny": {
        "MLP 50 %, paper": {"mlp": 0.5},
        "MLP 50 %, exact": {"mlp": 0.5, "rank": "exact"},
        "best, 0.617 of the MACs": {"preset": "best", "target_macs": 0.617},
        "best, 0.75 of the MACs": {"preset": "best", "target_macs": 0.75},
    },
    "stories": {
        "MLP 30 %, exact": {"mlp": 0.3, "rank": "exact"},
        "MLP 50 %, exact": {"mlp": 0.5, "rank": "exact"},
        "MLP and V/O 30 %, Q/K 25 %, exact": {"mlp": 0.3, "vo": 0.3, "attn": 0.25, "rank": "exact"},
    },
}
Measure = Callable[[nn.Module], dict[str, float]]


def deit_tiny(assets: Path) -> tuple[nn.Module, list[Any], Measure]:
    setup = Setup(assets, calibrate=False)
    data = list(ImageBatches(list_images([assets / "vision" / "calibration"]), setup.transform))

    def outputs(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([model(batch) for batch in setup.images]).double().log_softmax(-1)

    dense = outputs(setup.model)

    def measure(model: nn.Module) -> dict[str, float]:
        found = outputs(model)
        right = (found.argmax(1) == setup.labels).double().mean()
        return {"top-1 %": 100 * float(right), "KL": float((dense.exp() * (dense - found)).sum(-1).mean())}

    return setup.model, data, measure


def stories(assets: Path) -> tuple[nn.Module, list[Any], Measure]:
    benchmark = load_stories(assets)
    return benchmark.model, list(benchmark.calibration), benchmark.measure


LOADERS = {"deit-tiny": deit_tiny, "stories": stories}


def rows(name: str, assets: Path) -> Iterator[tuple[str, dict[str, float]]]:
    model, data, measure = LOADERS[name](assets)
    yield "dense", measure(model)
    stats = corp.calibrate(model, data, settings=Settings("all"))
    for what, options in CASES[name].items():
        start = time.perf_counter()
        one_shot = corp.apply(model, stats, corp.plan(model, stats, Recipe(**options))).model
        middle = time.perf_counter()
        sequential = fit_sequentially(model, data, stats, Recipe(**options, sequential=True)).model
        end = time.perf_counter()
        yield f"{what}, one-shot", {**measure(one_shot), "seconds": middle - start}
        yield f"{what}, sequential", {**measure(sequential), "seconds": end - middle}


def table(name: str, found: dict[str, dict[str, float]]) -> str:
    columns = [*found["dense"], "seconds"]
    cells = [[row, *(_cell(column, numbers.get(column)) for column in columns)] for row, numbers in found.items()]
    return markdown_table([name, *columns], cells)


def _cell(column: str, value: float | None) -> str:
    digits = {"KL": 3, "perplexity": 2, "top-1 %": 1}.get(column, 0)
    return "" if value is None else f"{value:.{digits}f}"


def main(names: Iterable[str]) -> None:
    assets = os.environ.get("CORP_ASSETS", "")
    if not assets:
        sys.exit("CORP_ASSETS is not set: this benchmark needs real weights and data")
    torch.set_num_threads(1)
    path = RESULTS / "sequential.json"
    everything: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for name in names:
        if name not in LOADERS:
            sys.exit(f"{name} is not one of {', '.join(LOADERS)}")
        found: dict[str, dict[str, float]] = {}
        for row, numbers in rows(name, Path(assets)):
            found[row] = numbers
            print(row, numbers, flush=True)
        everything[name] = found
        path.write_text(json.dumps(everything, indent=1) + "\n")
    (RESULTS / "sequential.md").write_text("\n\n".join(table(*item) for item in everything.items()) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list(LOADERS))
