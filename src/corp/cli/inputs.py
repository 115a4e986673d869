"""From the options of a command to its inputs: the model, its data as batches, and statistics."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import suppress
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
from corp.cli import models
from corp.cli.arguments import Source
from corp.cli.console import Console, note, progress
from corp.cli.texts import calibration_texts, channels_to_fit
from corp.data.images import SUFFIXES, ImageBatches, choose, list_images, open_image
from corp.data.text import TextBatches
from corp.errors import DataError, warn
from corp.io.observer import SILENT
from corp.measure.cost import count_params
from corp.planning.widths import require_prunable
from corp.recipe import Recipe

IMAGE_BATCH = 32
FEW_IMAGES = 64  # below this, a fit of some hundred channels overfits the sample
LABELS = 32  # the most colours of a label map; a photograph has more
LABEL_FILES = frozenset({".txt", ".xml", ".json", ".csv", ".tsv", ".mat", ".npy", ".yaml", ".yml"})


def opened(
    source: Source, recipe: Recipe | None = None, settings: Settings | None = None, *, any_size: bool = False
) -> nn.Module:
    """The model of the source on its device; a recipe that it cannot satisfy is refused here."""
    # An offloaded model stays on the host; its layers move to the device during calibration only.
    home = source.device if settings is None or settings.offload is None else "cpu"
    with progress(f"loading {source.model}", None, ""):
        model = models.place(models.load_model(source.model, source.weights, any_size=any_size), home, source.dtype)
    if recipe is not None:
        require_prunable(find_sites(model), recipe)
    return model


def calibrated(
    source: Source,
    *,
    settings: Settings,
    recipe: Recipe | None = None,
    out: Path | None = None,
    quiet: bool = False,
    model: nn.Module | None = None,
    fits: bool = False,
) -> tuple[nn.Module, Statistics]:
    """The model and its statistics over the calibration data; a recipe that it cannot satisfy is refused before.

    `model` is the source's, if it was loaded already. `fits`: MLPs are to be fitted on these statistics, so there
    should be enough tokens.
    """
    model = opened(source, recipe, settings) if model is None else model
    batches = batches_of(model, source, channels_to_fit(model, recipe) if fits else 0)
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
            f"{free / 1e6:.0f} MB are free on the disk of {out}, and the dense model takes {size / 1e6:.0f} MB; "
            "free some space, or write elsewhere with -o"
        )


def described(source: Source, model: nn.Module) -> str:
    """The model in a few words: name, size, device."""
    return f"{source.model} ({count_params(model) / 1e6:.3f} M parameters, {placement(model)[0]})"


def amount(batches: Any) -> str:
    """How much data there is, in the unit that fits it."""
    tokens = getattr(batches, "tokens", None)
    return f"{batches.samples} images" if tokens is None else f"{batches.samples} sequences ({tokens} tokens)"


def batches_of(model: nn.Module, source: Source, channels: int = 0, *, dry: bool = False) -> ImageBatches | TextBatches:
    """The data of --calib, drawn by the seed, as batches that the model takes; `channels` and `dry` concern texts."""
    with progress("reading the list of samples", None, ""):
        kind = models.kind_of(model)
        if kind == models.IMAGE:
            refuse_labels(source.calib)
            chosen = choose(list_images(source.calib), source.samples or source.images, source.seed)
            transform, size = models.preprocessing_of(source.model, model), source.batch_size or IMAGE_BATCH
            warn_of_odd_images(chosen)
            return ImageBatches(chosen, transform, batch_size=size, max_bad=source.max_bad)
        refuse_other(kind, model)
    return calibration_texts(model, source, channels, dry=dry)


def refuse_other(kind: str, model: nn.Module) -> None:
    if kind == models.OTHER:
        raise DataError(
            f"{type(model).__name__} takes neither images alone nor texts alone, so a folder cannot feed it; "
            "calibrate it from Python, with batches of your own: corp.calibrate(model, batches)"
        )


def refuse_labels(folders: list[Path]) -> None:
    """Refuse a folder of labels instead of images, and name one beside it that has images."""
    for folder in folders:
        suffixes = Counter(path.suffix.lower() for path in folder.rglob("*") if path.is_file())
        if not suffixes or SUFFIXES & suffixes.keys() or not suffixes.keys() <= LABEL_FILES:
            continue
        beside = (entry for entry in sorted(folder.absolute().parent.iterdir()) if entry.is_dir())
        images = next((e for e in beside if any(file.suffix.lower() in SUFFIXES for file in e.iterdir())), None)
        remedy = f"--calib {images}" if images else "--calib with the folder of the images themselves"
        what = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(3))
        raise DataError(f"{folder} holds labels ({what} files) and no images; try {remedy}")


def warn_of_odd_images(paths: list[Path]) -> None:
    """Warn if there are too few images for a stable fit, or if they look like label maps instead of photographs."""
    if len(paths) < FEW_IMAGES:
        warn(f"{len(paths)} images are too few for a fit that generalises; give at least {FEW_IMAGES} with --calib")
    with suppress(OSError, ValueError, DataError):  # unreadable images are handled where they are read
        colours = [open_image(path).resize((64, 64), 0).getcolors(LABELS) for path in paths[:4]]
        if all(found is not None for found in colours):
            warn(
                f"the images in {paths[0].parent} have at most {LABELS} colours each, as label maps do; "
                "--calib takes the photographs themselves"
            )
