"""The data pass of one run, and the recording for the refit that goes with it."""

from __future__ import annotations

from pathlib import Path

from corp.calibration import workers
from corp.calibration.batches import count_samples, evaluating
from corp.calibration.holdout import HeldBatches
from corp.calibration.job import Job
from corp.calibration.settings import Settings
from corp.calibration.statistics import Statistics
from corp.recipe import Recipe
from corp.sites import OutputHead, Site
from corp.steps.run import Dense, Run
from corp.surgery.refit.recording import Recorder
from corp.surgery.refit.replay import Block


def run_calibration(
    dense: Dense,
    run: Run,
    *,
    out: str | Path | None = None,
    held: HeldBatches | None = None,
    recorder: Recorder | None = None,
) -> Statistics:
    output = dense.sites.output
    watched: list[Site | OutputHead] = [*dense.sites, *([output] if output else [])]
    job = Job(
        dense.model,
        watched,
        () if run.batches is None else run.batches,
        run.settings or Settings(),
        dict(run.origin or {}),
        dense.weights,
        run.forward,
        run.observer,
        held,
        workers.current(),
        recorder,
    )
    with evaluating(dense.model):
        return job.run(None if out is None else Path(out))


def recorder_for(dense: Dense, run: Run, recipe: Recipe, blocks: list[Block]) -> Recorder | None:
    """The recorder of the refit's batches during calibration; None if it cannot record, so they must run again."""
    available = count_samples(() if run.batches is None else run.batches)
    elsewhere = run.settings is not None and run.settings.offload is not None
    if not blocks or not available or elsewhere or workers.current().world > 1:
        return None
    return Recorder(dense.model, dense.sites, blocks, recipe, available)
