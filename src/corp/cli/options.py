"""The options that commands share, and what they mean together: a model, its data, a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import nn

from corp import storage
from corp.adapters.registry import find_sites
from corp.api import calibrate, placement, wanted_sites
from corp.calibration import Settings
from corp.cli.console import note, progress
from corp.errors import DataError, ModelError, RecipeError
from corp.recipe import PRESETS, RANKINGS, Recipe
from corp.stats import Statistics
from corp.stats.memory import parse_bytes
from corp.version import __version__

if TYPE_CHECKING:
    from corp.data.images import ImageBatches

ModelArg = Annotated[str, typer.Argument(help="A timm model name, or a folder that corp saved.", show_default=False)]
Weights = Annotated[
    Path | None, typer.Option(help="Weights file: .safetensors, or .pth (weights only). Default: timm's pretrained.")
]
Calib = Annotated[
    list[Path], typer.Option(help="Folder of unlabelled images, any nesting; may be given several times.")
]
MaybeCalib = Annotated[
    list[Path] | None, typer.Option(help="Folder of unlabelled images, any nesting; may be given several times.")
]
Stats = Annotated[Path | None, typer.Option(help="Statistics of an earlier corp calibrate, instead of --calib.")]
Tokens = Annotated[
    str, typer.Option(help="Tokens per image for the MLPs: auto (enough for a stable fit), all, or a number.")
]
Memory = Annotated[str | None, typer.Option(help="Memory for the statistics, e.g. 4GB; more passes if they need more.")]
Offload = Annotated[str | None, typer.Option(help="Keep the weights on cpu or disk; layers visit the device.")]
Samples = Annotated[int, typer.Option(help="How many of the images to use, drawn by --seed.", min=1)]
BatchSize = Annotated[int, typer.Option(help="Images per forward pass.", min=1)]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, or auto.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16, for the forward pass and the result.")]
Seed = Annotated[int, typer.Option(help="Draws the calibration images.")]
MaxBad = Annotated[float, typer.Option(help="Share of unreadable images that is tolerated (each is named).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")]

Mlp = Annotated[float | None, typer.Option(help="Share of MLP hidden channels to remove, 0 <= s < 1.")]
Attn = Annotated[float | None, typer.Option(help="Share of every head's Q/K dimensions to remove, 0 <= s < 1.")]
Sparsity = Annotated[float | None, typer.Option(help="The same share for both.")]
Preset = Annotated[str, typer.Option(help=f"Sets the next three: {', '.join(PRESETS)}.")]
Rank = Annotated[str, typer.Option(help=f"MLP ranking: {', '.join(RANKINGS)}.", show_default="the preset's")]
Compensate = Annotated[str, typer.Option(help="full, mean (bias only) or none.", show_default="the preset's")]
Intercept = Annotated[
    str,
    typer.Option(
        help="May compensation use a bias? auto (where there is one), yes or no.", show_default="the preset's"
    ),
]
Ridge = Annotated[float, typer.Option(help="Ridge, relative to the mean diagonal of the system.")]
RoundTo = Annotated[str, typer.Option(help="Round kept widths up: a number, or e.g. mlp=64,head=8.")]
Skip = Annotated[list[str] | None, typer.Option(help="Glob over site names to leave alone; may be repeated.")]
Override = Annotated[
    list[str] | None, typer.Option(help="Other sparsities, e.g. 'blocks.0.*:mlp=0.2,attn=0'; may be repeated.")
]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INTERCEPTS: dict[str, bool | str] = {"": "", "auto": "auto", "yes": True, "no": False}


@dataclass(frozen=True)
class Source:
    """Where the model and its calibration data come from."""

    model: str
    weights: Path | None
    calib: list[Path]
    samples: int
    batch_size: int
    device: str
    dtype: str
    seed: int
    max_bad: float


def make_recipe(
    mlp: float | None,
    attn: float | None,
    sparsity: float | None,
    preset: str,
    rank: str,
    compensate: str,
    intercept: str,
    ridge: float,
    round_to: str,
    skip: list[str] | None,
    override: list[str] | None,
) -> Recipe:
    if sparsity is not None and (mlp is not None or attn is not None):
        raise RecipeError("--sparsity sets both --mlp and --attn; give either it or those")
    if sparsity is None and mlp is None and attn is None:
        raise RecipeError("nothing to prune: give --sparsity 0.5, or --mlp and/or --attn")
    if intercept not in _INTERCEPTS:
        raise RecipeError(f"--intercept {intercept} is not one of {', '.join(filter(None, _INTERCEPTS))}")
    both = 0.0 if sparsity is None else sparsity
    return Recipe(
        mlp=both if mlp is None else mlp,
        attn=both if attn is None else attn,
        preset=preset,
        rank=rank,
        compensate=compensate,
        intercept=_INTERCEPTS[intercept],
        ridge=ridge,
        round_to=_pairs(round_to, int, "--round-to") if "=" in round_to else _number(round_to, int, "--round-to"),
        skip=tuple(skip or ()),
        overrides=dict(_override(text) for text in override or ()),
    )


def load_model(name: str, weights: Path | None, *, pretrained: bool = True) -> nn.Module:
    """A folder that corp saved, or a timm model by name."""
    if Path(name).is_dir():
        if weights is not None:
            raise ModelError(f"{name} is a saved folder with its own weights; --weights cannot go with it")
        return storage.load(name)
    from corp.adapters import timm_models  # timm is imported only when a timm model is asked for

    if weights is None and pretrained:
        note(f"{name}: taking timm's pretrained weights (--weights FILE uses a file of yours)")
    return timm_models.create(name, weights, pretrained=pretrained)


def chosen_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def place(model: nn.Module, device: str, dtype: str) -> nn.Module:
    if dtype not in _DTYPES:
        raise ModelError(f"--dtype {dtype} is not one of {', '.join(_DTYPES)}")
    device = chosen_device(device)
    try:
        return model.to(torch.device(device), _DTYPES[dtype])
    except (RuntimeError, AssertionError) as error:  # torch has no kind of its own for "no such device"
        raise ModelError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from error


def make_settings(
    tokens: str,
    memory: str | None,
    checkpoint_seconds: float = 120.0,
    fresh: bool = False,
    offload: str | None = None,
    device: str = "cpu",
) -> Settings:
    number = _number(tokens, int, "--tokens") if tokens not in ("auto", "all") else tokens
    amount = None if memory is None else parse_bytes(memory)
    return Settings(number, amount, checkpoint_seconds, fresh, offload, chosen_device(device))


def image_batches(
    model: nn.Module, folders: list[Path], samples: int, seed: int, batch_size: int, max_bad: float = 0.05
) -> ImageBatches:
    """The images of the folders, drawn by seed, preprocessed as the model wants them."""
    from corp.adapters import timm_models
    from corp.data.images import ImageBatches, choose, list_images

    chosen = choose(list_images(folders), samples, seed)
    return ImageBatches(chosen, timm_models.preprocessing(model), batch_size=batch_size, max_bad=max_bad)


def statistics(source: Source, stats: Path | None, recipe: Recipe, settings: Settings) -> tuple[nn.Module, Statistics]:
    """The model with the statistics of an earlier calibration, or of one made now."""
    if stats is None:
        return calibrated(source, recipe=recipe, settings=settings)
    if source.calib:
        raise DataError("--stats are of data that was seen already; --calib cannot go with it")
    return place(load_model(source.model, source.weights), source.device, source.dtype), Statistics.load(stats)


def calibrated(
    source: Source,
    *,
    settings: Settings,
    recipe: Recipe | None = None,
    out: Path | None = None,
    quiet: bool = False,
) -> tuple[nn.Module, Statistics]:
    """The model, and its statistics over the calibration images; what `recipe` cannot have fails before them."""
    if not source.calib:
        raise DataError("no data: give a folder of images with --calib (or statistics with --stats, where it is taken)")
    # An offloaded model stays on the host; its layers visit the device during calibration only.
    home = source.device if settings.offload is None else "cpu"
    model = place(load_model(source.model, source.weights), home, source.dtype)
    if recipe is not None:
        wanted_sites(find_sites(model), recipe)
    batches = image_batches(model, source.calib, source.samples, source.seed, source.batch_size, source.max_bad)
    origin = {
        "model": source.model,
        "data": [str(folder) for folder in source.calib],
        "data fingerprint": batches.fingerprint(),
        "samples": batches.samples,
        "batch size": source.batch_size,
        "seed": source.seed,
        "device": str(placement(model)[0]),
        "dtype": source.dtype,
        "preprocessing": batches.describe(),
        "corp": __version__,
        "torch": torch.__version__,
    }
    say = None if quiet else note
    with progress(f"calibrating on {placement(model)[0]}", batches.samples, "images", quiet=quiet) as advance:
        stats = calibrate(model, batches, progress=advance, settings=settings, out=out, origin=origin, announce=say)
    for path, reason in batches.bad:
        note(f"skipped {path}: {reason}")
    if batches.bad:
        note(f"{len(batches.bad)} of {batches.samples} images were skipped")
    return model, stats


def _override(text: str) -> tuple[str, dict[str, Any]]:
    glob, colon, changes = text.rpartition(":")
    if not colon or not glob:
        raise RecipeError(f"--override {text!r} should look like 'blocks.0.*:mlp=0.2,attn=0'")
    return glob, _pairs(changes, float, "--override")


def _pairs(text: str, kind: type, option: str) -> dict[str, Any]:
    pairs = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            raise RecipeError(f"{option}: {part!r} should look like name=number")
        pairs[key.strip()] = _number(value, kind, option)
    return pairs


def _number(text: str, kind: type, option: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise RecipeError(f"{option}: {text!r} is not a number") from None
