"""corp eval on images: accuracy if there are labels, agreement with the dense model and features."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from corp.calibration.batches import placement
from corp.cli.console import note, progress, show_table
from corp.cli.evaluation import Evaluated, Evaluation, ModelScores, known_of
from corp.cli.inputs import IMAGE_BATCH, tell_skipped
from corp.cli.models import classes_of, preprocessing_of
from corp.data.images import ImageBatches, choose, list_images
from corp.data.labels import LabelledBatches, find_labels, read_labels
from corp.errors import DataError, ModelError
from corp.evaluate.classify import Score
from corp.evaluate.features import FINAL, Features
from corp.evaluate.run import Contender, side_by_side
from corp.measure.cost import count_params

NUMBERS = ("top1", "top5", "top1_difference", "agreement", "kl")
COLUMNS = ("model", "params", "top-1 %", "top-5 %", "top-1 − dense", "agreement %", "KL from dense")


def evaluate_images(loaded: dict[str, nn.Module], asked: Evaluation) -> Evaluated:
    """Measure the models on the images; the others are compared with the first."""
    contenders = _contenders(loaded)
    (first, dense), *others = loaded.items()
    images, batches = image_batches(loaded, asked)
    labelled = batches is not images
    if not labelled and not others:
        raise DataError(
            f"nothing to measure: there are no labels, and {first} is the only model; give --labels, or another model"
        )
    with progress(f"evaluating on {placement(dense)[0]}", images.samples, "images") as advance:
        side_by_side(dense if others else None, contenders, batches, advance)
    tell_skipped(images)
    rows = [_row(name, contender) for name, contender in zip(loaded, contenders, strict=True)]
    content = {
        "data": {"folders": [str(folder) for folder in asked.data], "images": images.samples - len(images.bad)},
        "seed": asked.seed,
        "labelled": labelled,
        "dense": first if others else None,
        "models": [row.to_dict() for row in rows],
    }
    return content, partial(show_images, content, rows)


def image_batches(
    loaded: dict[str, nn.Module], asked: Evaluation
) -> tuple[ImageBatches, ImageBatches | LabelledBatches]:
    """The preprocessed images, without and with their labels; twice the same if labels are unknown."""
    paths = choose(list_images(asked.data), asked.samples, asked.seed)
    labels = _labels(asked, *next(iter(loaded.items())))
    size = asked.batch_size or IMAGE_BATCH
    images = ImageBatches(paths, _preprocessing(loaded), batch_size=size, max_bad=asked.max_bad)
    return images, images if labels is None else LabelledBatches(images, labels)


def _contenders(loaded: dict[str, nn.Module]) -> list[Contender]:
    """Every model with its metrics; features for all but the first, with which the others are compared."""
    classes = {name: classes_of(model) for name, model in loaded.items()}
    if len(set(classes.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in classes.items())
        raise ModelError(f"the models have different numbers of classes ({counts}); evaluate them separately")
    if 0 in classes.values():
        note("without a classifier only features are compared")
    return [
        Contender(model, None if classes[name] == 0 else Score(), Features() if i else None)
        for i, (name, model) in enumerate(loaded.items())
    ]


def _labels(asked: Evaluation, name: str, model: nn.Module) -> dict[Path, int] | None:
    """The class of every image, from --labels or the names of folders and files; None if they do not show it."""
    classes = classes_of(model)
    if asked.labels == "none":
        return None
    if asked.labels is not None:
        if classes == 0:
            raise DataError(f"{name} has no classifier, so --labels cannot be used; give --labels none")
        return read_labels(Path(asked.labels), asked.data, classes)
    found = None if classes == 0 else find_labels(asked.data, classes)
    if found is None and classes != 0:
        note(
            f"no accuracy without labels: they need {classes} sub-folders or synset ids, one per class, or "
            f"--labels FILE.csv"
        )
    return found


def _preprocessing(loaded: dict[str, nn.Module]) -> Any:
    """The common transform of all models, which share a pass over the data."""
    transforms = {name: preprocessing_of(name, model) for name, model in loaded.items()}
    first = next(iter(loaded))
    for name, transform in transforms.items():
        if _line(transform) != _line(transforms[first]):
            raise ModelError(
                f"{name} preprocesses images differently from {first} "
                f"({_line(transform)} against {_line(transforms[first])}); evaluate them separately"
            )
    return transforms[first]


def _line(transform: Any) -> str:
    # A size that was read from JSON is a list, otherwise it is a tuple.
    return " ".join(str(transform).translate(str.maketrans("[]", "()")).split())


def _row(name: str, contender: Contender) -> ModelScores:
    intervals = contender.metric.intervals() if isinstance(contender.metric, Score) else {}
    numbers = known_of(intervals, NUMBERS, NUMBERS[:2] if contender.features is None else NUMBERS)
    extra: dict[str, Any] = {"features": None}
    if contender.features is not None:
        parts, unlike = contender.features.parts, contender.features.unlike
        likeness = {part: {"cosine": x.cosine, "relative_error": x.relative_error} for part, x in parts.items()}
        extra["features"] = {"final": likeness.pop(FINAL, None), "blocks": likeness, "not_compared": unlike}
        for part, reason in list(unlike.items())[:1]:
            note(f"{name}: {len(unlike)} part(s) cannot be compared, such as {part}: {reason}")
    return ModelScores(name, count_params(contender.model), numbers, extra)


def show_images(content: dict[str, Any], rows: list[ModelScores]) -> None:
    show_table(f"{content['data']['images']} images, 95 % intervals", COLUMNS, [row.cells() for row in rows])
    found = {row.name: row.extra["features"] for row in rows if row.extra["features"]}
    likeness = {name: {FINAL: parts["final"], **parts["blocks"]} for name, parts in found.items()}
    parts = dict.fromkeys(part for known in likeness.values() for part, value in known.items() if value)
    if parts:
        lines = [[part, *(_likeness(known.get(part)) for known in likeness.values())] for part in parts]
        show_table("features against dense: cosine / relative error", ["output of", *likeness], lines)


def _likeness(found: dict[str, float] | None) -> str:
    return f"{found['cosine']:.4f} / {found['relative_error']:.4f}" if found else "–"
