"""corp calibrate: one data pass into a folder that serves every later decision."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from corp.cli import arguments as a
from corp.cli import early
from corp.cli.console import command, note, show_json
from corp.cli.expand import expanded


@command
@expanded(first=("calib", "out", "samples", "weights"))
def calibrate(
    source: a.Source,
    collection: a.Collection,
    out: Annotated[Path, a.option("Folder of statistics to write; it must not exist.", a.OUTPUT, "--out", "-o")],
    offload: Annotated[
        Literal["cpu", "disk"] | None,
        a.option("Keep the weights on the CPU or on disk; each layer moves to the device when it runs.", a.MACHINE),
    ] = None,
    checkpoint_every: Annotated[float, a.option("Seconds between checkpoints.", a.OUTPUT, min=0.0)] = 120.0,
    fresh: Annotated[
        bool, a.option("Start over instead of continuing an interrupted run.", a.OUTPUT, "--fresh")
    ] = False,
    json: a.Json = False,
) -> None:
    """Collect the statistics of MODEL over the images or texts of --calib.

    To continue an interrupted run, start the same command again. To share the work between processes:
    torchrun --nproc-per-node 4 -m corp calibrate ...
    """
    early.require_source(source)
    early.require_output(out, overwrite=False)
    from corp.calibration import workers
    from corp.cli import inputs
    from corp.cli.models import chosen_device

    settings = collection.settings(
        checkpoint_seconds=checkpoint_every, fresh=fresh, offload=offload, device=chosen_device(source.device)
    )
    fits = offload is None  # the model writes no texts while its weights are on the host
    with workers.launched() as group:
        _, stats = inputs.calibrated(source, settings=settings, out=out, quiet=group.rank > 0, fits=fits)
        if group.rank > 0:
            return
    if json:
        show_json({"output": str(out), "samples": stats.samples, "sites": len(stats.sums), "origin": stats.origin})
    else:
        weights = "" if source.weights is None else f" --weights {source.weights}"
        note(f"saved the statistics of {stats.samples} samples at {len(stats.sums)} sites to {out}")
        note(f"next: corp prune {source.model}{weights} --stats {out} --target-macs 0.6 -o small/")
