"""corp eval on maps: segmentation and depth, against label maps and against the dense model's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from corp.calibration.batches import placement
from corp.cli.console import note, progress, show_table
from corp.cli.models import preprocessing_of
from corp.errors import DataError, ModelError
from corp.evaluate.dense import Estimate, MapScore
from corp.evaluate.heads import IGNORE, OwnMaps, WithHead, load_head, task_of
from corp.evaluate.run import Contender, side_by_side
from corp.measure.cost import count_params

if TYPE_CHECKING:
    from corp.data.dense import DensePairs, WholeImage
    from corp.data.images import ImageBatches

PERCENT = ("miou", "pixel_accuracy", "delta1", "delta2", "delta3")  # shares; the others have units
TITLES = {"miou": "mIoU", "pixel_accuracy": "pixel acc.", "rmse": "RMSE", "abs_rel": "abs. rel."}
BATCH = 8  # images of dense tasks are large


@dataclass(frozen=True)
class Options:
    """What --task and its kin say."""

    task: str | None
    head: Path | None
    data: list[Path]
    labels: str | None = None
    image_size: str | None = None
    ignore: int | None = None
    depth_scale: float = 1.0
    samples: int | None = None
    batch_size: int | None = None
    seed: int = 0
    max_bad: float = 0.05


@dataclass
class Row:
    """A model that gives maps, under the name it was given, and its scores."""

    name: str
    model: nn.Module
    score: MapScore

    def estimates(self, first: Row) -> dict[str, Estimate]:
        """The scores; of all but the first, their difference from the first's, and closeness to the first's maps."""
        found = self.score.truth.estimates() if self.score.truth else {}
        if self is first:
            return found
        before = first.score.truth.estimates() if first.score.truth else {}
        close = self.score.likeness.estimates() if self.score.likeness else {}
        return {
            **found,
            **{f"{name}_difference": one - before[name] for name, one in found.items()},
            **{f"{name}_to_dense": one for name, one in close.items()},
        }


def is_dense(loaded: dict[str, nn.Module], task: str | None, head: Path | None) -> bool:
    """Does the command ask for maps, or do the models give nothing else?"""
    return task is not None or head is not None or all(task_of(model) for model in loaded.values())


def evaluate_dense(loaded: dict[str, nn.Module], options: Options) -> tuple[dict[str, Any], list[Row]]:
    """What --json prints, and the rows of the table; the first model is the one to compare with."""
    first, (name, model) = options.head, next(iter(loaded.items()))
    head, info = load_head(first) if first else (None, None)
    tasks = {info.task if info else task_of(one) for one in loaded.values()}
    task = next(iter(tasks))
    if task is None or len(tasks) > 1:
        raise ModelError(f"{name} gives no maps by itself; fit a head with corp probe, and give it with --head")
    if options.task not in (None, task):
        raise ModelError(f"--task {options.task} does not go with this model and head, which are made for {task}")
    transform = whole_image(name, model, options.image_size, info.image_size if info else None)
    ignore = options.ignore if options.ignore is not None else info.ignore if info else ignored_by(model)
    rows = []
    for called, one in loaded.items():
        sized(one, transform.size)
        maps = OwnMaps(one) if head is None or info is None else WithHead(one, head, info.blocks).to(*placement(one))
        rows.append(Row(called, maps, MapScore(task, ignore)))
    batches = _batches(options, transform, compared=len(rows) > 1)
    reference = rows[0].model if len(rows) > 1 else None
    with progress(f"evaluating on {placement(model)[0]}", batches.samples, "images") as advance:
        side_by_side(reference, [Contender(row.model, row.score) for row in rows], batches, advance)
    content = {
        "task": task,
        "head": first and str(first),
        "data": {"folders": [str(folder) for folder in options.data], "images": batches.samples},
        "image_size": list(transform.size),
        "labelled": rows[0].score.truth is not None,
        "dense": rows[0].name if len(rows) > 1 else None,
        "models": [_content(row, rows[0]) for row in rows],
    }
    return content, rows


def _content(row: Row, first: Row) -> dict[str, Any]:
    numbers = {name: one.interval().to_dict() for name, one in row.estimates(first).items()}
    return {"model": row.name, "params": count_params(_pruned_part(row.model)), **numbers}


def _pruned_part(model: nn.Module) -> nn.Module:
    """The model without a head that was given beside it."""
    part: nn.Module = model.backbone if isinstance(model, WithHead) else model
    return part


def ignored_by(model: nn.Module) -> int:
    """The label that a whole model of transformers says it ignores."""
    ignore = getattr(getattr(model, "config", None), "semantic_loss_ignore_index", IGNORE)
    return int(ignore) if isinstance(ignore, int) else IGNORE


def _batches(options: Options, transform: WholeImage, *, compared: bool) -> DensePairs | ImageBatches:
    """Images with their maps; images alone where there are no maps and another model to compare with."""
    from corp.data.dense import DensePairs, find_pairs, match_maps
    from corp.data.images import ImageBatches, choose

    size = options.batch_size or BATCH
    found = {path: place for folder in options.data for path, place in match_maps(folder)}
    chosen = choose(list(found), options.samples, options.seed)
    if options.labels == "none" or not any(found.values()):
        if not compared:
            raise DataError(
                f"nothing to measure: no image below {options.data[0]} has a map, and there is no second model; "
                "give images with maps (images/ + labels/, or X/ + Xannot/), or a second model"
            )
        note("no label maps: the models are compared with the dense model's own maps only")
        return ImageBatches(chosen, transform, batch_size=size, max_bad=options.max_bad)
    pairs = {path: place for folder in options.data for path, place in find_pairs(folder)}
    return DensePairs([(path, pairs[path]) for path in chosen], transform, batch_size=size, scale=options.depth_scale)


def whole_image(name: str, model: nn.Module, given: str | None, known: tuple[int, int] | None) -> WholeImage:
    """The preprocessing of dense tasks: --image-size, else the head's, else the model's own size; no crop."""
    from corp.data.dense import WholeImage

    config = getattr(model, "pretrained_cfg", None)  # of timm
    if config:
        return WholeImage(parse_size(given) or known or tuple(config["input_size"][1:]), config["mean"], config["std"])
    processor: Any = getattr(preprocessing_of(name, model), "processor", None)
    own = getattr(model, "config", None)
    side = getattr(own, "image_size", None) or getattr(getattr(own, "backbone_config", None), "image_size", None)
    size = parse_size(given) or known or ((side, side) if isinstance(side, int) else None)
    if size is None:
        raise DataError(f"{name} does not say which image size it wants; give --image-size, such as 336x448")
    return WholeImage(size, processor.image_mean, processor.image_std)


def parse_size(text: str | None) -> tuple[int, int] | None:
    """(height, width) of "336x448" or "518"."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) for part in parts):
        raise DataError(f"--image-size {text} is not HEIGHTxWIDTH, such as 336x448, or one number")
    return int(parts[0]), int(parts[-1])


