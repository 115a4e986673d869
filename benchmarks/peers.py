"""corp beside what people would compare it with, on the same model, data and protocol (CORP_ASSETS/vision).

The baselines are presets of the same pipeline; Torch-Pruning is the package from PyPI, called as its ViT example
calls it (MLP and head widths, group magnitude, no fine-tuning), where it is installed. Sections that are in
results/peers.json stay and are not made again.

    CORP_ASSETS=... python -m benchmarks.peers
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import corp
from benchmarks.deit_tiny import NAME, Setup, accuracy
from benchmarks.paper import pruned_shapes
from corp.calibration.holdout import HeldBatches, HoldOut
from corp.data.images import ImageBatches, list_images
from corp.io.tables import markdown_table
from corp.measure.cost import count_macs, count_params
from corp.recipe import Recipe
from corp.steps.allocation.tokens import choose_schedule, merged_copy
from corp.surgery.refit.merged import find_merging

RESULTS = Path(__file__).parent / "results"
PEERS = ("magnitude", "wanda", "vbp", "flap", "grail")
OURS: dict[str, dict[str, Any]] = {"corp, the paper's recipe": {}, "corp, rank=exact": {"rank": "exact"}}
BUDGETS = (0.75, 0.617, 0.467, 0.42)  # of the operations, for tokens and widths
COLUMNS = ("method", "top-1 %", "parameters, M", "MACs / dense", "seconds after calibration")


def run(setup: Setup, name: str, recipe: Recipe) -> dict[str, Any]:
    start = time.perf_counter()
    result = corp.apply(setup.model, setup.stats, corp.plan(setup.model, setup.stats, recipe))
    return describe(setup, name, result.model, time.perf_counter() - start)


def describe(setup: Setup, name: str, model: nn.Module, seconds: float) -> dict[str, Any]:
    x = setup.images[0][:1]
    row = {
        "method": name,
        "top1": accuracy(model, setup.images, setup.labels),
        "params": count_params(model) / 1e6,
        "macs": count_macs(model, x) / count_macs(setup.model, x),
        "seconds": seconds,
    }
    print(row, flush=True)
    return row


def equal_macs(setup: Setup, target: float) -> Recipe:
    """The least uniform sparsity of MLP and Q/K together that meets the budget, to the percent."""
    x = setup.images[0][:1]
    dense = count_macs(setup.model, x)

    def too_many(percent: int) -> bool:
        return count_macs(pruned_shapes(NAME, percent / 100, percent / 100), x.to("meta")) > target * dense

    percent = _first(100, too_many)
    return Recipe.paper(mlp=percent / 100, attn=percent / 100)


def _first(stop: int, too_many: Callable[[int], bool]) -> int:
    """The first number below `stop` that is not too many, by halving."""
    low, high = 0, stop
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if too_many(middle) else (low, middle)
    return low


def torch_pruning(setup: Setup, target: float) -> dict[str, Any] | None:
    """Torch-Pruning's own recipe for timm's ViT: MLP hidden and head widths by group magnitude, nothing after it."""
    try:
        import torch_pruning as tp
    except ModuleNotFoundError:
        print("torch_pruning is not installed: left out")
        return None
    x = setup.images[0][:1]
    dense = count_macs(setup.model, x)

    def pruned(ratio: float) -> nn.Module:
        model: Any = copy.deepcopy(setup.model)
        attentions = [m for m in model.modules() if type(m).__name__ == "Attention"]
        for attention in attentions:
            attention.fused_attn = False
        pruner = tp.pruner.MagnitudePruner(
            model,
            x,
            importance=tp.importance.GroupMagnitudeImportance(),
            pruning_ratio=ratio,
            ignored_layers=[model.head, *(m for block in model.blocks for m in (block.attn.proj, block.mlp.fc2))],
            num_heads={attention.qkv: attention.num_heads for attention in attentions},
            prune_head_dims=True,
        )
        pruner.step()
        for attention in attentions:
            attention.head_dim = attention.qkv.out_features // (3 * attention.num_heads)
            attention.attn_dim = attention.head_dim * attention.num_heads
        return model

    percent = _first(100, lambda p: count_macs(pruned(p / 100), x) > target * dense)
    start = time.perf_counter()
    model = pruned(percent / 100)
    name = f"Torch-Pruning {tp.__version__} (MLP and head widths {percent} %)"
    return describe(setup, name, model, time.perf_counter() - start)


def tokens_and_widths(setup: Setup, vision: Path, target: float) -> list[dict[str, Any]]:
    """Merging alone, widths alone and both at one budget, as corp.prune makes them (calibration included)."""
    batches = ImageBatches(list_images([vision / "calibration"]), setup.transform)
    rows = []
    for name, tokens in (("widths alone", None), ("both", "auto")):
        start = time.perf_counter()
        model = corp.prune(setup.model, batches, Recipe(target_macs=target, tokens=tokens)).model
        rows.append(describe(setup, f"corp, {name}", model, time.perf_counter() - start))
    held = HeldBatches(HoldOut.of(batches), 64)
    held.collect(batches)
    start = time.perf_counter()
    free = find_merging(setup.model, corp.find_sites(setup.model), held.batches[0])
    chosen = choose_schedule(setup.model, held.batches, free, target)
    merged = merged_copy(setup.model, chosen.merging)
    return [describe(setup, "merging alone, no refit", merged, time.perf_counter() - start), *rows]


def table(rows: list[dict[str, Any]]) -> str:
    cells = [
        (r["method"], f"{r['top1']:.1f}", f"{r['params']:.2f}", f"{r['macs']:.3f}", f"{r['seconds']:.1f}") for r in rows
    ]
    return markdown_table(COLUMNS, cells)


def main() -> None:
    assets = os.environ.get("CORP_ASSETS", "")
    if not assets:
        sys.exit("CORP_ASSETS is not set: this benchmark needs real weights and images")
    path = RESULTS / "peers.json"
    sections: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    budget = sections.get("50% of the MLP channels", [{"macs": 0.722}])[0]["macs"]
    setup = Setup(Path(assets), calibrate=f"equal MACs ({budget:.3f} of dense)" not in sections)
    dense = sections.pop("dense", None) or describe(setup, "dense", setup.model, 0.0)
    for sparsity in (0.3, 0.5):
        title = f"{sparsity:.0%} of the MLP channels"
        if title not in sections:
            rows = [run(setup, name, Recipe.preset(name, mlp=sparsity)) for name in PEERS]
            rows += [run(setup, name, Recipe.paper(mlp=sparsity, **options)) for name, options in OURS.items()]
            write(dense, sections, title, rows)
    budget = sections["50% of the MLP channels"][0]["macs"]
    if (title := f"equal MACs ({budget:.3f} of dense)") not in sections:
        write(dense, sections, title, at_equal_macs(setup, sections["50% of the MLP channels"], budget))
    for target in BUDGETS:
        if (title := f"tokens and widths, {target:g} of the MACs") not in sections:
            write(dense, sections, title, tokens_and_widths(setup, Path(assets) / "vision", target))
    print((RESULTS / "peers.md").read_text())


def at_equal_macs(setup: Setup, of_mlps: list[dict[str, Any]], budget: float) -> list[dict[str, Any]]:
    """MLPs alone, MLPs and Q/K together, and Torch-Pruning."""
    even = equal_macs(setup, budget)
    rows = [{**row, "method": f"{row['method']} (MLP 50 %)"} for row in of_mlps]
    rows += [
        run(setup, f"{name} (MLP and Q/K {even.mlp:.0%})", Recipe.paper(mlp=even.mlp, attn=even.attn, **options))
        for name, options in OURS.items()
    ]
    other = torch_pruning(setup, budget)
    return [*rows, other] if other else rows


def write(
    dense: dict[str, Any], sections: dict[str, list[dict[str, Any]]], title: str, rows: list[dict[str, Any]]
) -> None:
    """Add a section to those that there are, and write them all."""
    sections[title] = rows
    text = "\n\n".join(f"## {name}\n\n{table([dense, *some])}" for name, some in sections.items())
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "peers.json").write_text(json.dumps({"dense": dense, **sections}, indent=1) + "\n")
    (RESULTS / "peers.md").write_text(f"# DeiT-Tiny, 1,000 labelled images, no training after pruning\n\n{text}\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
