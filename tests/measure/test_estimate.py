"""Estimates: how the formulas grow, and that the stages that were announced are those that run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import corp
from corp import api
from corp.io.observer import Clock, Observer
from corp.measure import estimate
from corp.measure.estimate import Estimate, Load, Machine, Stage
from corp.sites import AttentionSite, MLPSite, Rotary, Rows
from tests.helpers.models import images, vit
from tests.helpers.observers import Recorder

MACHINE = Machine(single=1e11, double=5e10, forward=0.01)


def mlp(width: int) -> MLPSite:
    return MLPSite("mlp", (Rows("up", 0, width),), "down")


def load(**changes: Any) -> Load:
    return Load(100, {"mlp": 200, "attn": 200}, {"mlp": 50, "attn": 64})._replace(**changes)


def test_costs_grow_as_their_formulas_say() -> None:
    exact, paper = corp.Recipe(mlp=0.5, attn=0.5), corp.Recipe.paper(mlp=0.5, attn=0.5)
    sums = [estimate.sum_seconds(mlp(width), load(), MACHINE) for width in (1000, 2000)]
    assert sums[1] == pytest.approx(4 * sums[0])  # D^2 per token
    assert estimate.sum_seconds(mlp(1000), load(samples=300), MACHINE) == pytest.approx(3 * sums[0])
    plans = [estimate.plan_seconds(mlp(width), exact, load(), MACHINE) for width in (8000, 16000)]
    assert plans[1] / plans[0] == pytest.approx(8, rel=0.1)  # D^3
    assert estimate.plan_seconds(mlp(8000), paper, load(), MACHINE) < plans[0]
    assert estimate.plan_seconds(mlp(8000), exact, load(), MACHINE, known=True) < plans[0]  # the path is not redone
    heads = AttentionSite("attn", Rows("q", 0, 128), Rows("k", 0, 128), 2, None)
    rotated = replace(heads, rotary=Rotary(64, None))
    plain, half, whole = (
        estimate.sum_seconds(site, load(counted={"attn": queries}), MACHINE)
        for site, queries in ((heads, 64), (rotated, 32), (rotated, 64))
    )
    assert plain < half < whole
    assert whole - half == pytest.approx(half - plain)  # d^2 for every key of every query
    few, more = (estimate.plan_seconds(heads, exact, load(samples=n), MACHINE) for n in (1000, 4000))
    assert more / few == pytest.approx(4, rel=0.1)  # N d^3
    folded = [estimate.plan_seconds(heads, exact, load(samples=n), MACHINE) for n in (10_000, 80_000)]
    assert folded[0] == folded[1]  # past that the sums are folded
    assert estimate.plan_seconds(mlp(8000), corp.Recipe(attn=0.5), load(), MACHINE) == 0  # it stays as it is
    faster = MACHINE._replace(double=2 * MACHINE.double)
    assert estimate.curve_seconds(mlp(8000), faster) == pytest.approx(
        estimate.curve_seconds(mlp(8000), MACHINE) / 2, rel=0.01
    )


def test_costly_stages_are_told_with_what_avoids_them() -> None:
    stages = (Stage("calibrating on cpu", 100.0, 5), Stage("planning", 400.0, 7, "rank='combined' is faster"))
    made = Estimate("pruning it", stages, 10)
    assert (made.seconds, made.memory) == (500.0, 17)
    assert made.line() == "pruning it: about 8 min, 17B of memory"
    assert made.advice() == ["about 7 min of that is for planning; rank='combined' is faster"]
    assert not replace(made, stages=(stages[0], stages[1]._replace(seconds=90.0))).advice()
    assert "unknown" in Estimate("pruning it", ()).line()


class Watch(Recorder):
    """Takes the estimate too."""

    made: Any = None

    def estimate(self, make: Callable[[], Any]) -> Any:
        self.made = make()
        return self.made


@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # of few tokens
@pytest.mark.parametrize(
    "recipe",
    [corp.Recipe.paper(mlp=0.5, attn=0.5), corp.Recipe(vo=0.5), corp.Recipe(target_macs=0.8), corp.Recipe(mlp=0.3)],
    ids=["paper", "values", "target", "few tokens"],
)
def test_the_stages_that_were_announced_are_those_that_run(
    recipe: corp.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corp.steps.allocation.search.TOKENS_PER_CHANNEL", 4)
    watch = Watch()
    batches = images(size=4 if recipe.mlp == 0.3 else 50)
    result = corp.prune(vit().double(), batches, recipe, observer=watch)
    stages = set(watch.stages) - {"finding what can be pruned"}  # which is over when the estimate is made
    assert {stage.name for stage in watch.made.stages} == stages
    assert ("trying widths" in watch.stages) == (recipe.has_target or recipe.mlp == 0.3)
    assert f"{3 * len(batches[0])} samples of 17 tokens" in watch.made.what
    run = result.report.run
    assert run is not None
    assert {stage["stage"] for stage in run["stages"]} == stages
    assert all(stage["seconds"] > 0 < stage["estimated"] for stage in run["stages"])
    assert "estimated: " in result.report.gained()
    assert result.report.to_dict()["run"] == run


def test_nothing_is_measured_if_nobody_watches() -> None:
    assert corp.prune(vit().double(), images(), corp.Recipe.paper(mlp=0.5)).report.run is None


def test_known_statistics_spare_the_data_pass_and_unknown_numbers_are_admitted() -> None:
    model, recipe = vit().double(), corp.Recipe.paper(mlp=0.5)
    stats = corp.calibrate(model, images())
    names = [stage.name for stage in api.estimate(model, None, recipe, stats=stats).stages]
    assert names == ["planning", "checking"]
    assert api.estimate(model, iter(images()), recipe).stages == ()


def test_a_clock_leaves_inner_stages_out() -> None:
    clock = Clock(Observer())
    with clock.stage("outer", 1, ""), clock.stage("inner", 1, ""):
        sum(range(300_000))
    assert 0 <= clock.seconds["outer"] < clock.seconds["inner"]
