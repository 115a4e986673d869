"""Checks that need neither torch nor the model, so that a mistyped name or path is reported within two seconds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from corp.adapters.near_names import beside, did_you_mean
from corp.cli.arguments import Deployment, Source
from corp.errors import DataError
from corp.io.files import refuse_existing


def require_source(source: Source, stats: Path | None = None) -> None:
    """Refuse a model, weights or data that are missing; `stats` of an earlier calibration replace the data."""
    for given, flag in ((source.calib, "--calib"), (source.samples, "--samples")):
        if given and stats is not None:
            raise DataError(f"--stats replaces the data: leave out either --stats or {flag}")
    if not source.calib and stats is None:
        raise DataError("no calibration data: give images or texts with --calib, or statistics with --stats")
    require_model(source.model, source.weights)
    require_paths("--calib", source.calib)


def require_model(name: str, weights: Path | None = None, *, pretrained: bool = True) -> None:
    """Refuse a model or a weights file that does not exist; without a file, pretrained weights must be reachable."""
    from corp.adapters import hub, timm_names

    if weights is not None:
        timm_names.require_weights_file(weights)
    if name.startswith("hf:"):
        hub.require_known(name.removeprefix("hf:"))
    elif not Path(name).exists():
        timm_names.require_known(name)
        if weights is None and pretrained:
            stem = name.partition(".")[0]
            hub.require_weights(name, hub.any_cached(stem) or not timm_names.on_hub(name))


def require_paths(flag: str, paths: list[Path]) -> None:
    """Refuse data that does not exist."""
    if missing := [path for path in paths if not path.exists()]:
        raise DataError(f"{flag} {missing[0]} does not exist{did_you_mean(beside(missing[0]))}")


def require_deployment(options: Deployment) -> None:
    """Refuse deployment data that is missing."""
    if options.mix_deploy and not options.deploy_data:
        raise DataError("--mix-deploy needs the data to mix in: give it with --deploy-data")
    require_paths("--deploy-data", options.deploy_data)


def require_output(out: Path, *, overwrite: bool) -> None:
    """Refuse an output that exists, and one on a disk that is full, before the long work."""
    refuse_existing(out, overwrite=overwrite)
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise DataError(f"{out} cannot be written: {there} is a file, not a folder; name another place with -o")
    if not os.access(there, os.W_OK):
        raise DataError(f"{out} cannot be written: permission denied in {there}; name another place with -o")
    space = shutil.disk_usage(there)
    if not space.total:  # /proc and similar
        raise DataError(f"{out} cannot be written: {there} holds no files; name another place with -o")
    if (free := space.free) < 1 << 20:
        raise DataError(
            f"the disk of {out} is full ({free} bytes are free): free some space, or write elsewhere with -o"
        )


def require_output_file(out: Path, *, overwrite: bool) -> None:
    """Refuse an output file that exists or is a folder."""
    if out.is_dir():
        raise DataError(f"{out} is a folder; name a file with -o")
    if out.exists() and not overwrite:
        raise DataError(f"{out} exists; choose another output with -o, or give --overwrite")
