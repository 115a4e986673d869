"""Planning, folding and pruning in several processes: torchrun … -m tests.helpers.prune_process FOLDER"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import corp
from corp import Recipe
from corp.calibration import workers
from corp.calibration.site_sums import SiteSums
from corp.errors import CorpError
from tests.helpers.models import build, images

torch.set_num_threads(1)
RECIPE = Recipe(target_macs=0.7, sequential=False)


def killed_while_planning(group: workers.Workers, work: Any, items: Any, cost: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, victim: int = -1) -> None:
    """Save the weights that every process got: planned and folded from statistics, and pruned whole."""
    with workers.launched() as group:
        if group.rank == victim:
            workers.Workers.map = killed_while_planning  # type: ignore[method-assign, assignment]
        model, stats = build("vit"), corp.Statistics.load(folder / "statistics")
        planned = corp.plan(model, stats, RECIPE)
        bare = replace(planned, sites=tuple(replace(site, fold=None) for site in planned.sites))
        made = {"planned": corp.apply(model, stats, planned), "folded": corp.apply(model, stats, bare)}
        made["pruned"] = corp.prune(model, images(8, 10), RECIPE)
        weights = {name: result.model.state_dict() for name, result in made.items()}
        torch.save(weights, folder / f"{group.world}-{group.rank}.pt")
        name = next(site.name for site in corp.find_sites(model).mlp)
        empty = SiteSums(*(part.empty() for part in vars(stats.moments_of(name)).values()))
        try:
            corp.plan(model, replace(stats, sums={**stats.sums, name: empty}), RECIPE)
        except CorpError as error:
            (folder / f"{group.world}-{group.rank}.txt").write_text(str(error))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    except CorpError as error:
        sys.exit(f"error: {error}")
