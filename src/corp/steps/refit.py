"""Refit a pruned model, block by block, to the dense model's stream."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from corp.calibration.batches import feed, first_batch
from corp.io.observer import timed
from corp.numerics.place import Place
from corp.recipe import Recipe
from corp.steps.result import Result
from corp.steps.run import Dense, Run
from corp.surgery.apply import history, set_history
from corp.surgery.refit.recording import record_batches, samples_wanted
from corp.surgery.refit.repair import Repair, require_whole
from corp.surgery.refit.replay import Block, Passage


def refit(
    dense: Dense, result: Result, run: Run, recipe: Recipe, blocks: list[Block], passages: list[Passage] | None = None
) -> Result:
    batches, forward, observer = run.batches or (), run.forward, run.observer
    if not passages:
        wanted = min(samples_wanted(recipe, blocks), result.plan.samples)
        with observer.stage("recording for the refit", wanted, "samples") as advance:
            data = dense.model, dense.sites, batches, blocks
            passages = record_batches(*data, recipe, result.plan.samples, forward, advance)
    place = None if run.device is None else Place.on(torch.device(run.device))
    work = Repair(dense.model, copy.deepcopy(result.model), recipe, place, forward)
    with timed("repair"), observer.stage("refitting", len(blocks), "blocks") as advance:
        end = work.run(blocks, passages, advance)
    require_whole(work.smaller, blocks, end, lambda: feed(work.smaller, first_batch(batches), forward))
    samples = sum(passage.samples for passage in passages)
    record = {"samples": samples, "read": {block.name: block.read for block in blocks if block.ends}}
    why = {**result.plan.why, "refit": {**record, "layers": work.corrected}}
    made = replace(result.plan, recipe=recipe, why=why)
    set_history(work.smaller, (*history(dense.model), made))
    return replace(result, model=work.smaller, plan=made, report=replace(result.report, plan=made))
