"""Predicted costs of query and key heads against logits computed one by one, with the maps of the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from corp.calibration.grams import Grams
from corp.calibration.pairs import PairSums
from corp.calibration.site_sums import SiteSums
from corp.planning.heads import HeadSums, fold_attention, nested_maps, plan_attention, sketch_attention
from corp.planning.site_plan import GroupCost, HeadMaps, SitePlan
from corp.recipe import Recipe
from corp.sites import AttentionSite, Rotary, Rows
from tests.helpers.seeds import seeded

HEADS, GROUPS, WIDTH, KEEP, SCALE = 4, 2, 8, 4, 0.3
SHARED = HEADS // GROUPS
PAPER, FULL = Recipe.paper(attn=0.5), Recipe(attn=0.5)
CASES = [(rotated, recipe) for rotated in (0, 4, 8) for recipe in (PAPER, FULL)]
NAMES = [f"{rotated}-rotated-{how}" for rotated in (0, 4, 8) for how in ("paper", "full")]
every_kind = pytest.mark.parametrize(("rotated", "recipe"), CASES, ids=NAMES)


class Data(NamedTuple):
    """Rotated queries (B, H, n, d), and keys (B, H, n, d) that neighbouring heads share."""

    q: Tensor
    k: Tensor


class Expected(NamedTuple):
    """Squared errors of one key head's logits: with the maps, without compensation, and of no logits at all."""

    J: float
    J_uncomp: float
    energy: float


def data(number: int, samples: int) -> Data:
    """Dimensions that are correlated, so that there is something to compensate for."""
    draw = seeded(number)
    mix = torch.randn(2, HEADS, WIDTH, WIDTH, generator=seeded(0), dtype=torch.float64) + torch.eye(WIDTH)
    q, k = torch.randn(2, samples, HEADS, 9, WIDTH, generator=draw, dtype=torch.float64) + 0.5
    k = k[:, ::SHARED].repeat_interleave(SHARED, 1)
    return Data(q @ mix[0], k @ mix[1, ::SHARED].repeat_interleave(SHARED, 0))


FIT, HELD = data(1, 6), data(2, 4)
BOTH = Data(*(torch.cat(parts) for parts in zip(FIT, HELD, strict=True)))


def site(rotated: int) -> AttentionSite:
    rows = Rows("q", 0, HEADS * WIDTH), Rows("k", 0, GROUPS * WIDTH)
    rotary = Rotary(rotated) if rotated else None
    return AttentionSite("attn", *rows, HEADS, None, kv_heads=GROUPS, rotary=rotary, scale=SCALE)


def sums(rotated: int, fit: Data, held: Data | None) -> HeadSums:
    pairs, grams = [], []
    for given in (fit, held):
        pairs.append(PairSums(HEADS, GROUPS, rotated))
        grams.append(Grams(HEADS, WIDTH - rotated))
        if given is not None and rotated:
            pairs[-1].update(given.q, given.k[:, ::SHARED], scale=SCALE)
        if given is not None and rotated < WIDTH:
            grams[-1].update(*(x[..., rotated:].transpose(1, 2).flatten(2) for x in given))
    return HeadSums(SiteSums(*pairs) if rotated else None, SiteSums(*grams) if rotated < WIDTH else None)


def squares(delta: Tensor, weights: Tensor | None) -> float:
    """Squared logits (B, m, n); with weights of the keys, up to a constant along every row."""
    if weights is None:
        return float(delta.square().sum())
    centred = delta - (weights * delta).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
    return float((weights * centred.square()).sum())


def expected(given: Data, plan: SitePlan, maps: HeadMaps, rotated: int, recipe: Recipe) -> list[list[Expected]]:
    """The errors of every query head, for rotated dimensions and for the others."""
    found: list[list[Expected]] = []
    for h in range(HEADS):
        g, entries = h // SHARED, []
        attention = (SCALE * given.q[:, h] @ given.k[:, h].mT).softmax(-1)
        narrow = sum(i < rotated for i in plan.kept[g])
        for dims, rows in ((slice(0, rotated), slice(0, narrow)), (slice(rotated, WIDTH), slice(narrow, KEEP))):
            if dims.start == dims.stop:
                continue
            q, k = given.q[:, h, :, dims], given.k[:, h, :, dims]
            weights = None
            if recipe is FULL:  # rotated: under their attention, others: under equal attention
                weights = attention if dims.stop == rotated else torch.ones_like(attention)
            to_q, to_k = maps.q[h][rows, dims], maps.k[g][rows, dims]
            logits = q @ k.mT
            kept = [i - dims.start for i in plan.kept[g] if dims.start <= i < dims.stop]
            if recipe is FULL and dims.start == rotated:  # a subspace: compared with the group's strongest dimensions
                heads = range(g * SHARED, (g + 1) * SHARED)
                single = [
                    [given.q[:, i, :, [j]] @ given.k[:, i, :, [j]].mT for i in heads] for j in range(rotated, WIDTH)
                ]
                own = [sum(squares(logit, weights) for logit in each) for each in single]
                kept = sorted(sorted(range(len(own)), key=lambda i: -own[i])[: len(kept)])
            entries.append(
                Expected(
                    squares((q @ to_q.mT) @ (k @ to_k.mT).mT - logits, weights),
                    squares(q[..., kept] @ k[..., kept].mT - logits, weights),
                    squares(logits, weights),
                )
            )
        found.append(entries)
    return found


