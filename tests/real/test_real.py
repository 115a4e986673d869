"""Real weights, real photographs: the paper's method gives the numbers it should (make test-real)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.deit_tiny import CASES, DENSE, Setup, accuracy
from corp import find_sites
from corp.numerics import exact
from corp.sites import projection_at

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def setup(assets: Path) -> Setup:
    return Setup(assets)


def test_dense_accuracy(setup: Setup) -> None:
    assert accuracy(setup.model, setup.images, setup.labels) == pytest.approx(DENSE, abs=0.05)


@pytest.mark.parametrize(("what", "recipe", "reference"), CASES, ids=[case[0] for case in CASES])
def test_top1_is_that_of_an_independent_implementation(
    setup: Setup, what: str, recipe: dict[str, object], reference: float
) -> None:
    assert setup.top1(recipe) == pytest.approx(reference, abs=1.5)


def test_elimination_in_float32_keeps_the_channels_that_float64_keeps(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    for site in find_sites(setup.model).mlp:
        W = projection_at(setup.model, site.down).weight.detach().double()
        cov = setup.stats.moments_of(site.name).total().cov()
        slow = exact.elimination_path(W, cov, ridge=1e-3)
        monkeypatch.setattr(exact, "MANY", 1)
        fast = exact.elimination_path(W, cov, ridge=1e-3)
        monkeypatch.undo()
        for width in (576, 384, 192):
            assert torch.equal(fast.keep(width)[0], slow.keep(width)[0]), site.name
        torch.testing.assert_close(fast.error, slow.error, rtol=1e-5, atol=0)
