"""corp sweep: one calibration, many plans; curves, ablations and runtimes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import nn

from corp import __version__
from corp.calibration.batches import without_cache
from corp.calibration.settings import Settings
from corp.calibration.statistics import Statistics
from corp.cli import arguments as a
from corp.cli import early, eval_images, eval_text
from corp.cli.console import Console, command, note, progress, show_json, show_table
from corp.cli.evaluation import Evaluation
from corp.cli.expand import expanded
from corp.cli.inputs import batches_of, origin_of, refuse_other, tell_skipped
from corp.cli.models import IMAGE, chosen_device, kind_of, load_model, place, tokenizer_of
from corp.cli.texts import channels_to_fit
from corp.errors import DataError, RecipeError
from corp.evaluate import sweep as sweeping
from corp.evaluate.classify import Score
from corp.evaluate.run import judged
from corp.evaluate.sweep import Row, Sweep
from corp.io.files import write_json
from corp.io.tables import write_csv
from corp.measure.intervals import Interval
from corp.recipe import KINDS
from corp.recipe.checks import checked_sparsity
from corp.report.sweeps import draw
from corp.sites import fingerprint

TABLE = "sweep.csv"
SHOWN = ("samples", *KINDS, "preset", "rank", "compensate", "params", "macs", *(f"{kind} error" for kind in KINDS))
MEASURED = ("top1", "top5", "perplexity", "cosine", "agreement", "kl")
IMAGES = 1000  # calibration images by default


@command
@expanded(first=("calib", "out", "sparsity", "data"))
def sweep(
    source: a.Source,
    collection: a.Collection,
    stats: a.Stats = None,
    sparsity: Annotated[
        str, typer.Option(help="Shares to remove: first:last:step, or a list such as 0.3,0.5,0.7.")
    ] = "0.1:0.7:0.1",
    kinds: Annotated[
        str, typer.Option(help="What to prune: mlp, attn, vo, both (MLP and Q/K), all; separated by commas.")
    ] = "both",
    compensate: Annotated[
        str, typer.Option(help="full, mean, none, separated by commas.", show_default="the preset's")
    ] = "",
    rank: Annotated[str, typer.Option(help="Rankings, separated by commas.", show_default="the preset's")] = "",
    preset: Annotated[str, typer.Option(help="Presets such as paper, best, vbp, separated by commas.")] = "paper",
    ridge: Annotated[str, typer.Option(help="Ridges, separated by commas.")] = "1e-3",
    calib_sizes: Annotated[
        str, typer.Option(help="Numbers of samples to calibrate on, such as 100,500,1000, in one pass.")
    ] = "",
    data: Annotated[
        list[Path] | None, typer.Option(help="Images or texts to evaluate on, against the dense model.")
    ] = None,
    labels: a.Labels = None,
    eval_samples: Annotated[
        int | None, typer.Option(help="How many samples of --data, drawn by --seed.", min=1, show_default="all")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for table, JSON and figures; an interrupted run continues from it."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over instead of continuing an interrupted run.")
    ] = False,
    json: a.Json = False,
) -> None:
    """Apply many recipes to MODEL from one calibration, and measure each on --data.

    Measured are accuracy if images have labels, perplexity of language models, and closeness to the dense model.
    With -o, an interrupted run can continue, and a table (CSV), all results (JSON) and figures (SVG) are written.
    """
    if calib_sizes and stats is not None:
        raise DataError("--calib-sizes needs a pass over the data: give --calib instead of --stats")
    recipes = sweeping.grid(
        parse_range(sparsity), kinds.split(","), presets=preset.split(","), ranks=rank.split(","),
        compensations=compensate.split(","), ridges=_numbers(ridge, float, "--ridge"),
    )  # fmt: skip
    early.require_source(source, stats)
    early.require_paths("--data", data or [])
    source = replace(source, images=IMAGES)
    dense = place(load_model(source.model, source.weights), source.device, source.dtype)
    asked = Evaluation(
        data or [], labels, eval_samples, source.seed, text=source.text, max_bad=source.max_bad,
        batch_size=source.batch_size,
    )  # fmt: skip
    judge = _judge(dense, source, asked) if data else None
    found = Statistics.load(stats) if stats else None
    batches = None if found else batches_of(dense, source, 0 if calib_sizes else channels_to_fit(dense))
    sizes = _numbers(calib_sizes, int, "--calib-sizes") if calib_sizes else [batches.samples if batches else 0]
    if batches:
        sweeping.check_sizes(sizes, batches.samples)
    about = {
        "model": source.model,
        "weights": fingerprint(dense),
        "calibration": str(stats) if stats else [str(folder) for folder in source.calib],
        "evaluation": [str(folder) for folder in data or []],
        "seed": source.seed,
        "device": str(chosen_device(source.device)),
        "dtype": source.dtype,
        "corp": __version__,
        "torch": torch.__version__,
    }
    cases = {
        "recipes": [recipe.to_dict() for recipe in recipes],
        "sizes": sizes,
        "tokens": collection.sample_tokens,
        "batch size": source.batch_size,
        "calibration data": [found.samples, found.origin.get("data fingerprint")] if found else _identity(batches),
        "evaluation data": None if judge is None else [*_identity(judge.batches), labels],
    }
    with sweeping.working_folder(out, {**about, **cases}, fresh=fresh) as folder:
        run = Sweep(dense, recipes, judge.evaluate if judge else None, folder)
        settings = collection.settings()
        calibration = _run(run, source, found, batches, sizes, settings)
        content = sweeping.result(run, about, calibration)
        if out is not None:
            _write(folder, content)
    for read in (batches, judge and judge.batches):
        tell_skipped(read)
    if json:
        show_json(content)
        return
    _show(content)
    if out is not None:
        note(f"saved table, figures and statistics to {out}; next: corp report {out}")


class Judge(NamedTuple):
    """How models are measured, and on which data."""

    evaluate: sweeping.Evaluate
    batches: Any


def _identity(batches: Any) -> list[Any]:
    """What identifies a set of samples and its preprocessing."""
    return [batches.samples, batches.fingerprint(), batches.describe()]


def _run(
    run: Sweep, source: a.Source, stats: Statistics | None, batches: Any, sizes: list[int], settings: Settings
) -> dict[int, float | None]:
    """Run all cases; return the seconds of calibration for each number of samples, None if unknown."""
    every: list[tuple[Statistics, float | None]] = []
    if stats is not None:
        every = [(stats, None)]
    elif run.folder is not None:
        origin = origin_of(source, run.dense, batches)
        with without_cache(run.dense):
            parts = sweeping.statistics_of_sizes(
                run.dense, batches, sizes, run.folder, seed=source.seed, origin=origin, settings=settings,
                observer=Console(),
            )  # fmt: skip
            every = list(parts)
    for part, _ in every:
        with progress(f"sweeping ({part.samples} samples)", len(run.recipes), "recipes") as advance:
            run.run(part, advance)
    return {part.samples: seconds for part, seconds in every}


def _judge(dense: nn.Module, source: a.Source, asked: Evaluation) -> Judge:
    """How several models are measured on the images or texts, in one pass over them."""
    kind = kind_of(dense)
    if kind == IMAGE:
        images, batches = eval_images.image_batches({source.model: dense}, asked)
        return Judge(lambda models: [_measured(s.intervals()) for s in judged(models, Score, batches, dense)], images)
    refuse_other(kind, dense)
    if asked.labels is not None:
        raise DataError("--labels is for images only")
    texts = eval_text.text_batches(dense, tokenizer_of(source.model, source.text.tokenizer), kind, asked)

    def evaluate(models: Sequence[nn.Module]) -> list[Row]:
        others = [model for model in models if model is not dense]
        metrics = eval_text.judge(kind, [dense, *others], texts)
        return [_measured(metric.intervals()) for metric in metrics[-len(models) :]]

    return Judge(evaluate, texts)


def _measured(intervals: dict[str, Interval | None]) -> Row:
    row: Row = {}
    for name in MEASURED:
        interval = intervals.get(name)
        if interval is not None:
            row |= {name: interval.value, f"{name} low": interval.low, f"{name} high": interval.high}
    return row


def _write(folder: Path, content: dict[str, Any]) -> None:
    write_json(folder / sweeping.RESULT, content)
    write_csv(folder / TABLE, content["rows"], first="samples")
    draw(content["rows"], content["dense"], folder, content["model"])


def _show(content: dict[str, Any]) -> None:
    rows, dense = content["rows"], content["dense"]
    same = {name for name in ("samples", "preset", "rank", "compensate") if len({row[name] for row in rows}) == 1}
    columns = [c for c in (*SHOWN, *MEASURED) if c not in same and any(c in row for row in rows)]
    first = ["dense" if i == 0 else _cell(dense.get(column)) for i, column in enumerate(columns)]
    told = ", ".join(f"{name} {rows[0][name]}" for name in SHOWN if name in same)
    cells = [first, *([_cell(row.get(column)) for column in columns] for row in rows)]
    show_table(f"{content['model']}: {told}", columns, cells)
    names = ("samples", "calibrate", "rank", "compensate", "plan")
    cells = [[_cell(part[name], 2) for name in names] for part in content["runtime"]]
    show_table("seconds (plan includes ranking and all predictions)", names, cells)


def _cell(value: Any, digits: int = 4) -> str:
    if isinstance(value, int) and value >= 1e5:  # parameters and operations
        return f"{value / 1e9:.3f} G" if value >= 1e9 else f"{value / 1e6:.3f} M"
    return "–" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def parse_range(text: str) -> list[float]:
    """Parse "0.1:0.7:0.1" (both ends included) or "0.3,0.5"."""
    return [checked_sparsity("sparsity", share) for share in _shares(text)]


def _shares(text: str) -> list[float]:
    try:
        if ":" not in text:
            return list(dict.fromkeys(float(part) for part in text.split(",")))
        first, last, step = (float(part) for part in text.split(":"))
        if step <= 0 or last < first:
            raise ValueError
        return [round(first + i * step, 9) for i in range(int((last - first) / step + 1e-9) + 1)]
    except ValueError:
        raise RecipeError(f"--sparsity {text!r} should look like 0.1:0.7:0.1 or 0.3,0.5") from None


def _numbers(text: str, kind: type, option: str) -> list[Any]:
    return [a.parse_number(part, kind, option) for part in text.split(",")]
