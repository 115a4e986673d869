"""Damaged files and impossible values: only CorpError comes out. `make soak` does thousands of each."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corp import CorpError, Recipe, Statistics
from corp.calibration.moments import Moments
from corp.calibration.site_sums import SiteSums
from corp.errors import RecipeError
from corp.planning.plan import PLAN_VERSION, Plan
from corp.planning.site_plan import GroupCost, SitePlan
from corp.recipe import BASES, COMPENSATIONS, KINDS, RANKINGS, kept_width
from tests.helpers.fuzz import TARGETS, damaged
from tests.helpers.seeds import SEED, seeded

ROOT = Path(__file__).parents[2]
SLOW = {"saved timm model": 2, "statistics": 10, "transformers folder": 8, "checkpoint": 15}
# The same examples every time unless a seed is given (with --hypothesis-seed), however slow the machine.
settings.register_profile("corp", deadline=None, derandomize=SEED == 0, database=None, max_examples=60)
settings.load_profile("corp")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory as Linux has them")
def test_damaged_files_are_refused_and_nothing_else() -> None:
    """In a process with little memory: a crash or an allocation by a lying header would end it."""
    code = "import sys, tests.helpers.fuzz as f; sys.exit(max(f.main(n, [t]) for t, n in eval(sys.argv[1]).items()))"
    counts = {name: SLOW.get(name, 30) for name in TARGETS}
    done = subprocess.run(
        [sys.executable, "-c", code, repr(counts)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line in told if line.get("broken")] == []
    assert done.returncode == 0, done.stderr[-2000:]
    assert {line["target"] for line in told} == set(TARGETS)
    refused = sum(line["refused"] for line in told)
    assert refused > sum(counts.values()) / 4  # the damage is damage
    assert [line["target"] for line in told if not line["accepted"]] == []  # and some of it comes past the door


def test_damage_depends_on_the_seed_alone(tmp_path: Path) -> None:
    made = []
    for _ in range(2):
        path = tmp_path / "x.json"
        path.write_text(json.dumps({"a": [1, 2, {"b": None}], "c": "text"}))
        damaged(path, random.Random(3))
        made.append(path.read_bytes())
    assert made[0] == made[1]
    assert json.loads(made[0]) != {"a": [1, 2, {"b": None}], "c": "text"}


# Recipes, plans and statistics: whatever the values.

SHARE = st.floats(0, 1, exclude_max=True)
GLOB = st.text("abc*?[].0", min_size=1, max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
recipes = st.builds(
    Recipe,
    mlp=SHARE,
    attn=SHARE,
    rank=st.sampled_from(RANKINGS),
    compensate=st.sampled_from([c for c in COMPENSATIONS if c != "mean"]),
    ridge=st.floats(0, 1e6),
    round_to=st.integers(1, 512) | st.fixed_dictionaries({}, optional={"mlp": st.integers(1, 64)}),
    skip=st.lists(GLOB, max_size=3),
    overrides=st.dictionaries(GLOB, st.dictionaries(st.sampled_from(KINDS), SHARE, min_size=1), max_size=3),
)


@given(recipes)
def test_recipes_survive_json(recipe: Recipe) -> None:
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_recipes_are_made_or_refused() -> None:
    accepted, refused = [], []

    values = JSON | st.sampled_from([0, 0.25, 0.5, 1, 8, 256, True, False, None, "auto", "exact", "none", "gain"])

    @settings(max_examples=300)  # few values suit an option: of 60 dictionaries all but the empty ones may be refused
    @given(st.dictionaries(st.sampled_from(sorted(Recipe.paper().to_dict())), values, max_size=4))
    def read(raw: dict[str, Any]) -> None:
        try:
            made = Recipe.from_dict(raw)
        except RecipeError:
            refused.append(raw)
            return
        accepted.append(raw)
        for kind in KINDS:
            assert 0 <= made.sparsity(kind, "blocks.0.mlp") < 1
            assert made.multiple(kind, 64) >= 1

    read()
    assert [raw for raw in accepted if raw]
    assert refused


@given(st.integers(1, 100_000), SHARE, st.integers(1, 1000))
def test_kept_widths_are_widths(width: int, sparsity: float, multiple: int) -> None:
    kept = kept_width(width, sparsity, multiple)
    assert 1 <= kept <= width
    assert kept >= (1 - sparsity) * width - 1e-6
    assert kept == width or kept % multiple == 0


@st.composite
def site_plans(draw: st.DrawFn) -> SitePlan:
    width = draw(st.integers(1, 40))
    kind, keep = draw(st.sampled_from(KINDS)), draw(st.integers(1, width))
    groups = 1 if kind == "mlp" else draw(st.integers(1, 3))
    pick = st.permutations(range(width)).map(lambda order: tuple(sorted(order[:keep])))
    number = st.floats(allow_nan=False, allow_infinity=False)
    costs = st.builds(GroupCost, *[number] * 5, fit=st.none() | number, held=st.none() | number)
    return SitePlan(
        draw(st.text(max_size=8)),
        kind,
        width,
        draw(SHARE),
        tuple(draw(pick) for _ in range(groups)),
        draw(st.booleans()),
        tuple(draw(costs) for _ in range(groups if kind == "attn" else 1)),
        draw(st.floats(0, 1e3)),
        "coordinates" if kind == "mlp" else draw(st.sampled_from(BASES)),
    )


@given(recipes, st.lists(site_plans(), max_size=3, unique_by=lambda site: site.name), st.integers(0, 2**40))
def test_plans_survive_json(recipe: Recipe, sites: list[SitePlan], samples: int) -> None:
    plan = Plan(recipe, tuple(sites), "abc", samples)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@given(JSON)
def test_plans_are_parsed_or_refused(raw: Any) -> None:
    top = {"version": PLAN_VERSION, "sites": [], "recipe": {}}
    assert Plan.from_dict(top).sites == ()  # so that what is put into it reaches its own check
    for content in (raw, {**top, "sites": raw}, {**top, "sites": [raw]}, {**top, "recipe": raw}, {**top, "why": raw}):
        with suppress(CorpError):
            Plan.from_dict(content)


def test_damaged_plans_come_past_the_door(tmp_path: Path) -> None:
    """Some are accepted, and others are refused for what is inside."""
    accepted, reasons = [], []

    @given(recipes, site_plans(), st.integers(0, 2**32))
    def read(recipe: Recipe, site: SitePlan, seed: int) -> None:
        Plan(recipe, (site,), "abc", 9).save(tmp_path / "plan.json")
        damaged(tmp_path / "plan.json", random.Random(seed))
        try:
            accepted.append(Plan.load(tmp_path / "plan.json"))
        except CorpError as error:
            reasons.append(str(error))

    read()
    assert accepted
    assert [reason for reason in reasons if "JSON" not in reason and "version" not in reason]


@given(st.lists(st.integers(0, 9), min_size=2, max_size=4), st.integers(1, 6), st.integers(0, 2**32))
def test_moments_of_parts_add_up_to_those_of_the_whole(sizes: list[int], width: int, seed: int) -> None:
    draw = seeded(seed)
    parts = [torch.randn(size, width, generator=draw, dtype=torch.float64) * 3 + 5 for size in sizes]
    whole, total = Moments(width), Moments(width)
    for part in parts:
        one = Moments(width)
        one.update(part)
        total = total + one
    whole.update(torch.cat(parts))
    assert (total.n, total.seen) == (whole.n, whole.seen)
    if whole.n:
        torch.testing.assert_close(total.mean, whole.mean)
        torch.testing.assert_close(total.cov(), whole.cov(), rtol=1e-9, atol=1e-9)


@settings(max_examples=30)
@given(st.text(max_size=6), st.integers(1, 5), st.integers(0, 2**40), st.dictionaries(st.text(max_size=4), JSON))
def test_statistics_survive_a_folder(name: str, width: int, samples: int, origin: dict[str, Any]) -> None:
    moments = Moments(width)
    moments.update(torch.randn(7, width))
    origin = json.loads(json.dumps(origin))
    stats = Statistics({name: SiteSums(moments, Moments(width))}, samples, "w", None, origin)
    with tempfile.TemporaryDirectory() as folder:
        stats.save(Path(folder, "stats"))
        loaded = Statistics.load(Path(folder, "stats"))
        assert (loaded.samples, list(loaded.sums)) == (samples, [name])
        assert json.dumps(loaded.origin) == json.dumps(origin)
        assert torch.equal(loaded.moments_of(name).total().cov(), moments.cov())
