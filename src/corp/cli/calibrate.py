"""corp calibrate: the data pass, once, into a folder that serves every later decision."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corp.calibration import workers
from corp.cli import options as o
from corp.cli.console import command, note, show_json
from corp.files import refuse_existing


@command
def calibrate(
    model: o.ModelArg,
    calib: o.Calib,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of statistics to write; it must not exist.")],
    weights: o.Weights = None,
    samples: o.MaybeSamples = None,
    tokens: o.Tokens = "auto",
    text_field: o.TextField = "text",
    seq_len: o.SeqLen = None,
    pack: o.Pack = None,
    tokenizer: o.Tokenizer = None,
    memory: o.Memory = None,
    offload: o.Offload = None,
    batch_size: o.MaybeBatchSize = None,
    device: o.Device = "auto",
    dtype: o.Dtype = "auto",
    seed: o.Seed = 0,
    max_bad: o.MaxBad = 0.05,
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between checkpoints.", min=0.0)] = 120.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing a killed run.")] = False,
    json: o.Json = False,
) -> None:
    """Collect the statistics of MODEL over the images of --calib.

    A killed run continues when started again with the same command. Several processes share the work under
    torchrun: torchrun --nproc-per-node 4 -m corp calibrate ...
    """
    refuse_existing(out, overwrite=False)
    settings = o.make_settings(tokens, memory, checkpoint_every, fresh, offload, device)
    text = o.TextOptions(text_field, seq_len, pack, tokenizer)
    source = o.Source(model, weights, calib, samples, batch_size, device, dtype, seed, max_bad, text)
    with workers.launched() as group:
        _, stats = o.calibrated(source, settings=settings, out=out, quiet=group.rank > 0)
        if group.rank > 0:
            return
    if json:
        show_json({"output": str(out), "samples": stats.samples, "sites": len(stats.sums), "origin": stats.origin})
    else:
        note(f"statistics of {stats.samples} samples at {len(stats.sums)} sites in {out}")
