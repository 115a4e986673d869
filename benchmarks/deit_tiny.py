"""Top-1 of DeiT-Tiny pruned by the paper's recipe, on real weights and images (CORP_ASSETS/vision).

Calibrated on calibration/ (1,000 photographs), evaluated on imagenet-sample/ (1,000 labelled images, one per class).

    CORP_ASSETS=... python -m benchmarks.deit_tiny
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import corp
from corp.adapters import timm_models
from corp.data.images import ImageBatches, list_images
from corp.io.tables import markdown_table
from corp.recipe import Recipe

RESULTS = Path(__file__).parent / "results"
NAME = "deit_tiny_patch16_224"
# (what, recipe, top-1 % of an independent float64 implementation of the paper)
CASES: list[tuple[str, dict[str, Any], float]] = [
    ("MLP 50 %, none", {"mlp": 0.5, "compensate": "none"}, 10.3),
    ("MLP 50 %, mean", {"mlp": 0.5, "compensate": "mean"}, 33.1),
    ("MLP 50 %, full", {"mlp": 0.5}, 55.9),
    ("Q/K 50 %, none", {"attn": 0.5, "compensate": "none"}, 71.7),
    ("Q/K 50 %, full", {"attn": 0.5}, 77.2),
    ("both 50 %, none", {"mlp": 0.5, "attn": 0.5, "compensate": "none"}, 7.3),
    ("both 50 %, full", {"mlp": 0.5, "attn": 0.5}, 50.6),
    ("both 30 %, full", {"mlp": 0.3, "attn": 0.3}, 71.3),
    ("both 70 %, full", {"mlp": 0.7, "attn": 0.7}, 16.0),
]
DENSE = 79.2


class Setup:
    """The model, its statistics and the labelled images: read once, used for every case."""

    def __init__(self, assets: Path, *, calibrate: bool = True) -> None:
        vision = assets / "vision"
        self.model = timm_models.create(NAME, vision / f"{NAME}.safetensors")
        self.transform = transform = timm_models.preprocessing(self.model)
        paths = list_images([vision / "imagenet-sample"])
        synsets = sorted({path.name.split("_")[0] for path in paths})
        self.labels = torch.tensor([synsets.index(path.name.split("_")[0]) for path in paths])
        self.images = list(ImageBatches(paths, transform, batch_size=50))
        if calibrate:
            self.stats = corp.calibrate(self.model, ImageBatches(list_images([vision / "calibration"]), transform))

    def top1(self, recipe: dict[str, Any]) -> float:
        plan = corp.plan(self.model, self.stats, Recipe.paper(**recipe))
        return accuracy(corp.apply(self.model, self.stats, plan).model, self.images, self.labels)


def accuracy(model: nn.Module, batches: list[Tensor], labels: Tensor) -> float:
    """Top-1 in percent."""
    with torch.no_grad():
        predicted = torch.cat([model(batch).argmax(1) for batch in batches])
    return 100 * float((predicted == labels).double().mean())


def main() -> None:
    assets = os.environ.get("CORP_ASSETS", "")
    if not assets:
        sys.exit("CORP_ASSETS is not set: this benchmark needs real weights and images")
    setup = Setup(Path(assets))
    found = {"dense": accuracy(setup.model, setup.images, setup.labels)}
    rows = [("dense", f"{found['dense']:.1f}", f"{DENSE:.1f}")]
    for what, recipe, reference in CASES:
        found[what] = setup.top1(recipe)
        rows.append((what, f"{found[what]:.1f}", f"{reference:.1f}"))
        print(rows[-1], flush=True)
    table = markdown_table(("DeiT-Tiny, top-1 %", "corp", "independent implementation"), rows)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "deit_tiny.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "deit_tiny.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
