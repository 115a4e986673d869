"""corp beside what people would compare it with, on the same model, data and protocol (CORP_ASSETS/vision).

The baselines are presets of the same pipeline; Torch-Pruning is the package from PyPI, called as its ViT example
calls it (MLP and head widths, group magnitude, no fine-tuning), where it is installed.

    CORP_ASSETS=... python -m benchmarks.peers
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import corp
from benchmarks.deit_tiny import Setup, accuracy
from corp.measure.cost import count_macs, count_params
from corp.recipe import Recipe
from corp.text import markdown_table

RESULTS = Path(__file__).parent / "results"
PEERS = ("magnitude", "wanda", "vbp", "flap", "grail")
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
    """The uniform sparsity of MLP and Q/K together that just meets the budget, to the percent."""
    x = setup.images[0][:1]
    dense = count_macs(setup.model, x)
    for percent in range(1, 100):
        recipe = Recipe(mlp=percent / 100, attn=percent / 100, compensate="none")
        pruned = corp.apply(setup.model, setup.stats, corp.plan(setup.model, setup.stats, recipe)).model
        if count_macs(pruned, x) <= target * dense:
            return Recipe(mlp=percent / 100, attn=percent / 100)
    raise SystemExit(f"no sparsity reaches {target}")


def torch_pruning(setup: Setup, ratio: float) -> dict[str, Any] | None:
    """Torch-Pruning's own recipe for timm's ViT: MLP hidden and head widths by group magnitude, nothing after it."""
    try:
        import torch_pruning as tp
    except ModuleNotFoundError:
        print("torch_pruning is not installed: left out")
        return None
    model = copy.deepcopy(setup.model)
    start = time.perf_counter()
    heads = {m.qkv: m.num_heads for m in model.modules() if type(m).__name__ == "Attention"}
    ignored = [model.head, *(m for block in model.blocks for m in (block.attn.proj, block.mlp.fc2))]
    for module in model.modules():
        if type(module).__name__ == "Attention":
            module.fused_attn = False
    pruner = tp.pruner.MagnitudePruner(
        model,
        setup.images[0][:1],
        importance=tp.importance.GroupMagnitudeImportance(),
        pruning_ratio=ratio,
        ignored_layers=ignored,
        num_heads=heads,
        prune_head_dims=True,
    )
    pruner.step()
    for module in model.modules():
        if type(module).__name__ == "Attention":
            module.head_dim = module.qkv.out_features // (3 * module.num_heads)
            module.attn_dim = module.head_dim * module.num_heads
    return describe(
        setup, f"Torch-Pruning {tp.__version__}, {ratio:.0%} of MLP and head widths", model, time.perf_counter() - start
    )


def table(rows: list[dict[str, Any]]) -> str:
    cells = [
        (r["method"], f"{r['top1']:.1f}", f"{r['params']:.2f}", f"{r['macs']:.3f}", f"{r['seconds']:.1f}") for r in rows
    ]
    return markdown_table(COLUMNS, cells)


def main() -> None:
    assets = os.environ.get("CORP_ASSETS", "")
    if not assets:
        sys.exit("CORP_ASSETS is not set: this benchmark needs real weights and images")
    setup = Setup(Path(assets))
    dense = describe(setup, "dense", setup.model, 0.0)
    sections: dict[str, list[dict[str, Any]]] = {}
    for sparsity in (0.3, 0.5):
        title = f"{sparsity:.0%} of the MLP channels"
        sections[title] = [run(setup, name, Recipe(preset=name, mlp=sparsity)) for name in PEERS]
        sections[title].append(run(setup, "corp", Recipe(mlp=sparsity)))
    budget = sections["50% of the MLP channels"][0]["macs"]
    even = equal_macs(setup, budget)
    title = f"equal MACs ({budget:.3f} of dense)"
    mlp_only = [{**row, "method": f"{row['method']} (MLP 50 %)"} for row in sections["50% of the MLP channels"]]
    sections[title] = [*mlp_only, run(setup, f"corp (MLP and Q/K {even.mlp:.0%})", even)]
    other = torch_pruning(setup, 0.3)
    if other:
        sections[title].append(other)
    text = "\n\n".join(f"## {title}\n\n{table([dense, *rows])}" for title, rows in sections.items())
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "peers.json").write_text(json.dumps({"dense": dense, **sections}, indent=1) + "\n")
    (RESULTS / "peers.md").write_text(f"# DeiT-Tiny, 1,000 labelled images, no training after pruning\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
