"""A DINOv2-S under heads that are never touched: the paper's third experiment, on real weights and real labels.

A linear head is fitted on CamVid's training part with the dense backbone (336 x 448 pixels, last block and last four),
then backbones are pruned: the paper's recipe at 10-70 %, with and without compensation, and budgets with ours, widths
alone and with merged tokens (unmerged for the heads), calibrated once on CamVid's training images and once on everyday
photographs. mIoU on CamVid's test part; the saliency head's maps against the dense model's own on 200 photographs;
similarity of features and nearest-neighbour classes on `calibration/` (200 synsets, five images
each, leave one out). Finished rows stay in results/dinov2.json.

    CORP_ASSETS=... python -m benchmarks.dinov2 [--rows paper-50 budget-0.617] [--calibrate camvid photos] [--limit 24]
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import corp
from corp.adapters import timm_models
from corp.data.dense import DensePairs, WholeImage, find_pairs
from corp.data.images import ImageBatches, choose, list_images
from corp.errors import CorpWarning
from corp.evaluate.dense import MapScore
from corp.evaluate.dense import Segmentation as Miou
from corp.evaluate.heads import HeadInfo, LinearHead, WithHead, load_head, patch_map
from corp.evaluate.probe import fit_head
from corp.evaluate.run import Contender, side_by_side
from corp.io.files import write_text
from corp.io.tables import markdown_table
from corp.measure.cost import count_params
from corp.planning.plan import Plan
from corp.recipe import Recipe

# isort: split
import timm

RESULTS = Path(__file__).parent / "results"
SIZE, SQUARE, CLASSES, BLOCKS = (336, 448), (224, 224), 11, (1, 4)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BUDGETS = (0.75, 0.617, 0.5)
ROWS: dict[str, dict[str, Any]] = {
    **{f"paper-{s}": {"mlp": s / 100, "attn": s / 100} for s in range(10, 80, 10)},
    **{f"bare-{s}": {"mlp": s / 100, "attn": s / 100, "compensate": "none"} for s in range(10, 80, 10)},
    **{f"budget-{share}": {"target_macs": share} for share in BUDGETS},
    **{f"tokens-{share}": {"target_macs": share, "tokens": "auto"} for share in BUDGETS},
}
TABLE = [
    *(f"paper-{s}" for s in range(10, 80, 20)),
    *("bare-50", "paper-50"),
    *(f"{kind}-{share}" for kind in ("tokens", "budget") for share in BUDGETS),
]


@dataclass(frozen=True)
class Setup:
    """The backbone, its data, and the heads that were fitted on it."""

    vision: Path
    limit: int | None
    backbone: nn.Module
    heads: dict[int, LinearHead]

    @cached_property
    def dense_tokens(self) -> Tensor:
        """The dense backbone's class tokens of the photographs."""
        return class_tokens(self.backbone, self.photographs(1000, SQUARE))

    @classmethod
    def of(cls, assets: Path, limit: int | None) -> Setup:
        vision = assets / "vision"
        backbone = load_backbone(vision)
        bare = cls(vision, limit, backbone, {})
        fitted = {}
        for blocks in BLOCKS:
            probe = fit_head(backbone, bare.scenes("train"), HeadInfo(blocks=blocks, ignore=CLASSES, image_size=SIZE))
            print(f"head on {blocks} block(s): ridge {probe.ridge:g}, explains {probe.explained:.3f}", flush=True)
            fitted[blocks] = probe.head
        return cls(vision, limit, backbone, fitted)

    def scenes(self, part: str) -> DensePairs:
        pairs = find_pairs(self.vision / "camvid" / part)
        step = 1 if self.limit is None else max(1, len(pairs) // self.limit)
        return DensePairs(pairs[::step], WholeImage(SIZE, MEAN, STD), batch_size=4)

    def photographs(self, count: int, size: tuple[int, int] = SIZE) -> ImageBatches:
        paths = choose(list_images([self.vision / "calibration"]), min(count, self.limit or count), seed=0)
        return ImageBatches(paths, WholeImage(size, MEAN, STD), batch_size=4)

    def calibration(self, name: str) -> list[Tensor]:
        """Batches to calibrate on; as many photographs as there are scenes."""
        scenes = [images for images, _ in self.scenes("train")]
        return scenes if name == "camvid" else list(self.photographs(sum(map(len, scenes))))


def load_backbone(vision: Path) -> nn.Module:
    """A DINOv2-S that takes images of any size."""
    model: nn.Module = timm.create_model("vit_small_patch14_dinov2", num_classes=0, dynamic_img_size=True)
    timm_models.load_weights(model, vision / "dinov2_small_patch14.safetensors")
    return model.float().eval()


def reads_all(model: nn.Module, batch: Any) -> Tensor:
    """What the heads read: all patches of the last blocks."""
    return patch_map(model, batch, max(BLOCKS))


def recipe_of(row: str) -> Recipe:
    """The paper's recipe with shares, ours under a budget."""
    options = ROWS[row]
    return Recipe(**options) if "target_macs" in options else Recipe.paper(**options)


def pruned(setup: Setup, recipe: Recipe, stats: corp.Statistics, batches: Sequence[Tensor]) -> corp.Result:
    """The pruned backbone, under a forward pass that reads what the heads read."""
    known = None if recipe.tokens else stats
    return corp.prune(setup.backbone, batches, recipe, stats=known, forward=reads_all)


def scores(setup: Setup, model: nn.Module) -> dict[str, Any]:
    """mIoU on the test scenes with either head, and closeness to the dense backbone on photographs."""
    metrics = {blocks: Miou(CLASSES, CLASSES) for blocks in setup.heads}
    with torch.no_grad():
        for images, labels in setup.scenes("test"):
            features = patch_map(model, images, max(BLOCKS))
            for blocks, head in setup.heads.items():  # the last blocks come last
                metrics[blocks].add(head(features[:, -blocks * features.shape[1] // max(BLOCKS) :]), labels)
    found = {
        f"{name}-{blocks}": estimate.interval().to_dict()
        for blocks, metric in metrics.items()
        for name, estimate in metric.estimates().items()
    }
    return {**found, "saliency_iou": saliency(setup, model), "knn": nearest_neighbours(setup, model)}


def saliency(setup: Setup, model: nn.Module) -> dict[str, Any] | None:
    """IoU at 0.5 of the saliency maps with the dense backbone's, at 224 pixels."""
    if model is setup.backbone:
        return None
    head, _ = load_head(setup.vision / "dinov2_small_focus_head.safetensors")
    score = MapScore("segmentation")
    contender = Contender(WithHead(model, head), score)
    side_by_side(WithHead(setup.backbone, head), [contender], setup.photographs(200, SQUARE))
    assert score.likeness is not None
    return score.likeness.estimates()["miou"].interval().to_dict()


def nearest_neighbours(setup: Setup, model: nn.Module) -> dict[str, float]:
    """Class of the nearest other photograph by class token, and likeness of the tokens to the dense backbone's."""
    batches = setup.photographs(1000, SQUARE)
    mine, dense = class_tokens(model, batches), setup.dense_tokens
    synsets = [path.name.split("_")[0] for path in batches.paths]
    unit = nn.functional.normalize(mine, dim=1)
    nearest = (unit @ unit.mT).fill_diagonal_(-1).argmax(1).tolist()
    right = sum(synsets[i] == synsets[j] for i, j in enumerate(nearest)) / len(nearest)
    return {"top1": right, "cosine": float(nn.functional.cosine_similarity(mine, dense).mean())}


def class_tokens(model: nn.Module, batches: ImageBatches) -> Tensor:
    with torch.no_grad():
        return torch.cat([model.forward_features(x)[:, 0] for x in batches])  # type: ignore[operator]


def predicted_shift(setup: Setup, plan: Plan, stats: dict[str, corp.Statistics]) -> dict[str, Any]:
    """What --deploy-data would say of a backbone that was calibrated on photographs: errors on street scenes."""
    shift = corp.measure_shift(setup.backbone, stats["photos"], stats["camvid"], plan)
    linear = [site for site in shift.sites if site.kind != "attn"]
    means = {end: sum(getattr(site, end) for site in linear) / len(linear) for end in ("expected", "deployed", "best")}
    return {**means, "alarming": len(shift.alarming), "sites": len(shift.sites)}


def run(setup: Setup, rows: Sequence[str], data: Sequence[str], done: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every row that is not done yet, under its name."""
    if "dense" not in done:
        yield "dense", {"params": count_params(setup.backbone), **scores(setup, setup.backbone)}
    wanted = [(name, row) for name in data for row in rows if f"{name}/{row}" not in done]
    batches = {name: setup.calibration(name) for name in data if wanted}
    stats = {name: corp.calibrate(setup.backbone, some) for name, some in batches.items()}
    for name, row in wanted:
        start = time.perf_counter()
        result = pruned(setup, recipe_of(row), stats[name], batches[name])
        seconds = time.perf_counter() - start
        before, after = result.report.macs or (1, 1)
        found: dict[str, Any] = {"seconds": seconds, "macs": after / before, "params": count_params(result.model)}
        if name == "photos" and "camvid" in stats and result.plan.merging is None:
            found["shift"] = predicted_shift(setup, result.plan, stats)
        yield f"{name}/{row}", {**found, **scores(setup, result.model)}


def page(done: dict[str, Any]) -> str:
    """The rows as a table, with mIoU as a share of the dense model's."""
    columns = [
        "backbone",
        "MACs",
        "M params",
        "mIoU, last block",
        "mIoU, last four",
        "saliency IoU",
        "k-NN %",
        "cosine",
    ]
    dense = done["dense"]

    def miou(row: dict[str, Any], blocks: int) -> str:
        value, low, high = (100 * row[f"miou-{blocks}"][end] for end in ("value", "low", "high"))
        share = value / (100 * dense[f"miou-{blocks}"]["value"])
        return f"{value:.1f} [{low:.1f}, {high:.1f}] ({share:.3f})"

    lines = []
    for name, row in done.items():
        salient = row["saliency_iou"]
        near = f"{100 * row['knn']['top1']:.1f}", f"{row['knn']['cosine']:.3f}"
        cost = f"{row.get('macs', 1.0):.3f}", f"{row['params'] / 1e6:.1f}"
        maps = miou(row, 1), miou(row, 4), f"{100 * salient['value']:.1f}" if salient else "–"
        lines.append([name, *cost, *maps, *near])
    return f"# A DINOv2-S under frozen heads\n\n{markdown_table(columns, lines)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=TABLE, choices=list(ROWS))
    parser.add_argument("--calibrate", nargs="+", default=["camvid", "photos"], choices=["camvid", "photos"])
    parser.add_argument("--limit", type=int, help="at most about this many images of every kind, for a trial")
    parser.add_argument("--out", type=Path, default=RESULTS / "dinov2.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore", CorpWarning)
    done = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for name, row in run(Setup.of(Path(os.environ["CORP_ASSETS"]), args.limit), args.rows, args.calibrate, done):
        done[name] = row
        write_text(args.out, json.dumps(done, indent=1))
        write_text(args.out.with_suffix(".md"), page(done))
        print(name, json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
