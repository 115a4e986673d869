"""corp calibrate: the data pass, once, into a folder that serves every later decision."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from corp.cli import arguments as a
from corp.cli.console import command, note, show_json
from corp.cli.expand import expanded


@command
@expanded(first=("calib", "out", "samples", "weights"))
def calibrate(
    source: a.Source,
    collection: a.Collection,
    out: Annotated[
        Path, a.option("Folder of statistics to write; it must not exist.", a.OUTPUT, "--out", "-o", show_default=False)
    ],
    offload: Annotated[
        Literal["cpu", "disk"] | None,
        a.option("Keep the weights there; each layer visits the device when it runs.", a.MACHINE),
    ] = None,
    checkpoint_every: Annotated[float, a.option("Seconds between checkpoints.", a.OUTPUT, min=0.0)] = 120.0,
    fresh: Annotated[bool, a.option("Start over instead of continuing a killed run.", a.OUTPUT, "--fresh")] = False,
    json: a.Json = False,
) -> None:
    """Collect the statistics of MODEL over the images or texts of --calib.

    A killed run continues when the same command is started again. Several processes share the work under
    torchrun: torchrun --nproc-per-node 4 -m corp calibrate ...
    """
    a.require_model(source.model)
    from corp.calibration import workers
    from corp.cli import inputs
    from corp.cli.models import chosen_device

    inputs.require_output(out, overwrite=False)
    settings = collection.settings(
        checkpoint_seconds=checkpoint_every, fresh=fresh, offload=offload, device=chosen_device(source.device)
    )
    with workers.launched() as group:
        _, stats = inputs.calibrated(source, settings=settings, out=out, quiet=group.rank > 0)
        if group.rank > 0:
            return
    if json:
        show_json({"output": str(out), "samples": stats.samples, "sites": len(stats.sums), "origin": stats.origin})
    else:
        note(
            f"statistics of {stats.samples} samples at {len(stats.sums)} sites are in {out}; "
            f"use them with corp prune {source.model} --stats {out}"
        )
