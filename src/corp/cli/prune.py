"""corp prune: a model and images or texts in, a smaller model out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from corp import api
from corp.adapters.registry import find_sites
from corp.allocation import search as searching
from corp.calibration.batches import without_cache
from corp.calibration.statistics import Statistics
from corp.cli import deployment as d
from corp.cli import eval_images, eval_text
from corp.cli import options as o
from corp.cli import recipes as r
from corp.cli.console import command, note, progress, show_json, show_table
from corp.cli.models import IMAGE, as_stored, companion_places, kind_of, lacking_companions
from corp.cli.sources import calibration_batches
from corp.errors import DataError
from corp.files import refuse_existing
from corp.planning.plan import COLUMNS
from corp.recipe import SUBSPACE, Recipe
from corp.refit.repair import settled
from corp.report.tables import TOTALS, Report
from corp.report.why import explained
from corp.storage import folder as storage


@command
def prune(
    model: o.ModelArg,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it must not exist.")],
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
    min_agreement: r.MinAgreement = None,
    sparsity: r.Sparsity = None,
    preset: r.Preset = "paper",
    rank: r.Rank = "",
    compensate: r.Compensate = "",
    intercept: r.Intercept = "",
    ridge: r.Ridge = "",
    attn_basis: r.AttnBasis = "",
    allocate: r.Allocate = "",
    vo_basis: r.VoBasis = SUBSPACE,
    sequential: r.Sequential = None,
    sequential_samples: r.SequentialSamples = None,
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
    eval_data: Annotated[
        list[Path] | None,
        typer.Option(help="Images or texts to measure on before and after: accuracy, perplexity, closeness."),
    ] = None,
    eval_samples: Annotated[
        int | None, typer.Option(help="How many samples of --eval-data, drawn by --seed.", min=1, show_default="all")
    ] = None,
    overwrite: o.Overwrite = False,
    json: o.Json = False,
) -> None:
    """Prune MODEL: calibrate on unlabelled images or texts, remove, compensate, save."""
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
        sequential=sequential,
        sequential_samples=sequential_samples,
        round_to=round_to,
        skip=skip,
        override=override,
        target_latency=target_latency,
        min_agreement=min_agreement,
    )
    refuse_existing(out, overwrite=overwrite)
    if missing := [path for path in eval_data or [] if not path.exists()]:
        raise DataError(f"--eval-data {missing[0]} is not there")
    if sequential and stats is not None:
        raise DataError("--sequential reads the data itself: give --calib instead of --stats")
    text = o.TextOptions(text_field, seq_len, pack, tokenizer)
    source = o.Source(model, weights, calib or [], samples, batch_size, device, dtype, seed, max_bad, text)
    d.check(deploy_data, mix_deploy)
    held: list[Any] | None = [] if stats is None and searching.searches(recipe) else None
    settings = o.make_settings(tokens, memory)
    dense, statistics = o.statistics(source, stats, recipe, settings, held)
    seen = d.statistics(source, deploy_data, dense, settings)
    statistics = statistics + seen if seen is not None and mix_deploy else statistics
    result = make(dense, statistics, recipe, held, source)
    shift = d.measured(dense, statistics, seen, result.plan)
    result = replace(result, model=as_stored(result.model))
    places = companion_places(model, dense, tokenizer)
    line = shlex.join(["corp", *sys.argv[1:]])
    storage.save(result, out, overwrite=overwrite, command=line, companions=places)
    if lacking := lacking_companions(dense, out):
        note(lacking)
    if not json:
        show_report(result.report)
        d.show(shift)
        note(f"saved to {out}; load it with corp.load({str(out)!r})")
    content: dict[str, Any] = {}
    show = None
    if eval_data:
        content, show = before_and_after({model: dense, str(out): result.model}, eval_data, eval_samples, source)
    if json:
        show_json(
            {
                "output": str(out),
                **result.report.to_dict(),
                **d.content(shift),
                **({"evaluation": content} if content else {}),
            }
        )
        return
    if show:
        show()


def make(
    dense: nn.Module, statistics: Statistics, recipe: Recipe, held: list[Any] | None, source: o.Source
) -> api.Result:
    """The pruned model: searched for where batches were held out for that, fitted block by block where it is asked."""
    batches: Any = None
    if source.calib:
        batches = calibration_batches(dense, source)
        recipe = settled(dense, find_sites(dense), recipe, batches)
    asked, shared = recipe, None
    if held is not None:
        with without_cache(dense):
            recipe, shared = searching.search(dense, statistics, recipe, held, announce=note)
    with progress("planning", None, "sites") as advance:
        plan = api.plan(dense, statistics, recipe.at_once(), progress=advance, shared=shared)
    result = api.apply(dense, statistics, plan)
    if recipe.sequential is not True:
        return result
    batches = batches if held is None else searching.hold_out(batches, asked)
    with progress("repairing", None, "blocks") as advance:
        return api.repair(dense, result, batches, recipe, progress=advance)


def before_and_after(
    loaded: dict[str, nn.Module], data: list[Path], samples: int | None, source: o.Source
) -> tuple[dict[str, Any], Callable[[], None]]:
    """What corp eval says of the two models, and how to show it."""
    if kind_of(next(iter(loaded.values()))) == IMAGE:
        content, images = eval_images.evaluate_images(
            loaded, data, None, samples, source.batch_size, source.seed, source.max_bad
        )
        return content, lambda: eval_images.show_images(content, images)
    options = eval_text.Options(data, samples, source.batch_size, source.seed, source.text)
    content, rows = eval_text.evaluate_texts(loaded, options)
    return content, lambda: eval_text.show_texts(content, rows)


def show_report(report: Report) -> None:
    show_table("sites", COLUMNS, [site.row() for site in report.plan.sites])
    show_table("before and after", TOTALS, report.totals())
    for line in explained(report.plan.why):
        note(line)
