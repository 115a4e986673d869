"""corp eval on maps: segmentation and depth, against label maps and against the dense model's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from corp.calibration.batches import Forward, placement
from corp.cli.arguments import Source
from corp.cli.console import note, progress, show_table
from corp.cli.evaluation import AWAY, CLOSE, PERCENT, Evaluated, Evaluation, ModelScores, base_name
from corp.cli.models import preprocessing_of
from corp.data.dense import DensePairs, WholeImage, find_pairs, match_maps
from corp.data.images import ImageBatches, choose, list_images
from corp.errors import DataError, ModelError
from corp.evaluate.dense import MapScore
from corp.evaluate.heads import IGNORE, HeadInfo, OwnMaps, WithHead, load_head, task_of
from corp.evaluate.run import Contender, side_by_side
from corp.measure.cost import count_params

TITLES = {"miou": "mIoU", "pixel_accuracy": "pixel acc.", "rmse": "RMSE", "abs_rel": "abs. rel."}
BATCH = 8  # images of dense tasks are large


def evaluate_dense(loaded: dict[str, nn.Module], asked: Evaluation) -> Evaluated:
    """Measure the models' maps; the others are compared with the first model."""
    name, model = next(iter(loaded.items()))
    head, info = load_head(asked.head) if asked.head else (None, None)
    task = _task(loaded, info, asked.task)
    transform = whole_image(name, model, asked.image_size, info.image_size if info else None)
    ignore = asked.ignore if asked.ignore is not None else info.ignore if info else ignored_by(model)
    contenders = []
    for one in loaded.values():
        sized(one, transform.size)
        maps = OwnMaps(one) if head is None or info is None else WithHead(one, head, info.blocks).to(*placement(one))
        contenders.append(Contender(maps, MapScore(task, ignore)))
    batches = _batches(asked, transform, compared=len(loaded) > 1)
    reference = contenders[0].model if len(loaded) > 1 else None
    with progress(f"evaluating on {placement(model)[0]}", batches.samples, "images") as advance:
        side_by_side(reference, contenders, batches, advance)
    rows = _rows(loaded, [contender.metric for contender in contenders])
    content = {
        "task": task,
        "head": asked.head and str(asked.head),
        "data": {"folders": [str(folder) for folder in asked.data], "images": batches.samples},
        "image_size": list(transform.size),
        "labelled": bool(rows[0].numbers),
        "dense": name if len(rows) > 1 else None,
        "models": [row.to_dict() for row in rows],
    }
    return content, partial(show_dense, content, rows)


def _task(loaded: dict[str, nn.Module], info: HeadInfo | None, wanted: str | None) -> str:
    """The one task of all models, or of the head."""
    tasks = {info.task if info else task_of(model) for model in loaded.values()}
    task = next(iter(tasks))
    if task is None or len(tasks) > 1:
        raise ModelError(
            f"{', '.join(loaded)} cannot predict maps without a head, or predict different kinds of maps; fit a "
            f"head with corp probe, and give it with --head"
        )
    if wanted not in (None, task):
        raise ModelError(f"--task {wanted} does not match the model and head, which predict {task}")
    return task


def _rows(loaded: dict[str, nn.Module], metrics: list[Any]) -> list[ModelScores]:
    """The scores; for all but the first, also the difference from its scores and the closeness to its maps."""
    truths = [score.truth.estimates() if score.truth else {} for score in metrics]
    rows = []
    for i, ((name, model), truth, score) in enumerate(zip(loaded.items(), truths, metrics, strict=True)):
        found = dict(truth)
        if i and score.likeness:
            found |= {f"{key}{AWAY}": one - truths[0][key] for key, one in truth.items()}
            found |= {f"{key}{CLOSE}": one for key, one in score.likeness.estimates().items()}
        rows.append(ModelScores(name, count_params(model), {key: one.interval() for key, one in found.items()}))
    return rows


