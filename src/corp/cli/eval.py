"""corp eval: what several models do on the same data, side by side: images, maps or texts, whichever they take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from corp.cli import arguments as a
from corp.cli import eval_dense, eval_images, eval_text
from corp.cli.console import command, show_json
from corp.cli.models import IMAGE, kind_of, load_model, place
from corp.cli.sources import refuse_other
from corp.errors import DataError, ModelError


@command
def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="timm names, hf:FOLDERs or folders that corp saved.", show_default=False)
    ],
    data: Annotated[
        list[Path] | None, typer.Option(help="Folder of images, or texts; may be given several times.")
    ] = None,
    dense: Annotated[str | None, typer.Option(help="The model to compare with; default: the first of several.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Weights file of the dense model (else of the first).")] = None,
    labels: Annotated[
        str | None, typer.Option(help="Images: CSV of file,label; none: no labels. Default: sub-folders or synset ids.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help="How many images, documents or packed sequences, drawn by --seed.", min=1, show_default="all"
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Maps: segmentation or depth.", show_default="the head's")] = None,
    head: Annotated[
        Path | None, typer.Option(help="Maps: a head for the backbones (.safetensors), as corp probe makes.")
    ] = None,
    image_size: Annotated[
        str | None, typer.Option(help="Maps: HEIGHTxWIDTH; images are not cropped.", show_default="the head's")
    ] = None,
    ignore: Annotated[
        int | None, typer.Option(help="Maps: the label of unlabelled pixels.", show_default="the head's, or 255")
    ] = None,
    depth_scale: Annotated[float, typer.Option(help="Maps: units per metre of depths; millimetres: 1000.")] = 1.0,
    text_field: a.TextField = "text",
    seq_len: a.SeqLen = None,
    tokenizer: a.Tokenizer = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Perplexity: tokens from one window to the next.", min=1, show_default="no overlap"),
    ] = None,
    per_document: Annotated[
        bool, typer.Option("--per-document", help="Perplexity: every document by itself, behind BOS.")
    ] = False,
    sts: Annotated[Path | None, typer.Option(help="Encoders: table of scored sentence pairs (STS-B).")] = None,
    tasks: Annotated[str | None, typer.Option(help="Language models: tasks of lm-eval, with commas.")] = None,
    limit: Annotated[int | None, typer.Option(help="Examples per task of --tasks.", min=1)] = None,
    batch_size: a.BatchSize = None,
    device: a.Device = "auto",
    dtype: a.Dtype = "auto",
    seed: Annotated[int, typer.Option(help="Draws the samples where --samples is given.")] = 0,
    max_bad: a.MaxBad = 0.05,
    json: a.Json = False,
) -> None:
    """Measure MODELS: accuracy, mIoU or depth errors on images, perplexity on texts, closeness to the dense model."""
    loaded = load_all([dense, *models] if dense else models, weights, device, dtype)
    kind = common_kind(loaded)
    if kind == IMAGE:
        _refuse_text_options(stride, per_document, sts, tasks)
        if not data:
            raise DataError("no data: give a folder of images with --data")
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
        raise ModelError(f"these models take different data: {told}; evaluate them apart")
    refuse_other(next(iter(kinds.values())), next(iter(loaded.values())))
    return next(iter(kinds.values()))


def _refuse_text_options(stride: int | None, per_document: bool, sts: Path | None, tasks: str | None) -> None:
    given = {"--stride": stride, "--per-document": per_document, "--sts": sts, "--tasks": tasks}
    for name, value in given.items():
        if value:
            raise DataError(f"{name} is for texts; these models take images")
