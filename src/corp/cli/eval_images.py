"""corp eval on images: accuracy where there are labels, agreement with the dense model and features."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from corp.calibration.batches import placement
from corp.cli.console import note, progress, show_table
from corp.cli.models import classes_of, preprocessing_of
from corp.errors import DataError, ModelError
from corp.evaluate.classify import Score
from corp.evaluate.features import FINAL, Features
from corp.evaluate.run import Contender, side_by_side
from corp.measure.cost import count_params
from corp.measure.intervals import Interval

if TYPE_CHECKING:
    from corp.data.images import ImageBatches

ALONE, COMPARED = ("top1", "top5"), ("top1_difference", "agreement", "kl")
COLUMNS = ("model", "params", "top-1 %", "top-5 %", "top-1 − dense", "agreement %", "KL from dense")


@dataclass
class Row:
    """A model, under the name it was given, and what is measured of it."""

    name: str
    model: nn.Module
    score: Score | None
    features: Features | None

    def measured(self) -> dict[str, Interval | None]:
        """The numbers; of the dense model itself only its accuracy: that it agrees with itself is no news."""
        intervals = self.score.intervals() if self.score else {}
        known = ALONE if self.features is None else (*ALONE, *COMPARED)
        return {name: intervals.get(name) if name in known else None for name in (*ALONE, *COMPARED)}

    def to_dict(self) -> dict[str, Any]:
        numbers = {name: interval and interval.to_dict() for name, interval in self.measured().items()}
        parts = self.features.parts if self.features else {}
        likeness = {part: {"cosine": x.cosine, "relative_error": x.relative_error} for part, x in parts.items()}
        final, unlike = likeness.pop(FINAL, None), self.features.unlike if self.features else {}
        features = {"final": final, "blocks": likeness, "not_compared": unlike} if self.features else None
        return {"model": self.name, "params": count_params(self.model), **numbers, "features": features}


def evaluate_images(
    loaded: dict[str, nn.Module],
    data: list[Path],
    labels: str | None,
    samples: int | None,
    batch_size: int | None,
    seed: int,
    max_bad: float,
) -> tuple[dict[str, Any], list[Row]]:
    """What --json prints, and the rows of the table; the first model is the one to compare with."""
    from corp.data.images import ImageBatches, choose, list_images
    from corp.data.labels import LabelledBatches

    paths = choose(list_images(data), samples, seed)
    rows = _rows(loaded)
    reference = rows[0] if len(rows) > 1 else None
    found = find_labels(labels, data, rows[0].name, rows[0].model)
    if found is None and reference is None:
        raise DataError(
            f"nothing to measure: {rows[0].name} has neither labels nor another model to go by; give --dense"
        )
    images = ImageBatches(paths, _preprocessing(rows), batch_size=batch_size or 32, max_bad=max_bad)
    _measure(rows, reference, images if found is None else LabelledBatches(images, found), images)
    content = {
        "data": {"folders": [str(folder) for folder in data], "images": images.samples - len(images.bad)},
        "seed": seed,
        "labelled": found is not None,
        "dense": reference and reference.name,
        "models": [row.to_dict() for row in rows],
    }
    return content, rows


def _rows(loaded: dict[str, nn.Module]) -> list[Row]:
    classes = {name: classes_of(model) for name, model in loaded.items()}
    if len(set(classes.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in classes.items())
        raise ModelError(f"the models do not tell the same number of classes apart ({counts}); evaluate them apart")
    if 0 in classes.values():
        note("without a classifier only features are compared")
    return [
        Row(name, model, None if classes[name] == 0 else Score(), Features() if i else None)
        for i, (name, model) in enumerate(loaded.items())
    ]


def find_labels(labels: str | None, folders: list[Path], name: str, model: nn.Module) -> dict[Path, int] | None:
    """The class of every image, as --labels says or as the folders tell; None where there is nothing to go by."""
    from corp.data import labels as known

    classes = classes_of(model)
    if labels == "none":
        return None
    if labels is not None:
        if classes == 0:
            raise DataError(f"{name} has no classifier, so --labels cannot be used; give --labels none")
        return known.read_labels(Path(labels), folders)
    found = None if classes == 0 else known.find_labels(folders, classes)
    if found is None and classes != 0:
        note(f"no accuracy: no {classes} sub-folders or synset ids name the classes (--labels FILE.csv does)")
    return found


def _preprocessing(rows: list[Row]) -> Any:
    """The one transform of all the models: they share a pass over the data."""
    transforms = [preprocessing_of(row.name, row.model) for row in rows]
    for row, transform in zip(rows, transforms, strict=True):
        if _line(transform) != _line(transforms[0]):
            raise ModelError(
                f"{row.name} wants its images prepared otherwise than {rows[0].name} "
                f"({_line(transform)} against {_line(transforms[0])}); evaluate them apart"
            )
    return transforms[0]


def _line(transform: Any) -> str:
    # A size that went through JSON is a list, otherwise a tuple: the same size.
    return " ".join(str(transform).translate(str.maketrans("[]", "()")).split())


def _measure(rows: list[Row], reference: Row | None, batches: Iterable[Any], images: ImageBatches) -> None:
    contenders = [Contender(row.model, row.score, row.features) for row in rows]
    with progress(f"evaluating on {placement(rows[0].model)[0]}", images.samples, "images") as advance:
        side_by_side(reference.model if reference else None, contenders, batches, advance)
    for path, reason in images.bad:
        note(f"skipped {path}: {reason}")
    for row in rows:
        if row.features and row.features.unlike:
            part, reason = next(iter(row.features.unlike.items()))
            note(f"{row.name}: {len(row.features.unlike)} part(s) cannot be compared, such as {part}: {reason}")


def show_images(content: dict[str, Any], rows: list[Row]) -> None:
    show_table(f"{content['data']['images']} images, 95 % intervals", COLUMNS, [_cells(row) for row in rows])
    compared = [row for row in rows if row.features and row.features.parts]
    if compared:
        parts = list(dict.fromkeys(part for row in compared if row.features for part in row.features.ordered()))
        lines = [[part, *(_likeness(row, part) for row in compared)] for part in parts]
        show_table("features against dense: cosine / relative error", ["output of", *(r.name for r in compared)], lines)


def _cells(row: Row) -> list[str]:
    *shares, kl = row.measured().values()
    return [row.name, f"{count_params(row.model) / 1e6:.3f} M", *map(percent, shares), plus_minus(kl)]


def percent(interval: Interval | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return "–"
    return f"{100 * interval.value:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def plus_minus(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    return f"{interval.value:.4f}" + ("" if interval.high is None else f" ± {interval.high - interval.value:.4f}")


def _likeness(row: Row, part: str) -> str:
    likeness = row.features.parts.get(part) if row.features else None
    return f"{likeness.cosine:.4f} / {likeness.relative_error:.4f}" if likeness else "–"
