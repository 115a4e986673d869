"""corp eval: what several models do on the same data, side by side: images, maps or texts, whichever they take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from torch import nn

from corp.cli import arguments as a
from corp.cli import early, eval_dense, eval_images, eval_text
from corp.cli.console import command, show_json
from corp.cli.models import IMAGE, kind_of, load_model, place
from corp.cli.sources import refuse_other
from corp.errors import DataError, ModelError

MAPS, TEXTS = "Segmentation and depth", "Texts"  # panels


@command
def evaluate(
    models: Annotated[list[str], typer.Argument(help="timm names, hf:FOLDERs or folders that corp saved.")],
    data: Annotated[list[Path] | None, typer.Option(help="Folder of images, or texts; may be repeated.")] = None,
    dense: Annotated[
        str | None, typer.Option(help="The model to compare with.", show_default="the first of several")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="Weights file of the dense model, or else of the first.")] = None,
    labels: Annotated[
        str | None,
        typer.Option(help="CSV of file,label, or none for no labels.", show_default="sub-folders or synset ids"),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="How many images, documents or sequences to draw by --seed.", min=1, show_default="all"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed that draws --samples.")] = 0,
    task: Annotated[
        Literal["segmentation", "depth"] | None, a.option("What the maps show.", MAPS, show_default="the head's")
    ] = None,
    head: Annotated[Path | None, a.option("Head for the backbones (.safetensors), from corp probe.", MAPS)] = None,
    image_size: Annotated[
        str | None, a.option("HEIGHTxWIDTH; images are not cropped.", MAPS, show_default="the head's")
    ] = None,
    ignore: Annotated[
        int | None, a.option("Label of unlabelled pixels.", MAPS, show_default="the head's, or 255")
    ] = None,
    depth_scale: Annotated[float, a.option("Units per metre in depth maps: 1000 for millimetres.", MAPS)] = 1.0,
    stride: Annotated[
        int | None, a.option("Perplexity: tokens from one window to the next.", TEXTS, min=1, show_default="no overlap")
    ] = None,
    per_document: Annotated[
        bool, a.option("Perplexity: score every document by itself, after BOS.", TEXTS, "--per-document")
    ] = False,
    sts: Annotated[Path | None, a.option("Encoders: table of scored sentence pairs (STS-B).", TEXTS)] = None,
    tasks: Annotated[str | None, a.option("Language models: lm-eval tasks, separated by commas.", TEXTS)] = None,
    limit: Annotated[int | None, a.option("Examples per task of --tasks.", TEXTS, min=1, show_default="all")] = None,
    text_field: a.TextField = "text",
    seq_len: a.SeqLen = None,
    tokenizer: a.Tokenizer = None,
    max_bad: a.MaxBad = 0.05,
    batch_size: a.BatchSize = None,
    device: a.Device = "auto",
    dtype: a.Dtype = "auto",
    json: a.Json = False,
) -> None:
    """Measure MODELS: accuracy, mIoU or depth errors on images, perplexity on texts, closeness to the dense model."""
    if not (data or sts or tasks):
        raise DataError("no data: give a folder of images, or texts, with --data")
    early.require_paths("--data", data or [])
    loaded = load_all([dense, *models] if dense else models, weights, device, dtype)
    kind = common_kind(loaded)
    if kind == IMAGE:
        _refuse({"--stride": stride, "--per-document": per_document, "--sts": sts, "--tasks": tasks})
        assert data is not None  # every other kind of data was refused
        if eval_dense.is_dense(loaded, task, head):
            maps = eval_dense.Options(
                task, head, data, labels, image_size, ignore, depth_scale, samples, batch_size, seed, max_bad
            )
            content, show = eval_dense.evaluate_dense(loaded, maps)
        else:
            content, show = eval_images.evaluate_images(loaded, data, labels, samples, batch_size, seed, max_bad)
    else:
        if labels is not None:
            raise DataError("--labels are for images; texts have none here")
        wanted = tuple(task.strip() for task in tasks.split(",") if task.strip()) if tasks else ()
        text = a.TextOptions(text_field, seq_len, None, tokenizer)
        given = eval_text.Options(data or [], samples, batch_size, seed, text, stride, per_document, sts, wanted, limit)
        content, show = eval_text.evaluate_texts(loaded, given)
    show_json(content) if json else show()


def load_all(names: list[str], weights: Path | None, device: str, dtype: str) -> dict[str, nn.Module]:
    """Every model once, by name; the first is the one that the others are compared with."""
    unique = list(dict.fromkeys(names))
    return {n: place(load_model(n, None if i else weights), device, dtype) for i, n in enumerate(unique)}


def common_kind(loaded: dict[str, nn.Module]) -> str:
    kinds = {name: kind_of(model) for name, model in loaded.items()}
    if len(set(kinds.values())) > 1:
        told = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise ModelError(f"these models take different data: {told}; evaluate them separately")
    refuse_other(next(iter(kinds.values())), next(iter(loaded.values())))
    return next(iter(kinds.values()))


def _refuse(given: dict[str, object]) -> None:
    for name, value in given.items():
        if value:
            raise DataError(f"{name} is for texts, but these models take images")
