"""Deployment data: a second sample, of the data that the model will see in use, on which a plan is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from corp.calibration.settings import Settings
from corp.calibration.statistics import Statistics
from corp.cli.arguments import Deployment, Source
from corp.cli.console import Console, note, progress, show_table
from corp.cli.inputs import calibrated
from corp.errors import warn
from corp.evaluate.shift import COLUMNS, Shift, measure_shift
from corp.planning.plan import Plan
from corp.sites import Sites


@dataclass
class DeploymentWatch(Console):
    """Shows a run, collects the statistics of its deployment data, and mixes them in if --mix-deploy is given."""

    source: Source
    dense: nn.Module
    deployment: Deployment
    settings: Settings
    tell: Callable[[Sites], Iterable[str]] | None = None  # makes lines to print once the model's sites are known
    sites: Sites | None = None
    stats: Statistics = field(default_factory=Statistics)
    seen: Statistics | None = None

    def __post_init__(self) -> None:
        super().__init__()

    def found(self, sites: Sites) -> None:
        self.sites = sites
        for line in self.tell(sites) if self.tell is not None else ():
            note(line)

    def calibrated(self, stats: Statistics) -> Statistics:
        self.stats = stats
        if self.deployment.deploy_data:
            there = replace(self.source, calib=self.deployment.deploy_data, own_texts=0)
            self.seen = calibrated(there, settings=self.settings, model=self.dense)[1]
            self.stats = stats + self.seen if self.deployment.mix_deploy else stats
        return self.stats

    def measured(self, plan: Plan) -> Shift | None:
        """The shift between the two samples, with a warning if it is large; None without deployment data."""
        if self.seen is None:
            return None
        with progress("comparing with deployment", len(plan.sites), "sites") as advance:
            shift = measure_shift(self.dense, self.stats, self.seen, plan, progress=advance)
        if (message := shift.warning()) is not None:
            warn(message)
        return shift


def show_shift(shift: Shift | None) -> None:
    if shift is not None:
        show_table("calibration against deployment", COLUMNS, [site.row() for site in shift.sites])


def content_of(shift: Shift | None) -> dict[str, Any]:
    return {} if shift is None else {"shift": shift.to_dict()}
