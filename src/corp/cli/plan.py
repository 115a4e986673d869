"""corp plan: what pruning would do and cost, without doing it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corp import api
from corp.cli import deployment as d
from corp.cli import options as o
from corp.cli import recipes as r
from corp.cli.console import command, note, progress, show_json, show_table
from corp.errors import StorageError
from corp.planning.plan import COLUMNS
from corp.recipe import SUBSPACE
from corp.report.why import explained


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
    mlp: r.Mlp = None,
    attn: r.Attn = None,
    vo: r.Vo = None,
    equal_heads: r.EqualHeads = False,
    target_macs: r.TargetMacs = None,
    target_params: r.TargetParams = None,
    target_latency: r.TargetLatency = None,
    sparsity: r.Sparsity = None,
    preset: r.Preset = "paper",
    rank: r.Rank = "",
    compensate: r.Compensate = "",
    intercept: r.Intercept = "",
    ridge: r.Ridge = "",
    attn_basis: r.AttnBasis = "",
    allocate: r.Allocate = "",
    vo_basis: r.VoBasis = SUBSPACE,
    round_to: r.RoundTo = "1",
    skip: r.Skip = None,
    override: r.Override = None,
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
    recipe = r.make_recipe(
        mlp=mlp,
        attn=attn,
        vo=vo,
        equal_heads=equal_heads,
        target_macs=target_macs,
        target_params=target_params,
        sparsity=sparsity,
        preset=preset,
        rank=rank,
        compensate=compensate,
        intercept=intercept,
        ridge=ridge,
        attn_basis=attn_basis,
        allocate=allocate,
        vo_basis=vo_basis,
        round_to=round_to,
        skip=skip,
        override=override,
        target_latency=target_latency,
    )
    if out is not None and out.exists() and not overwrite:
        raise StorageError(f"{out} exists; choose another output, or pass --overwrite")
    text = o.TextOptions(text_field, seq_len, pack, tokenizer)
    source = o.Source(model, weights, calib or [], samples, batch_size, device, dtype, seed, max_bad, text)
    d.check(deploy_data, mix_deploy)
    settings = o.make_settings(tokens, memory)
    dense, statistics = o.statistics(source, stats, recipe, settings)
    seen = d.statistics(source, deploy_data, dense, settings)
    statistics = statistics + seen if seen is not None and mix_deploy else statistics
    with progress("planning", None, "sites") as advance:
        planned = api.plan(dense, statistics, recipe, progress=advance)
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
