"""Corrections of single layers against least squares, and which tokens they are fitted on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from corp.calibration.holdout import HoldOut
from corp.errors import CorpWarning, ModelError, PlanError
from corp.numerics.place import Place
from corp.sites import Mask, MLPSite, Rows
from corp.surgery.refit.gaps import TokenSums
from corp.surgery.refit.layer import OTHERS, OTHERS_PER_INPUT, added, correct_layer, correction, split_rows
from corp.surgery.refit.repair import require_whole, warn_of_few
from corp.surgery.refit.replay import Block, Passage
from tests.helpers.seeds import seed_all, seeded

N, D, OUT = 60, 4, 3
MASK = Mask("model", "mask")
SITE = MLPSite("mlp", (Rows("up", 0, D),), "down", MASK)


def random(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(number), dtype=torch.float64)


def sums(x: Tensor, gap: Tensor, held: bool) -> TokenSums:
    made = TokenSums(D, OUT)
    made.shift_by(x.mean(0))
    rows = (torch.arange(len(x)) % 3 == 0) == held
    made.update(x, gap, rows, torch.zeros_like(rows))
    return made


def layer(bias: bool) -> nn.ModuleDict:
    seed_all(0)
    return nn.ModuleDict({"down": nn.Linear(D, OUT, bias=bias).double()})


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_gap_is_closed_by_the_layer(bias: bool) -> None:
    """Channels have layer scales; one of them is zero, which the layer cannot reach."""
    model, x, scale = layer(bias), random(N, D) + 2, torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64)
    R, c = random(OUT, D, number=1), random(OUT, number=2) * bias
    gap = x @ R.mT + c
    before = model["down"](x).detach()
    made = correct_layer(model, SITE, scale, sums(x, gap, False), sums(x, gap, True))
    assert made is not None
    effect = scale * (model["down"](x).detach() - before)
    torch.testing.assert_close(effect[:, :2], gap[:, :2], rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(added(before, x, *made.change), before + effect)
    assert made.record["gap"] == pytest.approx(float(gap.square().sum(1).mean()))
    assert made.record["left"] < 1e-4 * made.record["gap"]
    assert (model["down"].bias is None) == (not bias)


def test_what_is_left_is_that_of_the_correction() -> None:
    model, x = layer(True), random(N, D) + 2
    gap = x @ random(OUT, D, number=1).mT + random(N, OUT, number=3)
    before = model["down"](x).detach()
    made = correct_layer(model, SITE, torch.ones(OUT), sums(x, gap, False), sums(x, gap, True))
    assert made is not None
    left = gap - (model["down"](x).detach() - before)
    assert made.record["left"] == pytest.approx(float(left.square().sum(1).mean()))
    whole = torch.cat([x, torch.ones(N, 1, dtype=torch.float64)], 1)
    best = gap - whole @ torch.linalg.lstsq(whole, gap).solution
    assert made.record["left"] >= float(best.square().sum(1).mean())
    assert made.record["left"] < 0.6 * made.record["gap"]


def test_nothing_is_corrected_where_nothing_helps() -> None:
    model, x = layer(True), random(N, D)
    place = Place.on(torch.device("cpu"))
    held = torch.arange(N) % 3 == 0
    noise = x @ random(OUT, D, number=1).mT * torch.where(held, -1.0, 1.0)[:, None]  # the opposite on unseen tokens
    assert correction(sums(x, noise, False), sums(x, noise, True), True, place) is None
    before = model["down"].weight.detach().clone()
    assert correct_layer(model, SITE, torch.ones(OUT), sums(x, noise, False), sums(x, noise, True)) is None
    assert torch.equal(model["down"].weight, before)
    none = torch.zeros(N, OUT, dtype=torch.float64)
    assert correction(sums(x, none, False), sums(x, none, True), True, place) is None
    gap, empty = x[:, :OUT].clone(), TokenSums(D, OUT)
    empty.shift_by(x.mean(0))
    assert correction(sums(x, gap, False), empty, True, place) is None
    assert correction(empty, sums(x, gap, True), True, place) is None
    assert correction(sums(x, gap, False), sums(x, gap, True), True, place) is not None


def block(tokens: int, read: int, batch_first: bool = True) -> Block:
    return Block("0", True, (SITE,), (torch.ones(2),), tokens, batch_first, read=read)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("read", [2, 5])
@pytest.mark.parametrize("first", [0, 30])
def test_consecutive_samples_are_held_out_and_padding_is_no_data(
    batch_first: bool, masked: bool, read: int, first: int
) -> None:
    samples, tokens, rule = 10, 5, HoldOut(40)  # of 40 samples 18, 19, 37, 38 and 39
    mask = torch.arange(tokens) < torch.tensor([5, 3] * 5)[:, None] if masked else None
    passage = Passage(masks={MASK: mask}, first=first, samples=samples)
    hidden = torch.zeros((samples, tokens, 2) if batch_first else (tokens, samples, 2))
    found = split_rows(block(tokens, read, batch_first), passage, hidden, rule)
    for number, (chosen, other) in enumerate(found):
        for rows, inside in ((chosen, True), (other, False)):
            expected = torch.zeros(samples, tokens, dtype=torch.bool)
            for b in range(samples):
                for t in range(tokens):
                    real = mask is None or bool(mask[b, t])
                    held = first + b in (18, 19, 37, 38, 39)
                    expected[b, t] = real and held == bool(number) and (t < read) == inside
            assert torch.equal(rows, (expected if batch_first else expected.mT).reshape(-1))


@pytest.mark.parametrize("batch_first", [True, False])
def test_tokens_that_are_not_read_are_thinned_out_if_there_are_plenty(batch_first: bool) -> None:
    samples, tokens, total = 6, 17, 4 * OTHERS // 16  # 16 of 17 tokens are not read: four times as many as needed
    up = (Rows("up", 0, 2 * OTHERS // OTHERS_PER_INPUT),)
    wide = replace(block(tokens, 1, batch_first), sites=(replace(SITE, up=up),))
    passage = Passage(first=3, samples=samples)
    hidden = torch.zeros((samples, tokens, 2) if batch_first else (tokens, samples, 2))
    for one, every in ((block(tokens, 1, batch_first), 4), (wide, 2)):  # a wide layer needs more
        (read, other), _ = split_rows(one, passage, hidden, HoldOut(total))
        read, other = (
            rows.view(hidden.shape[:2]) if batch_first else rows.view(tokens, -1).mT for rows in (read, other)
        )
        assert bool(read[:, 0].all())
        assert not bool(read[:, 1:].any())
        assert not bool(other[:, 0].any())
        assert int(other.sum()) == samples * 16 // every
        taken = [{t for t in range(1, tokens) if other[b, t]} for b in range(samples)]
        assert taken[0] == taken[every] != taken[1]  # neighbours differ, so all places count
        assert set().union(*taken) == set(range(1, tokens))
    (_, other), _ = split_rows(block(tokens, 1, batch_first), passage, hidden, HoldOut(total // 4))
    assert int(other.sum()) == samples * 16  # no more than needed: all


def test_longer_texts_than_the_first_are_read_whole() -> None:
    (chosen, other), _ = split_rows(block(5, 5), Passage(), torch.zeros(3, 8, 2), HoldOut(3))
    assert int(chosen.sum()) == 2 * 8
    assert not bool(other.any())


def test_masks_of_other_shapes_are_refused() -> None:
    passage = Passage(masks={MASK: torch.ones(3, 4)})
    with pytest.raises(PlanError, match=r"the mask has shape \(3, 4\), the hidden states \(3, 5\)"):
        split_rows(block(5, 5), passage, torch.zeros(3, 5, 2), HoldOut(3))


def test_outputs_keep_their_dtype_and_shape_when_something_is_added() -> None:
    output, x = random(2, 3, OUT).half(), random(2, 3, D, number=1).half()
    W, b = random(OUT, D, number=2), random(OUT, number=3)
    found = added(output, x, W, b)
    assert (found.dtype, found.shape) == (torch.float16, output.shape)
    expected = output.double() + x.double() @ W.mT + b
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


def test_few_tokens_are_told_once() -> None:
    warn_of_few([])
    with pytest.warns(CorpWarning, match=r"a \(of 2\) was fitted sequentially on fewer tokens"):
        warn_of_few(["a", "b"])


def test_a_model_that_does_not_reproduce_its_refit_is_not_returned() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2)).double(), random(3, 4, 2)
    expected = model(x).detach()
    require_whole(model, [block(4, 4)], expected, lambda: model(x))
    with pytest.raises(ModelError, match=r"does not reproduce its refit \(0\)"):
        require_whole(model, [block(4, 4)], 1.001 * expected, lambda: model(x))
    with pytest.raises(ModelError, match="does not reproduce its refit"):
        require_whole(model, [block(4, 4)], expected, lambda: None)
    assert not model[0]._forward_hooks
