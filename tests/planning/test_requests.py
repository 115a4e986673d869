"""What a recipe asks for where only some sites of a kind can be pruned: the others are left whole, and that is told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import corp
from corp.errors import CorpWarning, PlanError
from corp.planning.widths import left_whole, require_prunable
from corp.recipe import Recipe
from corp.sites import MLPSite, Refusal, Rows, Sites
from tests.helpers.seeds import seed_all, seeded

D = 16
SOME = Sites(
    [MLPSite("blocks.0.mlp", (Rows("blocks.0.mlp.0", 0, 32),), "blocks.0.mlp.2")],
    [Refusal("blocks.1.mlp", "mlp", "odd"), Refusal("blocks.1.attn", "attn", "normed")],
)


def test_a_share_is_refused_where_no_site_of_its_kind_can_be_pruned() -> None:
    require_prunable(SOME, Recipe(mlp=0.5))
    with pytest.raises(PlanError, match=r"cannot prune blocks.1.attn \(attn\): normed. .* or attn=0"):
        require_prunable(SOME, Recipe(mlp=0.5, attn=0.5))


def test_sites_that_are_skipped_do_not_count_as_prunable() -> None:
    with pytest.raises(PlanError, match=r"cannot prune blocks\.1\.mlp"):
        require_prunable(SOME, Recipe(mlp=0.5, skip=["blocks.0.*"]))
    require_prunable(SOME, Recipe(mlp=0.5, attn=0.5, skip=["blocks.1.*"]))


def test_an_override_is_refused_where_it_names_refused_sites_only() -> None:
    require_prunable(SOME, Recipe(overrides={"blocks.*": {"mlp": 0.5}}))
    with pytest.raises(PlanError, match=r"cannot prune blocks\.1\.mlp"):
        require_prunable(SOME, Recipe(mlp=0.5, overrides={"blocks.1.*": {"mlp": 0.25}}))
    require_prunable(SOME, Recipe(mlp=0.5, overrides={"blocks.1.*": {"mlp": 0}}))


def test_what_is_left_is_told_by_name_and_only_if_it_was_asked_for() -> None:
    told = "1 of 2 MLPs keep their width, because they cannot be pruned: blocks.1.mlp (mlp): odd"
    assert left_whole(SOME, Recipe(mlp=0.5)) == [told]
    for silent in (Recipe(mlp=0.5, skip=["blocks.1.*"]), Recipe(target_macs=0.5)):
        assert left_whole(SOME, silent) == []


class Odd(nn.Module):
    """An MLP with a norm over its hidden channels."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(D, 32), nn.LayerNorm(32), nn.Linear(32, D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.norm(self.fc1(x)).relu())
        return out


def test_a_share_prunes_what_can_be_pruned_and_warns_once_of_the_rest() -> None:
    seed_all(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(D, 32), nn.GELU(), nn.Linear(32, D)), Odd()).double().eval()
    data = [torch.randn(8, 40, D, generator=seeded(i), dtype=torch.float64) for i in range(2)]
    with pytest.warns(CorpWarning, match=r"1 of 2 MLPs keep their width, because they .* 1 \(mlp\)") as caught:
        result = corp.prune(model, data, Recipe(mlp=0.5, sequential=False))
    assert sum("keep their width" in str(one.message) for one in caught) == 1
    assert [site.name for site in result.plan.sites] == ["0"]
    assert any("1 (mlp): norm has parameters of its own" in note for note in result.plan.notes)
