"""Models written by hand, whose conventions are told by nothing but their code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import corp
from corp.testing import check_model
from tests.helpers import handmade
from tests.helpers.seeds import seed_all, seeded

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # few samples, on purpose


def texts() -> list[Tensor]:
    return [torch.randint(handmade.WORDS, (6, handmade.TOKENS), generator=seeded(i)) for i in range(3)]


def language() -> nn.Module:
    seed_all(3)
    return handmade.Language().double().eval()


def test_the_contract_holds_where_neighbours_are_rotated_by_angles_that_the_block_passes() -> None:
    model = language()
    check_model(model, texts(), show=None).require()
    sites = corp.find_sites(model, texts()[0])
    assert (len(sites.mlp), len(sites.attention), len(sites.values)) == (2, 2, 2)
    assert not sites.refused


def test_layers_that_are_called_by_name_are_pruned_searched_and_refitted() -> None:
    model = language()
    result = corp.prune(model, texts(), corp.Recipe(target_params=0.7, output=0.5))
    assert not any("not refitted" in note for note in result.plan.notes)
    assert result.model(texts()[0]).logits.isfinite().all()


@pytest.mark.parametrize("block", [handmade.Masked, handmade.Biased])
def test_heads_one_after_the_other_are_found_where_an_attention_wants_more_than_a_sequence(
    block: type[nn.Module],
) -> None:
    seed_all(3)
    model = nn.Sequential(*(block() for _ in range(2))).double().eval()
    tokens = torch.randn(6, 9, handmade.D, generator=seeded(1), dtype=torch.float64)
    check_model(model, [tokens, tokens.flip(0)], show=None).require()
    sites = corp.find_sites(model)  # without a batch: loading has none
    assert (len(sites.attention), len(sites.values)) == (2, 2)
