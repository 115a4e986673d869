"""corp prune: makes a smaller model from a model and images or texts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from corp.cli import arguments as a
from corp.cli import early
from corp.cli.console import Console, command, in_flags, note, progress, show_json, show_table
from corp.cli.expand import expanded
from corp.errors import CorpError, DataError, ModelError, StorageError
from corp.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from corp.calibration.batches import Forward
    from corp.calibration.settings import Settings
    from corp.planning.report import Report
    from corp.sites import Sites
    from corp.steps.result import Result
    from corp.storage.export.possible import Exports


@command
@expanded(first=a.FIRST)
def prune(
    source: a.Source,
    recipe: Recipe,
    collection: a.Collection,
    deployment: a.Deployment,
    out: Annotated[
        Path | None,
        a.option("Folder to write; it must not exist. Required unless --dry-run is given.", a.OUTPUT, "--out", "-o"),
    ] = None,
    stats: a.Stats = None,
    program: Annotated[
        Literal["transformers", "timm", "vllm", "gguf", "onnx"] | None,
        a.option(
            "Prune only in ways that this program can load: one width for all layers and no merged tokens "
            "(transformers, timm), one width for all heads (transformers, vllm, gguf), MLPs only (timm). corp export "
            "writes the format.",
            a.REMOVE,
            "--for",
        ),
    ] = None,
    eval_data: Annotated[
        list[Path] | None,
        a.option("Images or texts to measure on before and after: accuracy, perplexity, closeness.", a.OUTPUT),
    ] = None,
    eval_samples: Annotated[
        int | None, a.option("How many samples of --eval-data, drawn by --seed.", a.OUTPUT, min=1, show_default="all")
    ] = None,
    head: Annotated[
        Path | None, a.option("Head that reads the backbone's patches (.safetensors, from corp probe).", a.DATA)
    ] = None,
    image_size: Annotated[
        str | None,
        a.option("HEIGHTxWIDTH of the images in use; images are not cropped.", a.DATA, show_default="the head's"),
    ] = None,
    dry_run: Annotated[
        bool,
        a.option("Only show what would be done, and how much time and memory it would take.", a.OUTPUT, "--dry-run"),
    ] = False,
    stream: Annotated[
        bool,
        a.option(
            "Prune a model that is larger than memory, one block at a time, with hidden states on disk. Start the same "
            "command again to continue an interrupted run.",
            a.MACHINE,
            "--stream",
        ),
    ] = False,
    overwrite: a.Overwrite = False,
    json: a.Json = False,
) -> None:
    """Prune MODEL: calibrate on unlabelled images or texts, remove, compensate, save.

    To share the work between processes: torchrun --nproc-per-node 4 -m corp prune ...
    """
    early.require_source(source, stats)
    if out is None and not dry_run:
        raise StorageError("no output: name a new folder with -o, such as -o small/, or give --dry-run")
    if out is not None:
        early.require_output(out, overwrite=overwrite)
    early.require_paths("--eval-data", eval_data or [])
    early.require_deployment(deployment)
    for option, asked in (("sequential", recipe.sequential is True), ("min-agreement", recipe.min_agreement)):
        if asked and stats is not None:
            raise DataError(f"--{option} needs the data: give --calib instead of --stats")
    in_use = head is not None or image_size is not None
    if in_use and (stats is not None or deployment.deploy_data):
        raise DataError("--head and --image-size need --calib; they cannot be combined with --stats or --deploy-data")

    from corp import api
    from corp.calibration import workers
    from corp.calibration.statistics import Statistics
    from corp.cli import inputs
    from corp.cli.deployment import DeploymentWatch, content_of, show_shift
    from corp.cli.models import as_stored
    from corp.cli.texts import channels_to_fit
    from corp.storage.export.possible import Exports

    settings = collection.settings()
    if stream:
        whole = {
            "--stats": stats, "--for": program, "--eval-data": eval_data, "--deploy-data": deployment.deploy_data,
            "--head": head, "--image-size": image_size, "--overwrite": overwrite,
        }  # fmt: skip
        if odd := [option for option, value in whole.items() if value]:
            raise DataError(f"--stream holds one block at a time, so it cannot be combined with {odd[0]}")
        _prune_streamed(source, recipe, settings, None if dry_run else out, json=json)
        return
    known = None if stats is None else Statistics.load(stats)
    dense = inputs.opened(source, any_size=in_use)
    exports = None if program is None else Exports(dense)
    merging = recipe.tokens is not None
    recipe = recipe if exports is None or program is None else exports.recipe_for(program, recipe)
    if merging and recipe.tokens is None:
        note(f"{program} cannot merge tokens, so the widths alone have to meet the target; the last line compares both")
    batches: Any = None
    forward: Forward | None = None
    if in_use:
        from corp.cli.eval_dense import used_with

        batches, forward = used_with(source, dense, head, image_size)
    elif known is None:
        batches = inputs.batches_of(dense, source, channels_to_fit(dense, recipe), dry=out is None or dry_run)
    origin = None if known else inputs.origin_of(source, dense, batches)
    if out is None or dry_run:
        made = api.estimate(dense, batches, recipe, stats=known, forward=forward, settings=settings, origin=origin)
        show_json(made.to_dict()) if json else show_table(*made.table())
        for line in made.advice():
            note(in_flags(line))
        return
    inputs.warn_of_little_space(out, dense)

    def tell(sites: Sites) -> Iterator[str]:
        with suppress(CorpError):  # a model that cannot be exported can still be pruned
            yield told(exports or Exports(dense, sites), recipe)

    watch = DeploymentWatch(source, dense, deployment, settings, tell)
    with workers.launched() as group:
        result = api.prune(
            dense, batches, recipe, stats=known, forward=forward, settings=settings, origin=origin, observer=watch
        )
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
        from corp.cli.eval import measured
        from corp.cli.evaluation import Evaluation

        wanted = Evaluation(
            eval_data, samples=eval_samples, seed=source.seed, head=head, image_size=image_size,
            text=source.text, max_bad=source.max_bad, batch_size=source.batch_size,
        )  # fmt: skip
        content, show = measured({source.model: dense, str(out): result.model}, wanted)
    if json:
        evaluation = {"evaluation": content} if content else {}
        show_json({"output": str(out), **result.report.to_dict(), **content_of(shift), **evaluation})
        return
    if show:
        show()
    note_merging(dense, watch.sites, result, recipe, batches, forward)
    note(f"{result.report.gained()}; saved to {out}, load it with corp.load({str(out)!r})")


def told(exports: Exports, recipe: Recipe) -> str:
    """The formats to which the result can be exported, and options that would allow the others."""
    from corp.storage.export.possible import PROGRAMS

    able = [target for target, reason in exports.under(recipe).items() if reason is None]
    said = [f"{target} (heads padded)" if exports.pads_heads(target, recipe) else target for target in able]
    more = [name for name, target in PROGRAMS.items() if target not in able and exports.fits(name, recipe)]
    return f"exports: {', '.join(said) or 'none'}" + (f"; with --for also {', '.join(more)}" if more else "")


def _save(result: Result, out: Path, source: a.Source, dense: nn.Module, *, overwrite: bool) -> None:
    """Save the result with its tokenizer or preprocessing; report it if there is none."""
    from corp.cli.models import lacking_companions
    from corp.storage import folder as storage

    with progress(f"saving {out}", None, ""):
        storage.save(result, out, overwrite=overwrite, **_record(source, dense))
    if lacking := lacking_companions(dense, out):
        note(lacking)


def _record(source: a.Source, dense: nn.Module) -> dict[str, Any]:
    """What is saved with the result: this command line, and where tokenizers may be."""
    from corp.cli.models import companion_places

    places = companion_places(source.model, dense, source.text.tokenizer)
    return {"command": shlex.join(["corp", *sys.argv[1:]]), "companions": places}


def _prune_streamed(source: a.Source, recipe: Recipe, settings: Settings, out: Path | None, *, json: bool) -> None:
    """Prune block by block into `out`; without it, only report how much memory that takes."""
    from corp.cli import inputs
    from corp.cli.models import DTYPES, HF, chosen_device, lacking_companions
    from corp.io.observer import SILENT
    from corp.steps.run import Run
    from corp.storage.streamed.presence import open_folder
    from corp.storage.streamed.prune import estimate_opened, prune_opened

    if source.own_texts:
        raise DataError("--own-texts needs the whole model, and --stream holds one block at a time")
    if source.weights is not None:
        raise ModelError("--stream reads the weights beside the config in the model's folder: leave --weights out")
    dtype = None if source.dtype == "auto" else DTYPES[source.dtype]
    opened = open_folder(source.model.removeprefix(HF), device=chosen_device(source.device), dtype=dtype)
    batches = inputs.batches_of(opened.model, source)
    if out is None:
        need = estimate_opened(opened, Run(batches, None, settings, None, SILENT), recipe)
        show_json({**need._asdict(), "memory": need.total}) if json else note(need.line())
        return
    run = Run(batches, None, settings, inputs.origin_of(source, opened.model, batches), Console())
    report = prune_opened(opened, run, recipe, out, **_record(source, opened.model))
    inputs.tell_skipped(batches)
    if lacking := lacking_companions(opened.model, out):
        note(lacking)
    if json:
        show_json({"output": str(out), **report.to_dict()})
        return
    show_report(report)
    note(f"saved to {out}, load it with corp.load({str(out)!r})")


def show_report(report: Report) -> None:
    from corp.planning.report import STAGES, TOTALS
    from corp.planning.site_plan import COLUMNS
    from corp.report.why import explained

    show_table("sites", COLUMNS, [site.row() for site in report.plan.sites])
    show_table("before and after", TOTALS, report.totals())
    if stages := report.stages():
        show_table("estimate and outcome", STAGES, stages)
    for line in explained(report.plan.why):
        note(line)


def note_merging(
    dense: nn.Module, sites: Sites | None, result: Result, recipe: Recipe, batches: Any, forward: Forward | None
) -> None:
    """Report what merging tokens would gain under this budget of operations or time, measured on held-out batches."""
    from corp.cli.models import IMAGE, kind_of
    from corp.steps.allocation.tokens_and_widths import offer_merging

    target = recipe.target_macs or recipe.target_latency
    if sites is None or target is None or recipe.tokens is not None or batches is None or kind_of(dense) != IMAGE:
        return
    with progress("trying merged tokens", None, ""):
        offer = offer_merging(dense, sites, result.model, target, batches, forward)
    if offer is not None and offer.merged.divergence().value < offer.pruned.divergence().value:
        merged, pruned = (one.divergence().value for one in (offer.merged, offer.pruned))
        note(
            f"try --merge-tokens, which also merges tokens: merging alone, at {target:g} of the operations, has a "
            f"divergence from the dense model of {merged:.3f} on {offer.samples} held-out samples; this model has "
            f"{pruned:.3f}"
        )
