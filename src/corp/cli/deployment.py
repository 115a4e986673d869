"""The options of deployment data: a second sample, of what the model will see, against which a plan is held."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from corp.calibration.job import Settings
from corp.calibration.statistics import Statistics
from corp.cli.console import progress, show_table
from corp.cli.options import Source, calibrated
from corp.errors import CorpWarning, DataError
from corp.evaluate.shift import measure_shift
from corp.evaluate.shift_result import COLUMNS, Shift
from corp.planning.plan import Plan

DeployData = Annotated[
    list[Path] | None,
    typer.Option(
        help="Unlabelled data as the model will see it: report per site how it differs from --calib, and what of it."
    ),
]
MixDeploy = Annotated[
    bool, typer.Option("--mix-deploy", help="Calibrate on --calib and --deploy-data together, and report what is left.")
]


def check(data: list[Path] | None, mix: bool) -> None:
    """Before the model is loaded and calibration begins."""
    if mix and not data:
        raise DataError("--mix-deploy mixes --deploy-data in; give it")
    if missing := [path for path in data or [] if not path.exists()]:
        raise DataError(f"--deploy-data {missing[0]} is not there")


def statistics(source: Source, data: list[Path] | None, model: nn.Module, settings: Settings) -> Statistics | None:
    """Of the deployment data, as much of it as of the calibration data."""
    if not data:
        return None
    there = replace(source, calib=data)
    return calibrated(there, settings=settings, model=model)[1]


def measured(model: nn.Module, stats: Statistics, deployment: Statistics | None, plan: Plan) -> Shift | None:
    """The shift, and a warning where it matters."""
    if deployment is None:
        return None
    with progress("comparing with deployment", len(plan.sites), "sites") as advance:
        shift = measure_shift(model, stats, deployment, plan, progress=advance)
    if (message := shift.warning()) is not None:
        warnings.warn(message, CorpWarning, stacklevel=2)
    return shift


def show(shift: Shift | None) -> None:
    if shift is not None:
        show_table("calibration against deployment", COLUMNS, [site.row() for site in shift.sites])


def content(shift: Shift | None) -> dict[str, Any]:
    return {} if shift is None else {"shift": shift.to_dict()}
