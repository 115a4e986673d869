"""With few tokens per channel the default judges its ranking on held-out batches, gives way, and says so."""

from __future__ import annotations

import re

import pytest

import corp
from corp import Recipe
from corp.errors import CorpWarning
from corp.measure.closeness import Closeness
from corp.measure.intervals import Interval
from corp.steps.allocation import search
from tests.helpers.models import batches, build
from tests.helpers.observers import Recorder

LINE = re.compile(r"rank (\w+), ridge (\S+): divergence (\S+)")


@pytest.mark.parametrize(
    "recipe", [Recipe(mlp=0.6), Recipe(target_macs=0.6, sequential=False), Recipe(min_agreement=0.9)]
)
@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
def test_the_ranking_nearest_to_the_dense_model_is_used(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "TOKENS_PER_CHANNEL", 10**6)
    observer = Recorder()
    result = corp.prune(build("vit"), batches("vit", 6, 4), recipe, observer=observer)
    tried = [found.groups() for line in observer.notes if (found := LINE.match(line))]
    assert [(rank, float(ridge)) for rank, ridge, _ in tried] == [
        ("exact", 1e-3), ("exact", 1e-2), ("combined", 1e-3), ("combined", 1e-2),
    ]  # fmt: skip
    used = result.plan.recipe
    counted = {
        (rank, float(ridge)): float(d) * (search.CLEARLY if rank == "combined" else 1) for rank, ridge, d in tried
    }
    assert counted[used.rank, used.ridge] <= min(counted.values()) + 1e-3  # three digits are shown
    changed = (used.rank, used.ridge) != ("exact", 1e-3)
    assert changed == any("few tokens per MLP channel" in note for note in result.plan.notes)


@pytest.mark.parametrize(("exact", "rank"), [(0.87, "combined"), (0.83, "exact")])
@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
def test_exact_elimination_has_to_be_clearly_nearer(exact: float, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "TOKENS_PER_CHANNEL", 10**6)
    found = iter([exact, 2.0, 1.0, 2.0])
    monkeypatch.setattr(Closeness, "divergence", lambda self: Interval(next(found), None, None))
    result = corp.prune(build("vit"), batches("vit", 6, 4), Recipe(mlp=0.6, sequential=False))
    assert result.plan.recipe.rank == rank


def test_giving_way_is_a_warning_and_the_paper_is_never_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "TOKENS_PER_CHANNEL", 10**6)
    monkeypatch.setattr(Closeness, "divergence", lambda self: Interval(next(falling), None, None))
    falling = iter([4.0, 3.0, 2.0, 1.0])
    with pytest.warns(CorpWarning, match="rank='combined' with ridge=0.01 is about as close to the dense model"):
        result = corp.prune(build("vit"), batches("vit", 6, 4), Recipe(mlp=0.6, sequential=False))
    assert (result.plan.recipe.rank, result.plan.recipe.ridge) == ("combined", 0.01)
    observer = Recorder()
    corp.prune(build("vit"), batches("vit", 6, 4), Recipe.paper(mlp=0.6), observer=observer)
    assert not [line for line in observer.notes if LINE.match(line)]


@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
def test_equal_shares_are_divided_by_trials_whatever_ranking_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "TOKENS_PER_CHANNEL", 10**6)
    monkeypatch.setattr(search, "CLEARLY", 0.0)  # the paper's ranking is used
    recipe = Recipe(target_macs=0.7, allocate="uniform", sequential=False)
    result = corp.prune(build("vit"), batches("vit", 6, 4), recipe)
    assert result.plan.recipe.rank == "combined"
    tried = result.plan.why["split"]["tried"]
    assert len(tried) > 1
    least = min(tried, key=lambda one: one["divergence"])
    assert result.plan.why["allocation"]["queries"] == least["queries"]
