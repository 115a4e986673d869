"""What the refit gains in models of several chains: encoder-decoders, image and text, stages.

Small models with random weights, built from the libraries' own configs, half of the channels of every MLP removed, with
and without the refit. The distance is the squared difference of the output from the dense model's, over the output's
squared size, on batches that were not calibrated on. Random weights leave little to compensate for; real ones more.

    python -m benchmarks.chains
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import corp
from corp.calibration.batches import run
from corp.io.files import write_text
from corp.io.tables import markdown_table
from scripts.coverage import of_transformers

# isort: split
import timm

RESULTS = Path(__file__).parent / "results"
FITTED, UNSEEN, SAMPLES = 20, 8, 8  # batches, and samples in each
Batch = Callable[[], Any]


def ids(tokens: int = 12) -> Tensor:
    return torch.randint(3, 60, (SAMPLES, tokens))


def translation() -> dict[str, Tensor]:
    return {"input_ids": ids(), "decoder_input_ids": ids(10)}


def images(size: int) -> Tensor:
    """Images in which neighbouring pixels are alike."""
    return 0.2 * torch.randn(SAMPLES, 3, size, size).cumsum(-1)


def speech() -> dict[str, Tensor]:
    return {"input_values": 0.05 * torch.randn(SAMPLES, 6000).cumsum(-1), "decoder_input_ids": ids(10)}


def segmentation() -> nn.Module:
    return transformers.SegformerForSemanticSegmentation(of_transformers("segformer").config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "T5": (lambda: of_transformers("t5"), translation),
    "BART": (lambda: transformers.BartModel(of_transformers("bart").config), translation),
    "M2M-100": (lambda: of_transformers("m2m_100"), translation),
    "Moonshine": (lambda: of_transformers("moonshine"), speech),
    "GIT": (lambda: of_transformers("git"), lambda: {"input_ids": ids(), "pixel_values": images(32)}),
    "SegFormer": (segmentation, lambda: {"pixel_values": images(64)}),
    "PVT v2": (lambda: timm.create_model("pvt_v2_b0", num_classes=10), lambda: images(64)),
}


def measure(make: Callable[[], nn.Module], draw: Batch) -> dict[str, float]:
    torch.manual_seed(0)
    model = make().eval()
    batches, unseen = ([draw() for _ in range(count)] for count in (FITTED, UNSEEN))
    skip = tuple(refused.name for refused in corp.find_sites(model, batches[0]).refused)
    recipe = corp.Recipe(mlp=0.5, skip=skip)
    found = {}
    for name, mode in (("without", False), ("with", True)):
        pruned = corp.prune(model, batches, replace(recipe, sequential=mode)).model
        found[name] = distance(pruned, model, unseen)
    return found


@torch.no_grad()
def distance(pruned: nn.Module, dense: nn.Module, batches: list[Any]) -> float:
    pairs = [(output(dense, batch), output(pruned, batch)) for batch in batches]
    lost, whole = (
        sum(float(x.square().sum()) for x in part) for part in ([a - b for a, b in pairs], [a for a, _ in pairs])
    )
    return lost / whole


def output(model: nn.Module, batch: Any) -> Tensor:
    made = run(model, batch)
    if isinstance(made, Tensor):
        return made
    found: Tensor = made.logits if "logits" in made else made.last_hidden_state
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = {}
    for name, how in MODELS.items():
        found[name] = measure(*how)
        print(name, found[name], flush=True)
    rows = [
        [name, f"{one['without']:.2e}", f"{one['with']:.2e}", f"{one['with'] / one['without']:.2f}"]
        for name, one in found.items()
    ]
    write_text(RESULTS / "chains.json", json.dumps(found, indent=1) + "\n")
    page = [*(__doc__ or "").split("\n\n")[:2], markdown_table(["model", "without refit", "with refit", "ratio"], rows)]
    write_text(RESULTS / "chains.md", "\n\n".join(page) + "\n")


if __name__ == "__main__":
    main()
