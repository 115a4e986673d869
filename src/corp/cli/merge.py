"""corp merge: adds statistics from machines without a connection."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corp.cli import arguments as a
from corp.cli import early
from corp.cli.console import command, note, progress
from corp.errors import StatisticsError


@command
def merge(
    parts: Annotated[list[Path], typer.Argument(help="Folders of statistics of the same model.")], out: a.OutFolder
) -> None:
    """Add the statistics of several folders into one."""
    from corp.calibration import statistics

    early.require_output(out, overwrite=False)
    if len(parts) < 2:
        raise StatisticsError("merging takes at least two folders of statistics: corp merge ONE TWO -o OUT")
    with progress(f"merging {len(parts)} folders", None, ""):
        whole = statistics.merge(parts, out)
    note(f"saved the statistics of {whole.samples} samples at {len(whole.sums)} sites to {out}")
