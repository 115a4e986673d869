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


def annotated() -> nn.Module:
    seed_all(3)
    return nn.Sequential(*(handmade.Annotated() for _ in range(2))).double().eval()


def sequences() -> list[Tensor]:
    return [torch.randn(6, 9, handmade.D, generator=seeded(i), dtype=torch.float64) for i in range(2)]


def test_an_attention_may_keep_its_layers_in_a_list() -> None:
    model = annotated()
    check_model(model, sequences(), show=None).require()
    sites = corp.find_sites(model, sequences()[0])
    assert (len(sites.mlp), len(sites.attention), len(sites.values)) == (2, 2, 2)


def test_the_contract_holds_on_a_model_that_compiled_itself() -> None:
    model = annotated()
    model.compile(backend="eager")
    model[0].compile(backend="eager")
    check_model(model, sequences(), show=None).require()
