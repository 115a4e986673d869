"""corp merge: add statistics that were made on machines that never met."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corp.calibration import statistics
from corp.cli.console import command, note
from corp.errors import StatisticsError
from corp.files import refuse_existing


@command
def merge(
    parts: Annotated[list[Path], typer.Argument(help="Folders of statistics of the same model.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it must not exist.")],
) -> None:
    """Add the statistics of several folders into one."""
    refuse_existing(out, overwrite=False)
    if len(parts) < 2:
        raise StatisticsError("merging takes at least two folders of statistics")
    whole = statistics.merge(parts, out)
    note(f"statistics of {whole.samples} samples at {len(whole.sums)} sites in {out}")