def sized(model: nn.Module, size: tuple[int, ...]) -> None:
    """Make a model of timm take images of this size, as loaded: its position embeddings are resampled."""
    embed: Any = getattr(model, "patch_embed", None)
    resize = getattr(model, "set_input_size", None)
    patch = getattr(embed, "patch_size", None)
    if patch and any(side % one for side, one in zip(size, patch, strict=True)):
        raise DataError(f"an image size of {size[0]} x {size[1]} is no multiple of the patch size {patch[0]}")
    if callable(resize) and tuple(embed.img_size) != tuple(size):
        resize(img_size=tuple(size))


def show_dense(content: dict[str, Any], rows: list[Row]) -> None:
    """One table of scores, and one of differences and closeness where models are compared."""
    names = list(rows[0].estimates(rows[0])) if content["labelled"] else []
    title = f"{content['task']}, {content['data']['images']} images, 95 % intervals over images"
    if names:
        columns = ["model", "params", *(_title(name) for name in names)]
        show_table(title, columns, [_cells(row, rows[0], names) for row in rows])
    if len(rows) > 1:
        extra = [name for name in rows[1].estimates(rows[0]) if name not in names]
        columns = ["model", "params", *(_title(name) for name in extra)]
        show_table("compared with the dense model", columns, [_cells(row, rows[0], extra) for row in rows[1:]])


def _title(name: str) -> str:
    base, _, of = name.partition("_difference") if "_difference" in name else name.partition("_to_dense")
    title = TITLES.get(base, base.replace("delta", "δ")) + (" %" if base in PERCENT else "")
    return title + (" − dense" if "_difference" in name else " with its maps" if "_to_dense" in name else of)


def _cells(row: Row, first: Row, names: list[str]) -> list[str]:
    found = row.estimates(first)
    cells = [
        f"{found[name].interval().map(lambda end: 100 * end):.1f}" if name.split("_diff")[0].split("_to_")[0] in PERCENT
        else f"{found[name].interval():.4f}"
        for name in names
    ]  # fmt: skip
    return [row.name, f"{count_params(_pruned_part(row.model)) / 1e6:.3f} M", *cells]
