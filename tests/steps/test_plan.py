"""Plans of a part of a model, as block-by-block pruning makes them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import corp
from corp import Recipe
from corp.errors import CorpWarning, SingularSystemError
from corp.io.observer import SILENT
from corp.numerics import kronecker, subspace
from corp.planning.widths import not_as_requested
from corp.sites import Sites
from corp.steps.allocation.allocator import Allocator
from corp.steps.plan import plan_sites
from corp.steps.run import Dense
from tests.helpers import models


@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
def test_what_a_block_lacks_is_not_said_of_the_whole_model() -> None:
    """A block without attention says nothing of a request for queries and keys, which other blocks have."""
    model, recipe = models.build("vit"), Recipe.paper(mlp=0.5, attn=0.5)
    stats = corp.calibrate(model, models.batches("vit"))
    whole = Dense.of(model)
    part = whole._replace(sites=Sites(whole.sites.mlp[:1], adapter=whole.sites.adapter))
    found = Allocator(part.model, part.sites, stats, recipe).allocate(recipe)
    made = plan_sites(part, stats, recipe, found, SILENT)
    assert [site.name for site in made.sites] == [whole.sites.mlp[0].name]
    assert not any("changes nothing" in note for note in made.notes)
    assert any("changes nothing" in note for note in not_as_requested(part.sites, recipe))
    assert not_as_requested(whole.sites, recipe) == []


def test_a_ridge_that_the_fit_of_heads_raised_is_in_the_plan_and_in_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(1000))

    def unsolved_once(operator: Any, rhs: Tensor, lam: float, tolerance: float | None = None) -> Tensor:
        if next(steps) == 0:
            raise SingularSystemError("only rounding errors vary")
        return kronecker.solve(operator, rhs, lam, tolerance)

    model, recipe = models.build("vit"), Recipe(attn=0.5, ridge=1e-3)
    stats = corp.calibrate(model, models.batches("vit"))
    monkeypatch.setattr(subspace, "solve", unsolved_once)
    with pytest.warns(CorpWarning, match=r"singular at ridge=0\.001, so the ridge is up to 0\.1"):
        made = corp.plan(model, stats, recipe)
    assert [site.ridge for site in made.sites].count(0.1) == 1
    assert {site.ridge for site in made.sites} == {1e-3, 0.1}
