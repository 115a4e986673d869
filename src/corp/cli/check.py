"""corp check: does a saved model do what its plan says, on data of yours?"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from corp.cli import options as o
from corp.cli.console import command, note, progress, show_json, show_table
from corp.cli.sources import calibration_batches
from corp.errors import ModelError
from corp.evaluate import check as checking
from corp.storage import folder as storage


@command
def check(
    folder: Annotated[Path, typer.Argument(help="A folder that corp prune or corp.save wrote.", show_default=False)],
    calib: o.Calib,
    dense: Annotated[
        str | None, typer.Option(help="The dense model.", show_default="the one on record in the folder")
    ] = None,
    weights: o.Weights = None,
    samples: Annotated[int, typer.Option(help="How many images or sequences to feed, drawn by --seed.", min=1)] = 32,
    batch_size: o.MaybeBatchSize = None,
    text_field: o.TextField = "text",
    seq_len: o.SeqLen = None,
    pack: o.Pack = None,
    tokenizer: o.Tokenizer = None,
    device: o.Device = "auto",
    seed: o.Seed = 0,
    max_bad: o.MaxBad = 0.05,
    json: o.Json = False,
) -> None:
    """Feed every pruned MLP and attention of FOLDER what the dense model feeds it, and compare with what must come out.

    The expected errors follow from the saved weights and from sums over the same data; the measured ones from running
    the narrowed modules. A disagreement is an error.
    """
    manifest = storage.read_manifest(folder)
    known = (manifest.get("calibration") or {}).get("model")
    name = dense or known
    if not isinstance(name, str):
        raise ModelError(f"{folder} does not say which model was pruned; give it with --dense")
    pruned = storage.load(folder)
    dtype = str(next(pruned.parameters()).dtype).removeprefix("torch.")
    text = o.TextOptions(text_field, seq_len, pack, tokenizer)
    source = o.Source(name, weights, calib, samples, batch_size, device, dtype, seed, max_bad, text)
    original = o.place(o.load_model(name, weights), device, dtype)
    pruned = pruned.to(next(original.parameters()).device)
    plan = storage.read_plans(folder, manifest)[-1]
    batches = list(islice(calibration_batches(original, source), samples))
    with progress("feeding", len(plan.sites), "sites", quiet=json) as advance:
        checked = checking.check(original, pruned, plan, batches, progress=advance)
    if json:
        show_json({"folder": str(folder), "sites": [one.to_dict() for one in checked]})
    else:
        rows = [
            (c.finding.site, c.finding.kind, f"{c.planned:.3%}", f"{c.expected:.3%}", f"{c.measured:.3%}")
            for c in checked
        ]
        show_table(f"{folder}: errors of sites", ("site", "kind", "planned", "expected here", "measured"), rows)
    checking.require_equal(checked)
    note(f"{len(checked)} sites do what their weights say")