def ignored_by(model: nn.Module) -> int:
    """The label that a whole model of transformers ignores, by its config."""
    ignore = getattr(getattr(model, "config", None), "semantic_loss_ignore_index", IGNORE)
    return int(ignore) if isinstance(ignore, int) else IGNORE


def _batches(asked: Evaluation, transform: WholeImage, *, compared: bool) -> DensePairs | ImageBatches:
    """Images with their maps; images alone if there are no maps but another model to compare with."""
    size = asked.batch_size or BATCH
    found = {path: place for folder in asked.data for path, place in match_maps(folder)}
    chosen = choose(list(found), asked.samples, asked.seed)
    if asked.labels == "none" or not any(found.values()):
        if not compared:
            raise DataError(
                f"nothing to measure: no image in {asked.data[0]} has a map, and there is no second model; "
                "give images with maps (images/ + labels/, or X/ + Xannot/), or a second model"
            )
        note("no label maps: the models are compared with the dense model's own maps only")
        return ImageBatches(chosen, transform, batch_size=size, max_bad=asked.max_bad)
    pairs = {path: place for folder in asked.data for path, place in find_pairs(folder)}
    return DensePairs([(path, pairs[path]) for path in chosen], transform, batch_size=size, scale=asked.depth_scale)


def whole_image(name: str, model: nn.Module, given: str | None, known: tuple[int, int] | None) -> WholeImage:
    """The preprocessing of dense tasks: --image-size, otherwise the head's size, otherwise the model's; no crop."""
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
    """Make a timm model accept images of this size; its position embeddings are resampled."""
    require_patches(model, size)
    embed: Any = getattr(model, "patch_embed", None)
    resize = getattr(model, "set_input_size", None)
    if callable(resize) and tuple(embed.img_size) != tuple(size):
        resize(img_size=tuple(size))


def require_patches(model: nn.Module, size: tuple[int, ...]) -> None:
    """Refuse an image size that is not a multiple of the patches."""
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if patch and any(side % one for side, one in zip(size, patch, strict=True)):
        raise DataError(f"an image size of {size[0]} x {size[1]} is not a multiple of the patch size {patch[0]}")


def used_with(
    source: Source, model: nn.Module, head: Path | None, image_size: str | None
) -> tuple[ImageBatches, Forward | None]:
    """Calibration images at the size in use, and the function that runs the backbone under its head."""
    found, info = load_head(head) if head else (None, None)
    transform = whole_image(source.model, model, image_size, info.image_size if info else None)
    require_patches(model, transform.size)
    if found is not None and info is not None:
        WithHead(model, found, info.blocks)  # refuses a head of another width, before the data is read

    def forward(backbone: nn.Module, images: Tensor) -> Tensor:
        assert found is not None
        assert info is not None
        place = placement(backbone)
        maps: Tensor = WithHead(backbone, found.to(*place), info.blocks)(images.to(*place))
        return maps

    chosen = choose(list_images(source.calib), source.samples or source.images, source.seed)
    batches = ImageBatches(chosen, transform, batch_size=source.batch_size or BATCH, max_bad=source.max_bad)
    return batches, None if found is None else forward


def show_dense(content: dict[str, Any], rows: list[ModelScores]) -> None:
    """Print a table of scores, and one of differences and closeness if models are compared."""
    title = f"{content['task']}, {content['data']['images']} images, 95 % intervals over images"
    names = list(rows[0].numbers)
    if names:
        _show(title, rows, names)
    if len(rows) > 1:
        _show("compared with the dense model", rows[1:], [name for name in rows[1].numbers if name not in names])


def _show(title: str, rows: list[ModelScores], names: list[str]) -> None:
    show_table(title, ["model", "params", *map(_title, names)], [row.cells(names) for row in rows])


def _title(name: str) -> str:
    base = base_name(name)
    title = TITLES.get(base, base.replace("delta", "δ")) + (" %" if base in PERCENT else "")
    return title + (" − dense" if name.endswith(AWAY) else " with its maps" if name.endswith(CLOSE) else "")
