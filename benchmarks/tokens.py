"""How many tokens a fit needs: held-out error and top-1 of DeiT-Tiny, MLPs pruned by half (CORP_ASSETS/vision).

CORP_ASSETS=... python -m benchmarks.tokens
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import corp
from benchmarks.deit_tiny import Setup, accuracy
from corp.calibration.settings import Settings
from corp.data.images import ImageBatches, list_images
from corp.io.tables import markdown_table
from corp.recipe import Recipe

RESULTS = Path(__file__).parent / "results"
WIDTH = 768  # hidden channels of DeiT-Tiny


def measure(setup: Setup, photos: Path, per_image: int) -> dict[str, Any]:
    batches = ImageBatches(list_images([photos]), setup.transform)
    stats = corp.calibrate(setup.model, batches, settings=Settings(tokens=per_image))
    plan = corp.plan(setup.model, stats, Recipe.paper(mlp=0.5))
    costs = [site.costs[0] for site in plan.sites]
    return {
        "tokens per image": per_image,
        "tokens per channel": per_image * stats.samples / WIDTH,
        "unexplained, fitted data": statistics.mean(c.fit or 0.0 for c in costs),
        "unexplained, held-out data": statistics.mean(c.held or 0.0 for c in costs),
        "top-1 %": accuracy(corp.apply(setup.model, stats, plan).model, setup.images, setup.labels),
    }


def main() -> None:
    assets = os.environ.get("CORP_ASSETS", "")
    if not assets:
        sys.exit("CORP_ASSETS is not set: this benchmark needs real weights and images")
    setup = Setup(Path(assets), calibrate=False)
    rows = []
    for per_image in (8, 30, 197):
        rows.append(measure(setup, Path(assets) / "vision" / "calibration", per_image))
        print(rows[-1], flush=True)
    table = markdown_table(list(rows[0]), [[f"{value:.3g}" for value in row.values()] for row in rows])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "tokens.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "tokens.md").write_text(f"DeiT-Tiny, MLP 50 %, 1,000 photographs:\n\n{table}\n")
    print(table)


if __name__ == "__main__":
    main()
