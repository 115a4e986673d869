"""Costs of groups and sites: how they are added up, weighted and shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from corp.planning.output import OutputPlan
from corp.planning.parts import share, together
from corp.planning.plan import Plan
from corp.planning.report import Report
from corp.planning.site_plan import GroupCost, SitePlan
from corp.recipe import Recipe

ONE = GroupCost(J=1.0, J_star=0.5, J_uncomp=2.0, rho2=0.75, energy=10.0, fit=0.25, held=0.5)
OTHER = GroupCost(J=3.0, J_star=2.5, J_uncomp=6.0, rho2=0.5, energy=30.0, fit=0.5, held=0.6)
UNJUDGED = GroupCost(J=0.1, J_star=0.1, J_uncomp=0.2, rho2=0.5, energy=1.0)
NOTHING = GroupCost(J=0.0, J_star=0.0, J_uncomp=0.0, rho2=1.0, energy=0.0)


def site(*costs: GroupCost, kind: str = "attn") -> SitePlan:
    return SitePlan("blocks.0.x", kind, 8, 0.6, ((0, 2, 5),) * (1 if kind == "mlp" else 2), True, costs)


def test_costs_add_and_shares_are_weighted_by_what_was_lost() -> None:
    found = together([ONE, OTHER])
    assert (found.J, found.J_star, found.J_uncomp, found.energy) == (4.0, 3.0, 8.0, 40.0)
    assert found.rho2 == pytest.approx(1 - 3 / 8)
    assert found.fit == pytest.approx((0.25 * 2 + 0.5 * 6) / 8)
    assert found.held == pytest.approx((0.5 * 2 + 0.6 * 6) / 8)
    assert together([ONE]) == ONE


def test_costs_of_which_some_or_all_are_unknown_or_nothing_add_too() -> None:
    some = together([ONE, UNJUDGED])
    assert (some.fit, some.held) == (ONE.fit, ONE.held)  # what was not judged has no say
    assert together([UNJUDGED, UNJUDGED]).fit is None
    nothing = together([NOTHING, NOTHING])
    assert (nothing.rho2, nothing.J, nothing.fit) == (1.0, 0.0, None)
    assert (share(0.5, 2.0), share(0.5, 0.0)) == (0.25, None)


def test_overfitting_is_the_excess_on_unseen_data() -> None:
    assert ONE.overfit == pytest.approx(1.0)
    assert OTHER.overfit == pytest.approx(0.2)
    assert UNJUDGED.overfit == 0
    assert GroupCost(1, 1, 1, 0, 1, fit=0.5, held=0.4).overfit == 0  # better by chance
    assert GroupCost(1, 1, 1, 0, 1, fit=0.5).overfit == 0
    assert GroupCost(1, 1, 1, 0, 1, fit=0.0, held=0.4).overfit == 0
    assert GroupCost(1, 1, 1, 0, 1, fit=0.5, held=0.0).overfit == 0


def test_a_sites_shares_are_weighted_by_what_its_heads_lost() -> None:
    both = site(ONE, OTHER)
    assert both.relative_error == pytest.approx(4 / 40)
    assert both.relative_uncompensated == pytest.approx(8 / 40)
    assert both.rho2 == pytest.approx((0.75 * 2 + 0.5 * 6) / 8)
    assert both.overfit == pytest.approx((1.0 * 2 + 0.2 * 6) / 8)
    assert site(ONE).rho2 == ONE.rho2
    assert both.length_error is None
    long = GroupCost(1, 1, 1, 0.5, 1, length=0.07)
    assert site(ONE, long, GroupCost(1, 1, 1, 0.5, 1, length=0.02)).length_error == 0.07


def test_a_site_that_lost_nothing_has_no_error() -> None:
    nothing = site(NOTHING, NOTHING)
    assert (nothing.relative_error, nothing.overfit, nothing.rho2) == (0.0, 0.0, 1.0)
    little = GroupCost(0.25, 0.25, 0.5, 0.5, 0.5, fit=0.5, held=0.75)
    assert site(little, little).overfit == pytest.approx(0.5)
    assert site(little, little).relative_error == pytest.approx(0.5)
    assert site(replace(little, rho2=0.25), little).rho2 == pytest.approx(0.375)
    assert OutputPlan("head", 8, 4, 1.0, 0.0).relative_error == 0
    assert OutputPlan("head", 8, 4, 1.0, 0.5).relative_error == 2


def test_what_a_site_keeps_is_counted_per_head() -> None:
    heads, mlp = site(ONE, OTHER), site(ONE, kind="mlp")
    assert (heads.keep, heads.heads, mlp.heads) == (3, 2, None)
    assert heads.achieved == pytest.approx(5 / 8)
    assert heads.row() == ("blocks.0.x", "attn", "2 x 8", "2 x 3", "60.0%", "62.5%", "0.562", "10.00%", "20.00%")
    assert mlp.row()[2:4] == ("8", "3")


def test_a_saved_length_is_left_out_where_there_is_none() -> None:
    saved = site(ONE, GroupCost(1, 1, 1, 0.5, 1, length=0.07)).to_dict()
    assert ["length" in cost for cost in saved["costs"]] == [False, True]
    assert saved["costs"][0]["fit"] == 0.25
    assert (saved["keep"], saved["achieved"]) == (3, 0.625)
    assert "fold" not in saved


def test_a_report_compares_before_and_after() -> None:
    plan = Plan(Recipe(attn=0.6), (site(ONE, OTHER),))
    report = Report(plan, (4_000_000, 3_000_000), (8_000_000_000, 2_000_000_000))
    assert report.totals() == [
        ("parameters", "4.000 M", "3.000 M", "0.750"),
        ("MACs per sample", "8.000 G", "2.000 G", "0.250"),
    ]
    assert report.stages() == []
    assert report.gained() == "4.000 M -> 3.000 M parameters (x 0.750), 8.000 G -> 2.000 G MACs per sample (x 0.250)"
    assert report.to_dict()["macs"] == {"before": 8_000_000_000, "after": 2_000_000_000}
    assert report.to_dict()["sites"][0]["kept"] == 3
    assert "run" not in report.to_dict()


def test_a_report_of_a_run_adds_its_stages_up() -> None:
    plan = Plan(Recipe(attn=0.6), (site(ONE, OTHER),))
    stages = [{"stage": "calibrate", "estimated": 10, "seconds": 20}, {"stage": "plan", "estimated": 5, "seconds": 7}]
    report = Report(plan, (1, 0), run={"stages": stages})
    assert report.stages() == [("calibrate", "10 s", "20 s"), ("plan", "5 s", "7 s"), ("all", "15 s", "27 s")]
    assert report.gained().endswith(", in 27 s (estimated: 15 s)")
    assert report.totals() == [("parameters", "0.000 M", "0.000 M", "0.000")]
    assert report.to_dict()["macs"] is None
    assert report.to_dict()["run"] == {"stages": stages}
