"""corp plan: what pruning would do and cost, without doing it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corp import api
from corp.cli import options as o
from corp.cli.console import command, note, progress, show_json, show_table
from corp.errors import StorageError
from corp.plan import COLUMNS


@command
def plan(
    model: o.ModelArg,
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
    batch_size: o.MaybeBatchSize = None,
    device: o.Device = "auto",
    dtype: o.Dtype = "auto",
    seed: o.Seed = 0,
    max_bad: o.MaxBad = 0.05,
    overwrite: o.Overwrite = False,
    json: o.Json = False,
) -> None:
    """Show what pruning MODEL would keep and cost (dry run): per site widths, rho² and predicted error."""
    recipe = o.make_recipe(mlp, attn, sparsity, preset, rank, compensate, intercept, ridge, round_to, skip, override)
    if out is not None and out.exists() and not overwrite:
        raise StorageError(f"{out} exists; choose another output, or pass --overwrite")
    text = o.TextOptions(text_field, seq_len, pack, tokenizer)
    source = o.Source(model, weights, calib or [], samples, batch_size, device, dtype, seed, max_bad, text)
    dense, statistics = o.statistics(source, stats, recipe, o.make_settings(tokens, memory))
    with progress("planning", None, "sites") as advance:
        planned = api.plan(dense, statistics, recipe, progress=advance)
    if out is not None:
        planned.save(out)
    if json:
        show_json(planned.to_dict())
        return
    show_table("plan", COLUMNS, [site.row() for site in planned.sites])
    note("nothing was changed" + (f"; the plan is in {out}" if out else ""))
