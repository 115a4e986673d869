"""corp prune: a model and images or texts in, a smaller model out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from corp import api
from corp.api import TOTALS, Report
from corp.calibration.job import Settings
from corp.calibration.statistics import Statistics
from corp.cli import deployment as d
from corp.cli import eval_images, eval_text
from corp.cli import options as o
from corp.cli.console import Console, command, note, show_json, show_table
from corp.cli.models import IMAGE, as_stored, companion_places, kind_of, lacking_companions
from corp.cli.recipes import with_recipe
from corp.errors import DataError
from corp.files import refuse_existing
from corp.planning.plan import COLUMNS
from corp.recipe import Recipe
from corp.report.why import explained
from corp.storage import folder as storage


@command
@with_recipe
def prune(
    model: o.ModelArg,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it must not exist.")],
    recipe: Recipe,
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
    refuse_existing(out, overwrite=overwrite)
    if missing := [path for path in eval_data or [] if not path.exists()]:
        raise DataError(f"--eval-data {missing[0]} is not there")
    for option, asked in (("sequential", recipe.sequential is True), ("min-agreement", recipe.min_agreement)):
        if asked and stats is not None:
            raise DataError(f"--{option} reads the data itself: give --calib instead of --stats")
    text = o.TextOptions(text_field, seq_len, pack, tokenizer)
    source = o.Source(model, weights, calib or [], samples, batch_size, device, dtype, seed, max_bad, text)
    d.check(deploy_data, mix_deploy)
    settings = o.make_settings(tokens, memory)
    known = None if stats is None else o.read_statistics(source, stats)
    dense = o.opened(source, recipe)
    batches = None if known else o.batches_of(dense, source)
    origin = None if known else o.origin_of(source, dense, batches)
    watch = _Run(source, dense, deploy_data or [], mix_deploy, settings)
    result = api.prune(dense, batches, recipe, stats=known, settings=settings, origin=origin, observer=watch)
    o.tell_skipped(batches)
    shift = d.measured(dense, watch.stats, watch.seen, result.plan)
    result = replace(result, model=as_stored(result.model, dense))
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
        evaluation = {"evaluation": content} if content else {}
        show_json({"output": str(out), **result.report.to_dict(), **d.content(shift), **evaluation})
        return
    if show:
        show()


@dataclass
class _Run(Console):
    """Shows a run, and brings in the statistics of deployment data, mixed with those of --calib if that is asked."""

    source: o.Source
    dense: nn.Module
    deploy_data: list[Path]
    mix: bool
    settings: Settings
    stats: Statistics = field(default_factory=Statistics)
    seen: Statistics | None = None

    def __post_init__(self) -> None:
        super().__init__()

    def calibrated(self, stats: Statistics) -> Statistics:
        self.seen = d.statistics(self.source, self.deploy_data, self.dense, self.settings)
        self.stats = stats + self.seen if self.seen is not None and self.mix else stats
        return self.stats


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
