"""Which tokens the refit sums."""

from __future__ import annotations

import torch

from corp.calibration.holdout import EVERY
from corp.surgery.refit.gaps import ENOUGH, split_rows, stride
from corp.surgery.refit.replay import Block, Passage

SAMPLES, TOKENS = 3 * EVERY, 12


def block(read: int) -> Block:
    return Block("blocks.0", True, (), (), TOKENS, batch_first=True, read=read)


def test_a_few_of_the_other_tokens_are_taken_and_all_that_are_read() -> None:
    passage = Passage(samples=SAMPLES)
    (read, others), (held_read, held_others) = (
        tuple(part.view(SAMPLES, TOKENS) for part in pair)
        for pair in split_rows(block(1), passage, torch.zeros(SAMPLES, TOKENS, 4), 3)
    )
    assert (read | held_read)[:, 0].all()
    assert not (read | held_read)[:, 1:].any()
    taken = others | held_others
    assert not taken[:, 0].any()
    assert not (others & held_others).any()
    often = taken[:, 1:].sum(0)
    assert int(often.max() - often.min()) <= 3, "every place of an image counts about as often"
    assert SAMPLES // 4 < float(often.float().mean()) < SAMPLES // 2
    assert not bool((others.any(1) & held_others.any(1)).any()), "a sample is fitted or held out"
    assert len({tuple(row.tolist()) for row in held_others[held_others.any(1)]}) == 3, "held-out samples differ too"


def test_texts_are_taken_whole() -> None:
    passage = Passage(samples=SAMPLES)
    (fit, _), (held, _) = split_rows(block(TOKENS), passage, torch.zeros(SAMPLES, TOKENS, 4), 3)
    assert bool((fit | held).all())


def test_tokens_are_left_out_only_if_enough_remain() -> None:
    samples = 128
    tokens = samples * (TOKENS - 1)
    assert stride(block(1), samples, inputs=tokens // ENOUGH) == 1
    assert stride(block(1), samples, inputs=tokens // ENOUGH // 3) == 3
    assert stride(block(1), samples, inputs=10 * tokens) == 1
    assert stride(block(TOKENS), samples, inputs=1) == 1
