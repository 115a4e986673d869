"""The options that commands share, and what they mean together: a model, its data and their statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from corp import __version__
from corp.adapters.registry import find_sites
from corp.api import calibrate
from corp.calibration.batches import placement, without_cache
from corp.calibration.job import Settings
from corp.calibration.memory import parse_bytes
from corp.calibration.statistics import Statistics
from corp.cli.console import Console, note
from corp.cli.models import chosen_device as chosen_device
from corp.cli.models import load_model as load_model
from corp.cli.models import place as place
from corp.cli.recipes import parse_number
from corp.cli.sources import Source as Source
from corp.cli.sources import TextOptions as TextOptions
from corp.cli.sources import calibration_batches
from corp.cli.sources import image_batches as image_batches
from corp.errors import DataError
from corp.observer import SILENT
from corp.planning.widths import require_prunable
from corp.recipe import Recipe

ModelArg = Annotated[
    str,
    typer.Argument(help="A timm name, hf:FOLDER or hf:HUB-ID, or a folder that corp saved.", show_default=False),
]
Weights = Annotated[
    Path | None, typer.Option(help="Weights file: .safetensors, or .pth (weights only). Default: timm's pretrained.")
]
_CALIB = (
    "Folder of unlabelled images, or file or folder of texts "
    "(.txt, .jsonl, .csv, .tsv, .parquet, a datasets folder); may be given several times."
)
Calib = Annotated[list[Path], typer.Option(help=_CALIB)]
MaybeCalib = Annotated[list[Path] | None, typer.Option(help=_CALIB)]
Stats = Annotated[Path | None, typer.Option(help="Statistics of an earlier corp calibrate, instead of --calib.")]
Tokens = Annotated[
    str, typer.Option(help="Tokens per sample for the MLPs: auto (enough for a stable fit), all, or a number.")
]
Memory = Annotated[str | None, typer.Option(help="Memory for the statistics, e.g. 4GB; more passes if they need more.")]
Offload = Annotated[str | None, typer.Option(help="Keep the weights on cpu or disk; layers visit the device.")]
Samples = Annotated[int, typer.Option(help="How many of the images to use, drawn by --seed.", min=1)]
MaybeSamples = Annotated[
    int | None,
    typer.Option(
        help="How many images or sequences to use, drawn by --seed.",
        min=1,
        show_default="4000 images or documents, 128 packed sequences",
    ),
]
BatchSize = Annotated[int, typer.Option(help="Images per forward pass.", min=1)]
MaybeBatchSize = Annotated[
    int | None,
    typer.Option(help="Samples per forward pass.", min=1, show_default="32 images, or 8192 tokens"),
]
TextField = Annotated[str, typer.Option(help="Key, column or column number (from 1) of the text in a record.")]
SeqLen = Annotated[
    int | None,
    typer.Option(help="Tokens per sequence.", min=2, show_default="2048, or the model's context if shorter"),
]
Pack = Annotated[
    bool | None,
    typer.Option(
        "--pack/--no-pack",
        help="Fill sequences with documents one after the other, or give each its own.",
        show_default="pack for causal models",
    ),
]
Tokenizer = Annotated[str | None, typer.Option(help="Folder of the tokenizer, where it is not with the model.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, or auto.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16 or float16, for the forward pass; the result is no wider than the checkpoint."
    ),
]
Seed = Annotated[int, typer.Option(help="Draws the calibration samples.")]
MaxBad = Annotated[float, typer.Option(help="Share of unreadable images that is tolerated (each is named).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")]


def make_settings(
    tokens: str,
    memory: str | None,
    checkpoint_seconds: float = 120.0,
    fresh: bool = False,
    offload: str | None = None,
    device: str = "cpu",
) -> Settings:
    number = parse_number(tokens, int, "--tokens") if tokens not in ("auto", "all") else tokens
    amount = None if memory is None else parse_bytes(memory)
    return Settings(number, amount, checkpoint_seconds, fresh, offload, chosen_device(device))


def statistics(source: Source, stats: Path | None, recipe: Recipe, settings: Settings) -> tuple[nn.Module, Statistics]:
    """The model with the statistics of an earlier calibration, or of one made now."""
    if stats is not None:
        return opened(source, recipe), read_statistics(source, stats)
    return calibrated(source, recipe=recipe, settings=settings)


def read_statistics(source: Source, stats: Path) -> Statistics:
    """The statistics of an earlier calibration, which replace the data."""
    for given, option in ((source.calib, "--calib"), (source.samples, "--samples")):
        if given:
            raise DataError(f"--stats are of data that was seen already; {option} cannot go with it")
    return Statistics.load(stats)


def opened(source: Source, recipe: Recipe | None = None, settings: Settings | None = None) -> nn.Module:
    """The model of the source, on its device; what `recipe` cannot have fails here."""
    # An offloaded model stays on the host; its layers visit the device during calibration only.
    home = source.device if settings is None or settings.offload is None else "cpu"
    model = place(load_model(source.model, source.weights), home, source.dtype)
    if recipe is not None:
        require_prunable(find_sites(model), recipe)
    return model


def batches_of(model: nn.Module, source: Source) -> Any:
    """The data of --calib as batches."""
    if not source.calib:
        raise DataError("no data: give images or texts with --calib (or statistics with --stats, where it is taken)")
    return calibration_batches(model, source)


def calibrated(
    source: Source,
    *,
    settings: Settings,
    recipe: Recipe | None = None,
    out: Path | None = None,
    quiet: bool = False,
    model: nn.Module | None = None,
) -> tuple[nn.Module, Statistics]:
    """The model, and its statistics over the calibration data; what `recipe` cannot have fails before them.

    `model` is the source's, if it was loaded already.
    """
    if not source.calib:
        raise DataError("no data: give images or texts with --calib (or statistics with --stats, where it is taken)")
    model = opened(source, recipe, settings) if model is None else model
    batches = batches_of(model, source)
    watch = SILENT if quiet else Console()
    with without_cache(model):
        stats = calibrate(
            model, batches, settings=settings, out=out, origin=origin_of(source, model, batches), observer=watch
        )
    tell_skipped(batches)
    return model, stats


def origin_of(source: Source, model: nn.Module, batches: Any) -> dict[str, Any]:
    """Where model and data come from, for the record."""
    device, dtype = placement(model)
    return {
        "model": source.model,
        "data": [str(folder) for folder in source.calib],
        "data fingerprint": batches.fingerprint(),
        "samples": batches.samples,
        "batch size": batches.batch_size,
        "seed": source.seed,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "preprocessing": batches.describe(),
        "corp": __version__,
        "torch": torch.__version__,
    }


def tell_skipped(batches: Any) -> None:
    """Name the images that could not be read."""
    bad = dict(getattr(batches, "bad", []))
    for path, reason in bad.items():
        note(f"skipped {path}: {reason}")
    if bad:
        note(f"{len(bad)} of {batches.samples} images were skipped")
