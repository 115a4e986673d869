"""From the options of a command to what it works on: the model, its batches and their statistics."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from corp import __version__
from corp.adapters.registry import find_sites
from corp.api import calibrate
from corp.calibration.batches import placement, without_cache
from corp.calibration.settings import Settings
from corp.calibration.statistics import Statistics
from corp.cli.arguments import Source
from corp.cli.console import Console, note, progress
from corp.cli.models import load_model, place
from corp.cli.sources import calibration_batches
from corp.errors import warn
from corp.io.observer import SILENT
from corp.measure.cost import count_params
from corp.planning.widths import require_prunable
from corp.recipe import Recipe


def opened(
    source: Source, recipe: Recipe | None = None, settings: Settings | None = None, *, any_size: bool = False
) -> nn.Module:
    """The model of the source on its device; a recipe that it cannot satisfy is refused here."""
    # An offloaded model stays on the host; its layers visit the device during calibration only.
    home = source.device if settings is None or settings.offload is None else "cpu"
    with progress(f"loading {source.model}", None, ""):
        model = place(load_model(source.model, source.weights, any_size=any_size), home, source.dtype)
    if recipe is not None:
        require_prunable(find_sites(model), recipe)
    return model


def batches_of(model: nn.Module, source: Source) -> Any:
    """The data of --calib as batches."""
    with progress("reading the list of samples", None, ""):
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
    """The model and its statistics over the calibration data; a recipe that it cannot satisfy is refused before.

    `model` is the source's, if it was loaded already.
    """
    model = opened(source, recipe, settings) if model is None else model
    batches = batches_of(model, source)
    if not quiet:
        note(f"calibrating {described(source, model)} on {amount(batches)} of {', '.join(map(str, source.calib))}")
    watch = SILENT if quiet else Console()
    with without_cache(model):
        stats = calibrate(
            model, batches, settings=settings, out=out, origin=origin_of(source, model, batches), observer=watch
        )
    tell_skipped(batches)
    return model, stats


def origin_of(source: Source, model: nn.Module, batches: Any) -> dict[str, Any]:
    """A record of where model and data come from."""
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


def warn_of_little_space(out: Path, model: nn.Module) -> None:
    """Warn if the dense model would not fit where its pruned copy is to be saved."""
    there = next(folder for folder in out.absolute().parents if folder.exists())
    free, size = shutil.disk_usage(there).free, sum(p.numel() * p.element_size() for p in model.parameters())
    if free < size:
        warn(
            f"{free / 1e6:.0f} MB are free where {out} goes, and the dense model takes {size / 1e6:.0f} MB; "
            "free some space, or write elsewhere with -o"
        )


def described(source: Source, model: nn.Module) -> str:
    """The model in a few words: name, size, device."""
    return f"{source.model} ({count_params(model) / 1e6:.3f} M parameters, {placement(model)[0]})"


def amount(batches: Any) -> str:
    """How much data there is, in the unit that fits it."""
    tokens = getattr(batches, "tokens", None)
    return f"{batches.samples} images" if tokens is None else f"{batches.samples} sequences ({tokens} tokens)"
