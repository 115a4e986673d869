"""corp merge: add statistics that were made on machines that never met."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corp.atomic import new_folder, refuse_existing
from corp.cli.console import command, note
from corp.errors import StatisticsError
from corp.stats.site_sums import added
from corp.stats.statistics import Statistics, merged_header, write_manifest, write_site


@command
def merge(
    parts: Annotated[list[Path], typer.Argument(help="Folders of statistics of the same model.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it must not exist.")],
) -> None:
    """Add the statistics of several folders into one."""
    refuse_existing(out, overwrite=False)
    if len(parts) < 2:
        raise StatisticsError("merging takes at least two folders of statistics")
    opened = [Statistics.load(part) for part in parts]
    header = opened[0]
    for other in opened[1:]:
        if any(part in _sources(header) for part in _sources(other)):
            raise StatisticsError("two of these statistics come from the same data; it would be counted twice")
        header = Statistics(header.sums, **merged_header(header, other))
    with new_folder(out) as folder:
        entries = {}
        for number, name in enumerate(header.sums):  # one site in memory at a time
            sums = opened[0].sums[name]
            for other in opened[1:]:
                sums = added(sums, other.sums[name])
            entries[name] = write_site(folder, number, sums)
        write_manifest(folder, header, entries)
    note(f"statistics of {header.samples} samples at {len(entries)} sites in {out}")


def _sources(stats: Statistics) -> list[str]:
    """Fingerprints of the data that went in."""
    parts = stats.origin.get("parts", [stats.origin])
    return [part["data fingerprint"] for part in parts if "data fingerprint" in part]
