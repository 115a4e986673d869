"""Plans of a part of a model, as block-by-block pruning makes them."""

from __future__ import annotations

import pytest

import corp
from corp import Recipe
from corp.io.observer import SILENT
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
