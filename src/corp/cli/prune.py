"""corp prune: a model and images or texts in, a smaller model out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from corp.cli import arguments as a
from corp.cli.console import command, note, progress, show_json, show_table
from corp.cli.expand import expanded
from corp.errors import DataError
from corp.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from corp.api import Result
    from corp.planning.report import Report


@command
@expanded(first=a.FIRST)
def prune(
    source: a.Source,
    recipe: Recipe,
    collection: a.Collection,
    deployment: a.Deployment,
    out: a.OutFolder,
    stats: a.Stats = None,
    eval_data: Annotated[
        list[Path] | None,
        a.option(
            "Images or texts to measure on before and after: accuracy, perplexity, closeness.",
            a.OUTPUT,
            show_default=False,
        ),
    ] = None,
    eval_samples: Annotated[
        int | None,
        a.option("How many samples of --eval-data, drawn by --seed.", a.OUTPUT, min=1, show_default="all"),
    ] = None,
    overwrite: a.Overwrite = False,
    json: a.Json = False,
) -> None:
    """Prune MODEL: calibrate on unlabelled images or texts, remove, compensate, save.

    Several processes share the work under torchrun: torchrun --nproc-per-node 4 -m corp prune ...
    """
    a.require_model(source.model)
    from corp import api
    from corp.calibration import workers
    from corp.cli import inputs
    from corp.cli.deployment import DeploymentWatch, content_of, require_given, show_shift
    from corp.cli.models import as_stored

    inputs.require_output(out, overwrite=overwrite)
    if missing := [path for path in eval_data or [] if not path.exists()]:
        raise DataError(f"--eval-data {missing[0]} does not exist")
    for option, asked in (("sequential", recipe.sequential is True), ("min-agreement", recipe.min_agreement)):
        if asked and stats is not None:
            raise DataError(f"--{option} reads the data itself: give --calib instead of --stats")
    require_given(deployment)
    settings = collection.settings()
    known = None if stats is None else inputs.read_statistics(source, stats)
    if known is None:
        inputs.require_data(source)
    dense = inputs.opened(source, recipe)
    inputs.warn_of_little_space(out, dense)
    batches = None if known else inputs.batches_of(dense, source)
    data = f"the statistics in {stats}" if batches is None else inputs.amount(batches)
    note(f"pruning {inputs.described(source, dense)} {inputs.goal(recipe)}, from {data}")
    origin = None if known else inputs.origin_of(source, dense, batches)
    watch = DeploymentWatch(source, dense, deployment, settings)
    with workers.launched() as group:
        result = api.prune(dense, batches, recipe, stats=known, settings=settings, origin=origin, observer=watch)
    if group.rank > 0:  # every process has the result; one saves it
        return
    inputs.tell_skipped(batches)
    shift = watch.measured(result.plan)
    result = replace(result, model=as_stored(result.model, dense))
    _save(result, out, source, dense, overwrite=overwrite)
    if not json:
        show_report(result.report)
        show_shift(shift)
    content: dict[str, Any] = {}
    show = None
    if eval_data:
        loaded = {source.model: dense, str(out): result.model}
        content, show = before_and_after(loaded, eval_data, eval_samples, source)
    if json:
        evaluation = {"evaluation": content} if content else {}
        show_json({"output": str(out), **result.report.to_dict(), **content_of(shift), **evaluation})
        return
    if show:
        show()
    note(f"{gained(result.report)}; saved to {out}, load it with corp.load({str(out)!r})")


def _save(result: Result, out: Path, source: a.Source, dense: nn.Module, *, overwrite: bool) -> None:
    """Save the result with the tokenizer or preprocessing that belongs to it; say so if there is none."""
    from corp.cli.models import companion_places, lacking_companions
    from corp.storage import folder as storage

    places = companion_places(source.model, dense, source.text.tokenizer)
    line = shlex.join(["corp", *sys.argv[1:]])
    with progress(f"saving {out}", None, ""):
        storage.save(result, out, overwrite=overwrite, command=line, companions=places)
    if lacking := lacking_companions(dense, out):
        note(lacking)


def before_and_after(
    loaded: dict[str, nn.Module], data: list[Path], samples: int | None, source: a.Source
) -> tuple[dict[str, Any], Callable[[], None]]:
    """What corp eval says of the two models, and how to show it."""
    from corp.cli import eval_images, eval_text
    from corp.cli.models import IMAGE, kind_of

    if kind_of(next(iter(loaded.values()))) == IMAGE:
        content, images = eval_images.evaluate_images(
            loaded, data, None, samples, source.batch_size, source.seed, source.max_bad
        )
        return content, lambda: eval_images.show_images(content, images)
    options = eval_text.Options(data, samples, source.batch_size, source.seed, source.text)
    content, rows = eval_text.evaluate_texts(loaded, options)
    return content, lambda: eval_text.show_texts(content, rows)


def show_report(report: Report) -> None:
    from corp.planning.plan import COLUMNS
    from corp.planning.report import TOTALS
    from corp.report.why import explained

    show_table("sites", COLUMNS, [site.row() for site in report.plan.sites])
    show_table("before and after", TOTALS, report.totals())
    for line in explained(report.plan.why):
        note(line)


def gained(report: Report) -> str:
    """What pruning gained, in one line."""
    return ", ".join(f"{before} -> {after} {what} (x {ratio})" for what, before, after, ratio in report.totals())
