"""Plans as files: what they hold comes back, and what no plan can hold is refused with its reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from corp.errors import PlanError
from corp.planning.merging import Merging
from corp.planning.output import OutputPlan
from corp.planning.plan import Plan
from corp.planning.site_plan import GroupCost, SitePlan
from corp.recipe import Recipe

COST = GroupCost(J=1.0, J_star=0.5, J_uncomp=2.0, rho2=0.75, energy=10.0, fit=0.25, held=0.5)
LONG = GroupCost(J=1.0, J_star=0.5, J_uncomp=2.0, rho2=0.75, energy=10.0, length=0.05)
MLP = SitePlan("mlp", "mlp", 4, 0.5, ((0, 3),), True, (COST,), 0.0)
HEADS = SitePlan("attn", "attn", 4, 0.25, ((0, 1, 2), (1, 2, 3)), False, (COST, LONG), 0.1, "subspace")
VALUES = SitePlan("vo", "vo", 3, 0.5, ((0,), (2,)), False, (COST,))
OUTPUT = OutputPlan("head", 8, 8, 1.5, 3.0)
MERGING = Merging("blocks", (2, 0), 1, read=1)
WHOLE = Plan(Recipe(mlp=0.5), (MLP, HEADS, VALUES), "abc", 7, {"notes": ["one"]}, OUTPUT, MERGING)


def changed(path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """The whole plan as a file has it, with another value at one place."""
    raw: dict[str, Any] = json.loads(json.dumps(WHOLE.to_dict()))
    place: Any = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return raw


def test_everything_in_a_plan_survives_json() -> None:
    found = Plan.from_dict(json.loads(json.dumps(WHOLE.to_dict())))
    assert found == WHOLE
    assert (found.output, found.merging, found.samples, found.weights) == (OUTPUT, MERGING, 7, "abc")


def test_a_plan_without_output_and_merging_has_none() -> None:
    found = Plan.from_dict({**changed(("output",), None), "merging": None})
    assert (found.output, found.merging) == (None, None)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("version",), 2, r"plan version 2 is not 3; make the plan again"),
        (("sites",), {}, r"the plan has no list of sites"),
        (("sites", 0), [], r"site 0 of the plan is not a JSON object"),
        (("sites", 2, "name"), "mlp", r"the plan names a site twice"),
        (("weights",), 3, r"'weights' must be a string and 'samples' a whole number"),
        (("samples",), -1, r"'samples' a whole number"),
        (("samples",), True, r"'samples' a whole number"),
        (("why",), [], r"the plan's 'why' is not a JSON object"),
        (("output",), [], r"the plan's 'output' is not a JSON object"),
        (("output", "name"), None, r"'output' needs a name, a width and a rank within it"),
        (("output", "width"), 8.0, r"'output' needs a name"),
        (("output", "keep"), 9, r"a rank within it"),
        (("output", "keep"), 0, r"a rank within it"),
        (("output", "J"), None, r"the plan's 'output': J is not a finite number"),
        (("merging", "prefix"), -1, r"merging: prefix has -1"),
        (("sites", 0, "name"), 1, r"site 1 of the plan: it needs a name, a kind \(.*mlp.*\) and a width"),
        (("sites", 0, "kind"), "conv", r"it needs a name, a kind"),
        (("sites", 0, "width"), -4, r"it needs a name, a kind"),
        (("sites", 0, "kept"), [], r"'kept' and 'costs' must be lists"),
        (("sites", 0, "kept"), {}, r"'kept' and 'costs' must be lists"),
        (("sites", 0, "costs"), {}, r"'kept' and 'costs' must be lists"),
        (("sites", 0, "costs"), [], r"1 groups with 0 costs, where 1 are expected"),
        (("sites", 0, "kept"), [[0, 3], [0, 3]], r"2 groups with 1 costs, where 1 are expected"),
        (("sites", 1, "costs"), [COST.__dict__], r"2 groups with 1 costs, where 2 are expected"),
        (("sites", 1, "kept", 0), [0, 1], r"all heads must keep the same number of dimensions"),
        (("sites", 0, "intercept"), 1, r"'intercept' is not true or false"),
        (("sites", 0, "basis"), "subspace", r"the basis 'subspace' is unknown"),
        (("sites", 1, "basis"), "other", r"the basis 'other' is unknown"),
        (("sites", 0, "ridge"), -0.5, r"site 'mlp' of the plan: the ridge -0\.5 is negative"),
        (("sites", 0, "requested"), "half", r"site 'mlp' of the plan: requested is not a finite number"),
        (("sites", 0, "requested"), True, r"requested is not a finite number"),
        (("sites", 0, "requested"), float("nan"), r"requested is not a finite number"),
        (("sites", 0, "costs", 0), [], r"site 'mlp' of the plan is not a JSON object"),
        (("sites", 0, "costs", 0, "J"), None, r"J is not a finite number"),
        (("sites", 0, "costs", 0, "fit"), "x", r"fit is not a finite number"),
        (("sites", 0, "kept", 0), [], r"kept must be a list of 1 to 4 indices"),
        (("sites", 0, "kept", 0), "03", r"kept must be a list of 1 to 4 indices"),
        (("sites", 0, "kept", 0), [0, 1, 2, 3, 4], r"kept must be a list of 1 to 4 indices"),
        (("sites", 0, "kept", 0), [-1, 3], r"kept must be a list of 1 to 4 indices"),
        (("sites", 0, "kept", 0), [0, 4], r"kept indices must ascend and stay below 4"),
        (("sites", 0, "kept", 0), [3, 0], r"kept indices must ascend"),
        (("sites", 0, "kept", 0), [1, 1], r"kept indices must ascend"),
    ],
)
def test_what_no_plan_holds_is_refused(path: tuple[str | int, ...], value: object, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        Plan.from_dict(changed(path, value))


def test_bounds_themselves_are_allowed() -> None:
    whole = changed(("sites", 0, "kept", 0), [0, 1, 2, 3])
    assert Plan.from_dict(whole).sites[0].achieved == 0
    assert Plan.from_dict(changed(("samples",), 0)).samples == 0
    assert Plan.from_dict(changed(("output", "keep"), 1)).output == OutputPlan("head", 8, 1, 1.5, 3.0)


def test_notes_are_added_to_those_that_are_there() -> None:
    assert WHOLE.notes == ["one"]
    assert WHOLE.noting("two", "three").notes == ["one", "two", "three"]
    assert WHOLE.noting() is WHOLE
    assert Plan(Recipe(), ()).notes == []


def test_a_table_has_a_row_per_site_that_changes() -> None:
    title, columns, rows = WHOLE.table()
    assert title == "plan: 3 sites change"
    assert [row[:4] for row in rows] == [
        ("mlp", "mlp", "4", "2"),
        ("attn", "attn", "2 x 4", "2 x 3"),
        ("vo", "vo", "2 x 3", "2 x 1"),
    ]
    assert len(columns) == len(rows[0])
    assert Plan(Recipe(), ()).table() == ("nothing to prune: every site keeps its width", columns, [])
