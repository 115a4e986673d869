"""corp plan: shows what pruning would do and cost, without doing it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from corp.cli import arguments as a
from corp.cli import early
from corp.cli.console import Console, command, note, show_json, show_table
from corp.cli.expand import expanded
from corp.errors import PlanError
from corp.recipe import Recipe


@command
@expanded(first=a.FIRST)
def plan(
    source: a.Source,
    recipe: Recipe,
    collection: a.Collection,
    deployment: a.Deployment,
    stats: a.Stats = None,
    out: Annotated[Path | None, a.option("Also write the plan to this JSON file.", a.OUTPUT, "--out", "-o")] = None,
    overwrite: a.Overwrite = False,
    json: a.Json = False,
) -> None:
    """Show what pruning MODEL would keep and cost: widths, rho² and predicted error per site."""
    early.require_source(source, stats)
    early.require_deployment(deployment)
    if out is not None:
        early.require_output_file(out, overwrite=overwrite)
    from corp import api
    from corp.calibration.statistics import Statistics
    from corp.cli import inputs
    from corp.cli.deployment import DeploymentWatch, content_of, show_shift
    from corp.planning.site_plan import COLUMNS
    from corp.report.why import explained

    if recipe.min_agreement is not None:
        raise PlanError("--min-agreement is measured while pruning: use corp prune, or give a target")
    settings = collection.settings()
    if stats is None:
        dense, statistics = inputs.calibrated(source, recipe=recipe, settings=settings, fits=True)
    else:
        dense, statistics = inputs.opened(source, recipe), Statistics.load(stats)
    watch = DeploymentWatch(source, dense, deployment, settings)
    statistics = watch.calibrated(statistics)
    note(f"planning {inputs.described(source, dense)} {recipe.goal()}, from {statistics.samples} samples")
    planned = api.plan(dense, statistics, replace(recipe, sequential=False), observer=Console())
    shift = watch.measured(planned)
    if out is not None:
        planned.save(out)
    if json:
        show_json({**planned.to_dict(), **content_of(shift)})
        return
    show_table("plan", COLUMNS, [site.row() for site in planned.sites])
    for line in explained(planned.why):
        note(line)
    show_shift(shift)
    note("nothing was changed" + (f"; the plan is in {out}" if out else ""))
