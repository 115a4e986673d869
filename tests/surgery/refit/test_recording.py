"""How much of the data the refit records: samples by tokens, by what is read, by memory and by request."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corp.errors import PlanError
from corp.recipe import Recipe
from corp.sites import MLPSite, Rows, Sites
from corp.surgery.refit import recording
from corp.surgery.refit.recording import Recorder, record_batches, samples_wanted, tokens_wanted
from corp.surgery.refit.replay import Block
from tests.helpers.seeds import seeded

RECIPE, SOME = Recipe(mlp=0.5), Recipe(mlp=0.5, sequential=True, sequential_samples=5)


def block(tokens: int, inputs: int = 8, read: int | None = None, number: int = 0) -> Block:
    site = MLPSite(f"{number}.mlp", (Rows(f"{number}.mlp.up", 0, inputs),), f"{number}.mlp.down")
    scale = torch.ones(4)
    return Block(f"{number}", number == 0, (site,), (scale,), tokens, True, tokens if read is None else read)


def test_wide_layers_need_more_tokens() -> None:
    assert tokens_wanted([block(10, 8)]) == tokens_wanted([block(10, 1024)]) == 49_152
    assert tokens_wanted([block(10, 8), block(10, 3072)]) == 2 * 49_152
    assert tokens_wanted([Block("0", True, (), (), 10, True)]) == 49_152


def test_samples_are_as_many_as_have_the_tokens() -> None:
    assert samples_wanted(RECIPE, [block(64)]) == 768
    assert samples_wanted(RECIPE, [block(64), block(128)]) == 384
    assert samples_wanted(RECIPE, [block(1000)]) == 50
    assert samples_wanted(SOME, [block(64)]) == 5


def test_where_few_tokens_are_read_there_are_three_times_the_samples_up_to_a_limit() -> None:
    assert samples_wanted(RECIPE, [block(1024, read=1)]) == 144
    assert samples_wanted(RECIPE, [block(1024, read=1), block(1024)]) == 144
    assert samples_wanted(RECIPE, [block(64, read=1)]) == 512


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(x)
        return out


def recorder(recipe: Recipe = RECIPE, available: int = 100, tokens: int = 3) -> Recorder:
    model = nn.Sequential(Layer(), Layer()).eval()
    blocks = [block(tokens, number=i) for i in range(2)]
    sites = Sites([site for one in blocks for site in one.sites])  # type: ignore[misc]
    return Recorder(model, sites, blocks, recipe, available)


def batches(count: int, size: int = 2, tokens: int = 3) -> list[Tensor]:
    return [torch.randn(size, tokens, 4, generator=seeded(i)) for i in range(count)]


def feed(made: Recorder, data: list[Any]) -> None:
    for batch in data:
        made.record(batch, lambda batch=batch: made.model(batch))  # type: ignore[misc]


def test_a_recording_counts_samples_and_tokens() -> None:
    made = recorder()
    feed(made, batches(3))
    assert [(p.first, p.samples) for p in made.passages] == [(0, 2), (2, 2), (4, 2)]
    assert (made.seen, made.tokens) == (6, 18)
    assert [list(p.calls) for p in made.passages] == [["0", "1"]] * 3
    assert torch.equal(made.passages[1].starts["0"], batches(3)[1])


def test_it_is_full_with_the_samples_that_were_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    made = recorder(SOME)
    monkeypatch.setattr(recording, "free_bytes", lambda _device: 10**9)
    feed(made, batches(2))
    assert not made.full
    feed(made, batches(1, size=1))
    assert (made.seen, made.full) == (5, True)


def test_it_is_full_with_three_times_the_tokens_that_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "TOKENS", 6)
    monkeypatch.setattr(recording, "PER_INPUT", 0)
    made = recorder(tokens=1)  # the first samples had fewer
    assert made.wanted == 6
    feed(made, batches(2))
    assert (made.tokens, made.full) == (12, False)
    feed(made, batches(1))
    assert (made.tokens, made.seen, made.full) == (18, 6, True)


@pytest.mark.parametrize(("available", "wanted"), [(20, [0, 4, 8]), (9, [0, 1, 2]), (3, [0, 1, 2]), (10, [0, 2, 4])])
def test_samples_are_spread_over_the_data(available: int, wanted: list[int]) -> None:
    made = recorder(SOME, available)
    assert [index for index in range(20) if made.wants(index)][:3] == wanted


def test_memory_for_the_streams_outputs_and_last_input_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of 3 tokens and 4 channels takes 48 bytes: five streams, one output, and an input of twice the width."""
    monkeypatch.setattr(recording, "free_bytes", lambda _device: 1000)
    made = recorder()
    feed(made, batches(1))
    assert made.affordable == pytest.approx(1000 / 2 / (48 * (5 + 1 + 2)))
    feed(made, batches(1))
    assert made.full  # two samples are more than 1.3
    assert math.isinf(recorder().affordable)


@pytest.mark.parametrize(("available", "free", "fits"), [(100, 48 * 8 * 5, True), (100, 48 * 8 * 5 - 1, False),
                                                        (3, 48 * 8 * 3, True)])  # fmt: skip
def test_a_request_that_memory_cannot_hold_is_refused(
    available: int, free: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "free_bytes", lambda _device: free)
    made = recorder(SOME, available)
    if fits:
        feed(made, batches(1))
    else:
        with pytest.raises(PlanError, match="give it fewer samples with sequential_samples"):
            feed(made, batches(1))


def test_batches_are_recorded_until_there_are_enough() -> None:
    made = recorder(SOME)
    steps: list[int] = []
    found = record_batches(made.model, made.sites, batches(8), made.blocks, SOME, 8, advance=steps.append)
    assert [p.samples for p in found] == steps == [2, 2, 2]
    assert [p.first for p in found] == [0, 2, 4]
