"""Parameter counts of the paper's efficiency table (tab:efficiency_all), from the real architectures.

Shapes only: the models are built without memory and shrunk to the widths that corp would keep.

    python -m benchmarks.params
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

import torch

import corp
from corp.io.tables import markdown_table
from corp.measure.cost import count_params
from corp.planning.plan import Plan
from corp.planning.site_plan import GroupCost, SitePlan
from corp.recipe import Recipe, kept_width
from corp.surgery.apply import shrink

# isort: split
import timm

RESULTS = Path(__file__).parent / "results"
SPARSITIES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
PAPER = {  # millions of parameters at each sparsity
    "deit_tiny_patch16_224": (5.7, 5.3, 4.8, 4.4, 4.0, 3.5, 3.1, 2.6),
    "deit_small_patch16_224": (22.1, 20.3, 18.6, 16.8, 15.0, 13.2, 11.4, 9.7),
    "deit_base_patch16_224": (86.6, 79.6, 72.6, 65.4, 58.4, 51.2, 44.2, 37.2),
    "deit3_large_patch16_224": (304.4, 279.5, 254.7, 229.0, 204.1, 178.5, 153.6, 128.8),
    "deit3_huge_patch14_224": (632.1, 579.7, 527.2, 474.8, 422.3, 369.9, 317.4, 265.0),
}


def shapes_only_plan(model: torch.nn.Module, recipe: Recipe) -> Plan:
    """A plan with the widths of this recipe; which channels stay does not matter to a count or a time."""
    sites = []
    for site in corp.find_sites(model):
        sparsity, groups = recipe.sparsity(site.kind, site.name), getattr(site, "groups", 1)
        if sparsity == 0:
            continue
        kept = tuple(range(kept_width(site.width, sparsity)))
        cost = GroupCost(0.0, 0.0, 0.0, 0.0, 0.0)
        sites.append(SitePlan(site.name, site.kind, site.width, sparsity, (kept,) * groups, True, (cost,) * groups))
    return Plan(recipe, tuple(sites))


@cache
def dense(name: str) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = timm.create_model(name)
    return model


def count(name: str, sparsity: float) -> int:
    model = copy.deepcopy(dense(name))
    shrink(model, corp.find_sites(model), shapes_only_plan(model, Recipe.paper(mlp=sparsity, attn=sparsity)))
    return count_params(model)


def main() -> None:
    rows, exact, cells = [], 0, 0
    found: dict[str, list[int]] = {}
    for name, paper in PAPER.items():
        found[name] = [count(name, sparsity) for sparsity in SPARSITIES]
        for sparsity, params, expected in zip(SPARSITIES, found[name], paper, strict=True):
            same = round(params / 1e6, 1) == expected
            exact, cells = exact + same, cells + 1
            rows.append((name, f"{sparsity:.1f}", f"{params / 1e6:.1f}", f"{expected:.1f}", "yes" if same else "NO"))
    table = markdown_table(("model", "sparsity", "ours (M)", "paper (M)", "equal"), rows)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "params.json").write_text(json.dumps({"sparsities": SPARSITIES, "params": found}, indent=1) + "\n")
    (RESULTS / "params.md").write_text(f"{exact} of {cells} counts equal the paper's.\n\n{table}\n")
    print(f"{table}\n\n{exact} of {cells} counts equal the paper's")


if __name__ == "__main__":
    main()
