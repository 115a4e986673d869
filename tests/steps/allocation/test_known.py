"""Blocks that need not run again give what they gave, and only those in front of a change are left out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import corp
from corp import Recipe
from corp.measure.closeness import Reference
from corp.steps.allocation import known
from corp.steps.allocation.known import KnownBlocks
from tests.helpers.models import batches, build

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")


def trial(model: nn.Module, data: list[Any], name: str) -> nn.Module:
    """The model with one narrower MLP."""
    sites = corp.find_sites(model, data[0])
    others = [site.name for site in sites if site.name != name]
    recipe = Recipe.paper(mlp=0.5, skip=others)
    return corp.prune(model, data, recipe).model


@pytest.mark.parametrize("family", ["vit", "hf-opt", "hf-gpt2", "hf-clip", "hf-whisper", "torch-encoder"])
def test_a_trial_that_leaves_known_blocks_out_has_the_same_output(family: str) -> None:
    model, data = build(family), batches(family)
    reference, sites = Reference(model, data), corp.find_sites(model, data[0])
    blocks = KnownBlocks.of(model, sites, reference)
    for site in (sites.mlp[0], sites.mlp[-1]):
        changed = trial(model, data, site.name)
        expected = reference.compare(changed).divergence()
        assert expected.value > 0
        assert reference.compare(blocks.skip(changed, site)).divergence() == expected


class Adding(nn.Module):
    """A block that adds to its input in place, and may run more than once."""

    kind = "adding"

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        x += self.down(torch.relu(self.up(x)))
        return x


class Chain(nn.Module):
    """Blocks that run in `order`; the model reads an attribute of theirs."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks, self.head, self.order = nn.ModuleList(Adding() for _ in range(3)), nn.Linear(8, 5), order

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for number in self.order:
            block: Any = self.blocks[number]
            assert block.kind == "adding"
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("order", "runs"),
    [((0, 1, 2), [0, 0, 2]), ((1, 2, 0), [2, 0, 2]), ((0, 1, 0, 2), [4, 0, 2]), ((2, 0, 1, 2), [2, 2, 4])],
)
def test_only_blocks_that_ran_once_and_ended_before_the_change_are_left_out(
    order: tuple[int, ...], runs: list[int]
) -> None:
    model, data = Chain(order).double().eval(), [torch.randn(6, 8, dtype=torch.float64) for _ in range(2)]
    sites, reference = corp.find_sites(model, data[0]), Reference(model, data)
    blocks = KnownBlocks.of(model, sites, reference)
    changed: Any = trial(model, data, "blocks.2")
    for block in changed.blocks:
        block.runs = 0
    expected = reference.compare(trial(model, data, "blocks.2")).divergence()
    assert reference.compare(blocks.skip(changed, sites["blocks.2"])).divergence() == expected
    assert [block.runs for block in changed.blocks] == runs


def test_hooks_of_the_blocks_run_once_as_in_the_model() -> None:
    """transformers collects hidden states by hooks, and a user's hook may change an output."""
    model, data = Chain((0, 1, 2)).double().eval(), [torch.randn(6, 8, dtype=torch.float64) for _ in range(2)]
    seen: list[Tensor] = []

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        seen.append(output.clone())
        return 2 * output

    sites = corp.find_sites(model, data[0])
    model.blocks[0].register_forward_hook(hook)
    reference = Reference(model, data)
    blocks = KnownBlocks.of(model, sites, reference)
    seen.clear()
    same = blocks.skip(copy.deepcopy(model), sites["blocks.2"])
    assert reference.compare(same).divergence().value == pytest.approx(0, abs=1e-15)
    assert len(seen) == len(data)


def test_outputs_that_are_too_large_to_keep_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "KEPT", 2 * 6 * 8 * 8 * 2 - 1)  # two blocks on two batches, less a byte
    model, data = Chain((0, 1, 2)).double().eval(), [torch.randn(6, 8, dtype=torch.float64) for _ in range(2)]
    blocks = KnownBlocks.of(model, corp.find_sites(model, data[0]), Reference(model, data))
    assert not blocks.outputs
