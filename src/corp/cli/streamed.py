"""corp prune --stream: a model in a folder, pruned with one block of it in memory."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corp.cli.console import Console, note, show_json
from corp.errors import DataError, ModelError
from corp.recipe import Recipe

if TYPE_CHECKING:
    from corp.calibration.settings import Settings
    from corp.cli.arguments import Source
    from corp.planning.report import Report
    from corp.storage.streamed.presence import Presence


def require_alone(given: Mapping[str, Any]) -> None:
    """Refuse options that want the whole model, or its statistics."""
    if odd := [flag for flag, value in given.items() if value]:
        raise DataError(f"--stream holds one block at a time, so it cannot be combined with {odd[0]}")


def prune_streamed(
    source: Source, recipe: Recipe, settings: Settings, out: Path | None, show: Callable[[Report], None] | None
) -> None:
    """Prune block by block into `out`; without it, only say how much memory that takes. Without `show`, as JSON."""
    from corp.cli import inputs
    from corp.cli.models import companion_places, lacking_companions
    from corp.io.observer import SILENT
    from corp.steps.run import Run
    from corp.storage.streamed.prune import estimate_opened, prune_opened

    opened = _opened(source)
    batches = inputs.batches_of(opened.model, source)
    if out is None:
        need = estimate_opened(opened, Run(batches, None, settings, None, SILENT), recipe)
        show_json({**need._asdict(), "memory": need.total}) if show is None else note(need.line())
        return
    line = shlex.join(["corp", *sys.argv[1:]])
    places = companion_places(source.model, opened.model, source.text.tokenizer)
    origin = inputs.origin_of(source, opened.model, batches)
    run = Run(batches, None, settings, origin, Console())
    report = prune_opened(opened, run, recipe, out, command=line, companions=places)
    inputs.tell_skipped(batches)
    if lacking := lacking_companions(opened.model, out):
        note(lacking)
    if show is None:
        show_json({"output": str(out), **report.to_dict()})
        return
    show(report)
    note(f"saved to {out}, load it with corp.load({str(out)!r})")


def _opened(source: Source) -> Presence:
    from corp.cli.models import DTYPES, HF, chosen_device
    from corp.storage.streamed.presence import open_folder

    if source.weights is not None:
        raise ModelError("--stream reads the weights beside the config in the model's folder: leave --weights out")
    dtype = None if source.dtype == "auto" else DTYPES[source.dtype]
    return open_folder(source.model.removeprefix(HF), device=chosen_device(source.device), dtype=dtype)
