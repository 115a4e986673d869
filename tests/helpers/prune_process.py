"""Planning, folding and pruning in pairs of processes: python -m tests.helpers.prune_process FOLDER:VICTIM …

The pairs are forked from one process that has imported everything, which takes longer than what each of them does.
"""

from __future__ import annotations

import multiprocessing
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
from tests.helpers.plain import build, sequences
from tests.helpers.ports import free_port

torch.set_num_threads(1)
RECIPE = Recipe(target_macs=0.7, sequential=False)
CODES = "exit codes"  # begins the lines that are read: older releases of torch print their own


def killed_while_planning(group: workers.Workers, work: Any, items: Any, cost: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, victim: int = -1) -> None:
    """Save the weights that every process got: planned and folded from statistics, and pruned whole."""
    with workers.launched() as group:
        if group.rank == victim:
            workers.Workers.map = killed_while_planning  # type: ignore[method-assign, assignment]
        model, stats = build(), corp.Statistics.load(folder / "statistics")
        planned = corp.plan(model, stats, RECIPE)
        bare = replace(planned, sites=tuple(replace(site, fold=None) for site in planned.sites))
        made = {"planned": corp.apply(model, stats, planned), "folded": corp.apply(model, stats, bare)}
        made["pruned"] = corp.prune(model, sequences(8, 10), RECIPE)
        weights = {name: result.model.state_dict() for name, result in made.items()}
        torch.save(weights, folder / f"{group.world}-{group.rank}.pt")
        name = next(site.name for site in corp.find_sites(model).mlp)
        empty = SiteSums(*(part.empty() for part in vars(stats.moments_of(name)).values()))
        try:
            corp.plan(model, replace(stats, sums={**stats.sums, name: empty}), RECIPE)
        except CorpError as error:
            (folder / f"{group.world}-{group.rank}.txt").write_text(str(error))


def worker(folder: Path, victim: int, rank: int, port: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", RANK=str(rank))
    try:
        main(folder, victim)
    except CorpError as error:
        (folder.parent / f"{folder.name}-{rank}.error").write_text(str(error))
        sys.exit(1)


def pair(folder: Path, victim: int) -> list[int | None]:
    """Exit codes of two processes, of which one may be killed. torchrun would end the survivor itself."""
    fork, port = multiprocessing.get_context("fork"), free_port()
    workers = [fork.Process(target=worker, args=(folder, victim, rank, port)) for rank in range(2)]
    for one in workers:
        one.start()
    for one in workers:
        one.join(120)
    codes = [one.exitcode for one in workers]
    for one in workers:
        one.kill()
    return codes


if __name__ == "__main__":
    import torch._dynamo  # what counting operations imports

    for order in sys.argv[1:]:
        folder, _, victim = order.rpartition(":")
        print(CODES, *pair(Path(folder), int(victim)))