@every_kind
def test_a_plan_records_the_share_that_was_requested_or_what_a_target_left(rotated: int, recipe: Recipe) -> None:
    keep = KEEP + 2
    assert plan_attention(site(rotated), keep, sums(rotated, FIT, None), recipe).requested == 0.5
    aimed = replace(recipe, attn=0.0, target_macs=0.5)
    assert plan_attention(site(rotated), keep, sums(rotated, FIT, None), aimed).requested == 0.25


@every_kind
def test_one_held_out_sample_is_enough_to_judge_a_fit(rotated: int, recipe: Recipe) -> None:
    one = Data(*(part[:1] for part in HELD))
    for fit, held in ((FIT, one), (one, HELD)):
        plan = plan_attention(site(rotated), KEEP, sums(rotated, fit, held), recipe)
        assert all(cost.held is not None for cost in plan.costs)


def of_group(entries: list[list[Expected]], g: int, name: str) -> float:
    return sum(getattr(one, name) for head in entries[g * SHARED : (g + 1) * SHARED] for one in head)


def maps_of(plan: SitePlan) -> HeadMaps:
    assert isinstance(plan.fold, HeadMaps)
    return plan.fold


@every_kind
def test_predicted_errors_are_those_of_the_logits(rotated: int, recipe: Recipe) -> None:
    plan = plan_attention(site(rotated), KEEP, sums(rotated, FIT, HELD), recipe)
    found = expected(BOTH, plan, maps_of(plan), rotated, recipe)
    assert [len(kept) for kept in plan.kept] == [KEEP] * GROUPS
    assert [sum(i < rotated for i in kept) for kept in plan.kept] == [rotated // 2] * GROUPS
    for g, cost in enumerate(plan.costs):
        assert pytest.approx(of_group(found, g, "J"), rel=1e-3) == cost.J
        assert cost.energy == pytest.approx(of_group(found, g, "energy"), rel=1e-3)
        assert cost.J_uncomp == pytest.approx(of_group(found, g, "J_uncomp"), rel=1e-3)
        assert 0 < cost.J_star <= cost.J * (1 + 1e-6) < cost.J_uncomp


@every_kind
def test_unexplained_shares_are_those_of_a_fit_without_the_held_out_samples(rotated: int, recipe: Recipe) -> None:
    plan = plan_attention(site(rotated), KEEP, sums(rotated, FIT, HELD), recipe)
    maps = fold_attention(site(rotated), plan, sums(rotated, FIT, None), recipe)
    for name, given in (("fit", FIT), ("held", HELD)):
        found = expected(given, plan, maps, rotated, recipe)
        lost = expected(BOTH, plan, maps, rotated, recipe)
        for g, cost in enumerate(plan.costs):
            assert getattr(cost, name) == pytest.approx(weighted(found, lost, g), rel=1e-3)


def weighted(found: list[list[Expected]], lost: list[list[Expected]], g: int) -> float:
    """The unexplained shares of a group's heads, weighted by what each lost."""
    heads = slice(g * SHARED, (g + 1) * SHARED)
    parts = [
        (one.J / one.J_uncomp, all_.J_uncomp)
        for head, other in zip(found[heads], lost[heads], strict=True)
        for one, all_ in zip(head, other, strict=True)
    ]
    return sum(share * weight for share, weight in parts) / sum(weight for _, weight in parts)


@every_kind
def test_without_compensation_or_held_out_samples_nothing_is_said_of_unseen_data(rotated: int, recipe: Recipe) -> None:
    def costs(recipe: Recipe, held: Data | None) -> tuple[GroupCost, ...]:
        return plan_attention(site(rotated), KEEP, sums(rotated, FIT, held), recipe).costs

    for found in (costs(recipe, None), costs(replace(recipe, compensate="none"), HELD)):
        assert all(cost.fit is None is cost.held for cost in found)


@every_kind
def test_a_sketch_and_a_plan_from_a_file_have_the_maps_of_the_plan(rotated: int, recipe: Recipe) -> None:
    given = sums(rotated, FIT, HELD)
    plan = plan_attention(site(rotated), KEEP, given, recipe)
    sketch = sketch_attention(site(rotated), KEEP, given, recipe, None)
    assert (sketch.kept, sketch.costs, sketch.requested, sketch.basis) == (plan.kept, (), 0.5, plan.basis)
    for maps in (maps_of(sketch), fold_attention(site(rotated), plan, given, recipe)):
        for one, other in zip((*maps.q, *maps.k), (*maps_of(plan).q, *maps_of(plan).k), strict=True):
            torch.testing.assert_close(one, other)


def test_nested_subspaces_of_every_width_begin_with_the_narrower_ones() -> None:
    given = sums(0, FIT, HELD)
    assert given.grams is not None
    nested = nested_maps(site(0), given.grams.total())
    for keep in (2, 4):
        maps = maps_of(sketch_attention(site(0), keep, given, FULL, nested))
        for h in range(HEADS):
            A, B = nested[h // SHARED].A[h % SHARED, :keep], nested[h // SHARED].B[:keep]
            torch.testing.assert_close(maps.q[h].mT @ maps.k[h // SHARED], A.mT @ B)
    whole = maps_of(sketch_attention(site(0), WIDTH, given, FULL, nested))
    for h in range(HEADS):
        torch.testing.assert_close(whole.q[h].mT @ whole.k[h // SHARED], torch.eye(WIDTH, dtype=torch.float64))
