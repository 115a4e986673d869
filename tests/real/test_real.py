"""Real weights, real photographs: the paper's method gives the numbers it should (make test-real)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.deit_tiny import CASES, DENSE, Setup, accuracy

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
