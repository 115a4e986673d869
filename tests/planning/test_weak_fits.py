"""Warnings of fits that rest on too little: when they come, for which sites, and with which numbers."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from corp.errors import CorpWarning
from corp.planning.overfitting import warn_if_weak
from corp.planning.site_plan import GroupCost, SitePlan


def site(name: str, kind: str = "mlp", *, held: float = 0.5, groups: int = 1, J: float = 1.0) -> SitePlan:
    """Ten kept dimensions, fitted with half of the removed part left; `held` is what is left on unseen data."""
    cost = GroupCost(J, 0.5, 2.0, 0.5, 10.0, fit=0.5, held=held)
    return SitePlan(
        name, kind, 20, 0.5, (tuple(range(10)),) * groups, True, (cost,) * (groups if kind == "attn" else 1)
    )


class Known:
    """Statistics that know how many tokens there were, and nothing else."""

    samples = 30

    def __init__(self, fit: int, held: int = 0) -> None:
        parts = (SimpleNamespace(n=count, tokens=count) for count in (fit, held))
        self.all = SimpleNamespace(**dict(zip(("fit", "held"), parts, strict=True)))

    def moments_of(self, _name: str) -> Any:
        return self.all

    @property
    def sums(self) -> dict[str, Any]:
        return {"heads": self.all}


def told(sites: list[SitePlan], stats: Known) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_weak(sites, stats)  # type: ignore[arg-type]
    assert all(one.category is CorpWarning for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("plan", "needed", "what"),
    [
        (site("x"), 20, "10 kept channels"),
        (site("x", "vo", groups=3), 60, "30 kept value dimensions"),  # values are fitted together
        (site("heads", "attn", groups=3), 20, "10 kept dimensions per head"),  # heads one by one
    ],
)
def test_two_tokens_per_input_are_needed(plan: SitePlan, needed: int, what: str) -> None:
    assert told([plan], Known(needed - 5, 5)) == []
    (message,) = told([plan], Known(needed - 6, 5))
    assert message == (
        f"{plan.name}: {needed - 1} tokens for {what}; a stable fit needs at least {needed}. Calibrate on more samples"
    )


def test_sites_without_a_fit_or_without_tokens_need_none() -> None:
    assert told([site("x", J=2.0)], Known(5)) == []  # nothing was compensated
    assert told([site("x")], Known(0)) == []
    assert len(told([site("x")], Known(1))) == 1


def test_the_worst_of_those_that_overfit_is_named_and_how_much_more_would_do() -> None:
    plans = [site("a", held=0.59), site("b", held=0.65), site("c", held=0.75)]
    (message,) = told(plans, Known(100))
    assert message == (
        "c and 1 other sites: the error is 50% larger on data that was not fitted; about 75 samples (now 30) would "
        "bring that to 20%"
    )
    assert told(plans[:1], Known(100)) == []
    assert told([site("a", held=0.6)], Known(100)) == []  # at the limit


def test_a_site_is_named_once() -> None:
    plans = [site("a", held=0.75), site("b", held=0.75)]
    (message,) = told(plans, Known(5))
    assert message.startswith("a and 1 other sites: 5 tokens for 10 kept channels")
