"""The options of corp eval, and its results for one model: a line of a table, and an object of --json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from corp.cli import arguments as a
from corp.measure.intervals import Interval

MAPS, TEXTS = "Segmentation and depth", "Texts"  # panels
AWAY, CLOSE = "_difference", "_to_dense"  # endings of scores that compare with the dense model
PERCENT = ("top1", "top5", "agreement", "miou", "pixel_accuracy", "delta1", "delta2", "delta3")
FORMATS = {"perplexity": ".3f", "perplexity_ratio": ".3f"}
Evaluated: TypeAlias = tuple[dict[str, Any], Callable[[], None]]  # what --json prints, and what shows it as tables


@dataclass(frozen=True)
class Evaluation:
    """What models are measured on, and how."""

    data: Annotated[list[Path], typer.Option(help="Folder of images, or texts; may be repeated.")] = field(
        default_factory=list
    )
    labels: a.Labels = None
    samples: Annotated[
        int | None,
        typer.Option(help="How many images, documents or sequences to draw by --seed.", min=1, show_default="all"),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed that draws --samples.")] = 0
    task: Annotated[
        Literal["segmentation", "depth"] | None, a.option("What the maps show.", MAPS, show_default="the head's")
    ] = None
    head: Annotated[Path | None, a.option("Head for the backbones (.safetensors), from corp probe.", MAPS)] = None
    image_size: Annotated[
        str | None, a.option("HEIGHTxWIDTH; images are not cropped.", MAPS, show_default="the head's")
    ] = None
    ignore: Annotated[int | None, a.option("Label of unlabelled pixels.", MAPS, show_default="the head's, or 255")] = (
        None
    )
    depth_scale: Annotated[float, a.option("Units per metre in depth maps: 1000 for millimetres.", MAPS)] = 1.0
    stride: Annotated[
        int | None, a.option("Perplexity: tokens from one window to the next.", TEXTS, min=1, show_default="no overlap")
    ] = None
    per_document: Annotated[
        bool, a.option("Perplexity: score every document by itself, after BOS.", TEXTS, "--per-document")
    ] = False
    sts: Annotated[Path | None, a.option("Encoders: table of scored sentence pairs (STS-B).", TEXTS)] = None
    tasks: Annotated[str | None, a.option("Language models: lm-eval tasks, separated by commas.", TEXTS)] = None
    limit: Annotated[int | None, a.option("Examples per task of --tasks.", TEXTS, min=1, show_default="all")] = None
    text: a.TextOptions = field(default_factory=a.TextOptions)
    max_bad: a.MaxBad = 0.05
    batch_size: a.BatchSize = None


@dataclass
class ModelScores:
    """A model, under its given name; `extra` holds results that are not a number with an interval."""

    name: str
    params: int
    numbers: dict[str, Interval | None]
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        numbers = {name: found and found.to_dict() for name, found in self.numbers.items()}
        return {"model": self.name, "params": self.params, **numbers, **self.extra}

    def cells(self, names: Sequence[str] | None = None) -> list[str]:
        """The row of a table with the numbers of these names, by default with all."""
        numbers = (_cell(name, self.numbers[name]) for name in (self.numbers if names is None else names))
        return [self.name, f"{self.params / 1e6:.3f} M", *numbers]


def base_name(name: str) -> str:
    """The name of the score that a comparison with the dense model refers to."""
    return name.removesuffix(AWAY).removesuffix(CLOSE)


def _cell(name: str, found: Interval | None) -> str:
    if found is None:
        return "–"
    if base_name(name) in PERCENT:
        return f"{found.map(lambda end: 100 * end):.1f}"
    return format(found, FORMATS.get(name, ".4f"))


def known_of(intervals: Mapping[str, Interval | None], names: tuple[str, ...], known: tuple[str, ...]) -> Any:
    """The intervals under `names`; None for what is not `known`, such as a model's closeness to itself."""
    return {name: intervals.get(name) if name in known else None for name in names}
