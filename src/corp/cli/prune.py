"""corp prune: a model and a folder of images in, a smaller model out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from corp import api, storage
from corp.atomic import refuse_existing
from corp.cli import options as o
from corp.cli.console import command, note, progress, show_json, show_table
from corp.plan import COLUMNS
from corp.report.tables import TOTALS, Report


@command
def prune(
    model: o.ModelArg,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it must not exist.")],
    calib: o.MaybeCalib = None,
    stats: o.Stats = None,
    weights: o.Weights = None,
    samples: o.Samples = 4000,
    tokens: o.Tokens = "auto",
    memory: o.Memory = None,
    mlp: o.Mlp = None,
    attn: o.Attn = None,
    sparsity: o.Sparsity = None,
    preset: o.Preset = "paper",
    rank: o.Rank = "",
    compensate: o.Compensate = "",
    intercept: o.Intercept = "",
    ridge: o.Ridge = 1e-3,
    round_to: o.RoundTo = "1",
    skip: o.Skip = None,
    override: o.Override = None,
    batch_size: o.BatchSize = 32,
    device: o.Device = "auto",
    dtype: o.Dtype = "float32",
    seed: o.Seed = 0,
    max_bad: o.MaxBad = 0.05,
    overwrite: o.Overwrite = False,
    json: o.Json = False,
) -> None:
    """Prune MODEL: calibrate on unlabelled images, remove, compensate, save."""
    recipe = o.make_recipe(mlp, attn, sparsity, preset, rank, compensate, intercept, ridge, round_to, skip, override)
    refuse_existing(out, overwrite=overwrite)
    source = o.Source(model, weights, calib or [], samples, batch_size, device, dtype, seed, max_bad)
    dense, statistics = o.statistics(source, stats, recipe, o.make_settings(tokens, memory))
    with progress("planning", None, "sites") as advance:
        plan = api.plan(dense, statistics, recipe, progress=advance)
    result = api.apply(dense, statistics, plan)
    storage.save(result, out, overwrite=overwrite, command=shlex.join(["corp", *sys.argv[1:]]))
    if json:
        show_json({"output": str(out), **result.report.to_dict()})
    else:
        show_report(result.report)
        note(f"saved to {out}; load it with corp.load({str(out)!r})")


def show_report(report: Report) -> None:
    show_table("sites", COLUMNS, [site.row() for site in report.plan.sites])
    show_table("before and after", TOTALS, report.totals())
