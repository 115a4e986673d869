"""corp plan: what pruning would do and cost, without doing it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from corp import api
from corp.cli import deployment as d
from corp.cli import options as o
from corp.cli.console import Console, command, note, show_json, show_table
from corp.cli.recipes import with_recipe
from corp.errors import PlanError, StorageError
from corp.planning.plan import COLUMNS
from corp.recipe import Recipe
from corp.report.why import explained


@command
@with_recipe
def plan(
    model: o.ModelArg,
    recipe: Recipe,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write the plan to this JSON file.")] = None,
    calib: o.MaybeCalib = None,
    stats: o.Stats = None,
    weights: o.Weights = None,
    samples: o.MaybeSamples = None,
    tokens: o.Tokens = "auto",
    text_field: o.TextField = "text",
    seq_len: o.SeqLen = None,
    pack: o.Pack = None,
    tokenizer: o.Tokenizer = None,
    memory: o.Memory = None,
    batch_size: o.MaybeBatchSize = None,
    device: o.Device = "auto",
    dtype: o.Dtype = "auto",
    seed: o.Seed = 0,
    max_bad: o.MaxBad = 0.05,
    deploy_data: d.DeployData = None,
    mix_deploy: d.MixDeploy = False,
    overwrite: o.Overwrite = False,
    json: o.Json = False,
) -> None:
    """Show what pruning MODEL would keep and cost (dry run): per site widths, rho² and predicted error."""
    if out is not None and out.exists() and not overwrite:
        raise StorageError(f"{out} exists; choose another output, or pass --overwrite")
    if recipe.min_agreement is not None:
        raise PlanError("--min-agreement is measured while pruning: use corp prune, or give a target")
    text = o.TextOptions(text_field, seq_len, pack, tokenizer)
    source = o.Source(model, weights, calib or [], samples, batch_size, device, dtype, seed, max_bad, text)
    d.check(deploy_data, mix_deploy)
    settings = o.make_settings(tokens, memory)
    dense, statistics = o.statistics(source, stats, recipe, settings)
    seen = d.statistics(source, deploy_data, dense, settings)
    statistics = statistics + seen if seen is not None and mix_deploy else statistics
    planned = api.plan(dense, statistics, replace(recipe, sequential=False), observer=Console())
    shift = d.measured(dense, statistics, seen, planned)
    if out is not None:
        planned.save(out)
    if json:
        show_json({**planned.to_dict(), **d.content(shift)})
        return
    show_table("plan", COLUMNS, [site.row() for site in planned.sites])
    for line in explained(planned.why):
        note(line)
    d.show(shift)
    note("nothing was changed" + (f"; the plan is in {out}" if out else ""))
