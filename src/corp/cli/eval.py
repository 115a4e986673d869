"""corp eval: several models side by side on the same data: images, maps or texts, depending on the models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from corp.cli import arguments as a
from corp.cli import early, eval_dense, eval_images, eval_text
from corp.cli.console import command, show_json
from corp.cli.evaluation import Evaluated, Evaluation
from corp.cli.expand import expanded
from corp.cli.inputs import refuse_other
from corp.cli.models import IMAGE, kind_of, load_model, place
from corp.errors import DataError, ModelError
from corp.evaluate.heads import task_of


@command
@expanded(first=("data", "dense", "weights", "labels", "samples", "seed"), without=("pack", "chat"))
def evaluate(
    models: Annotated[list[str], typer.Argument(help="timm names, hf:FOLDERs or folders that corp saved.")],
    asked: Evaluation,
    dense: Annotated[
        str | None, typer.Option(help="The model to compare with.", show_default="the first of several")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Weights file of the dense model, or of the first model without --dense.")
    ] = None,
    device: a.Device = "auto",
    dtype: a.Dtype = "auto",
    json: a.Json = False,
) -> None:
    """Measure MODELS: accuracy, mIoU or depth errors on images, perplexity on texts, closeness to the dense model."""
    if not (asked.data or asked.sts or asked.tasks):
        raise DataError("no data: give a folder of images, or texts, with --data")
    early.require_paths("--data", asked.data)
    names = dict.fromkeys([dense, *models] if dense else models)
    loaded = {n: place(load_model(n, None if i else weights), device, dtype) for i, n in enumerate(names)}
    content, show = measured(loaded, asked)
    show_json(content) if json else show()


def measured(loaded: dict[str, nn.Module], asked: Evaluation) -> Evaluated:
    """Measure models by name on the same data; the others are compared with the first."""
    if _common_kind(loaded) != IMAGE:
        if asked.labels is not None:
            raise DataError("--labels is for images only")
        return eval_text.evaluate_texts(loaded, asked)
    for_texts = {"--stride": asked.stride, "--per-document": asked.per_document, "--sts": asked.sts}
    for name, value in (for_texts | {"--tasks": asked.tasks}).items():
        if value:
            raise DataError(f"{name} is for texts, but these models take images")
    if asked.task or asked.head or all(task_of(model) for model in loaded.values()):  # these predict maps
        return eval_dense.evaluate_dense(loaded, asked)
    return eval_images.evaluate_images(loaded, asked)


def _common_kind(loaded: dict[str, nn.Module]) -> str:
    kinds = {name: kind_of(model) for name, model in loaded.items()}
    kind, *others = dict.fromkeys(kinds.values())
    if others:
        told = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise ModelError(f"these models take different data: {told}; evaluate them separately")
    refuse_other(kind, next(iter(loaded.values())))
    return kind
