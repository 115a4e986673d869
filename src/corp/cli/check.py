"""corp check: compares a saved model with its plan, on your own data."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from corp.cli import arguments as a
from corp.cli import early
from corp.cli.console import command, note, progress, show_json, show_table
from corp.cli.expand import expanded
from corp.errors import DataError, ModelError

if TYPE_CHECKING:
    from corp.evaluate.check import Checked


@command
@expanded(first=("calib", "samples", "model", "weights"), without=("dtype",))
def check(
    folder: a.PrunedFolder,
    source: a.Source,
    model: Annotated[
        str | None, a.option("The dense model.", a.DATA, "--dense", show_default="the one on record in the folder")
    ] = None,
    samples: Annotated[int, a.option("How many images or sequences to feed, drawn by --seed.", a.DATA, min=1)] = 32,
    json: a.Json = False,
) -> None:
    """Compare the error of every pruned MLP and attention in FOLDER with the error that its weights predict.

    Every site gets the dense model's inputs. The expected error follows from the saved weights and from sums over the
    same data; the measured one comes from running the pruned modules. A difference is an error.
    """
    from corp.cli import inputs
    from corp.evaluate import check as checking
    from corp.storage import folder as storage

    if not source.calib:
        raise DataError("no data: give images or texts with --calib")
    early.require_paths("--calib", source.calib)
    manifest = storage.read_manifest(folder)
    name = model or (manifest.get("calibration") or {}).get("model")
    if not isinstance(name, str):
        raise ModelError(f"{folder} does not say which model was pruned; give it with --dense")
    pruned = storage.load(folder)
    dtype = str(next(pruned.parameters()).dtype).removeprefix("torch.")
    original = inputs.opened(dense := replace(source, model=name, dtype=dtype))  # type: ignore[arg-type]
    pruned = pruned.to(next(original.parameters()).device)
    plan = storage.read_plans(folder, manifest)[-1]
    batches = list(islice(inputs.batches_of(original, dense), samples))
    with progress("feeding", len(plan.sites), "sites", quiet=json) as advance:
        checked = checking.check(original, pruned, plan, batches, progress=advance)
    if json:
        show_json({"folder": str(folder), "sites": [one.to_dict() for one in checked]})
    else:
        columns = ("site", "kind", "planned", "expected here", "measured")
        show_table(f"{folder}: errors of sites", columns, [_row(one) for one in checked])
    checking.require_equal(checked)
    note(f"all {len(checked)} sites compute what their weights predict")


def _row(one: Checked) -> tuple[str, ...]:
    errors = (f"{error:.3%}" for error in (one.planned, one.expected, one.measured))
    return one.finding.site, one.finding.kind, *errors
