"""Scales and factors of narrowed heads under QK-norm, computed from rows and gains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corp.surgery.normed_check import _factor, _scales
from tests.helpers.seeds import seeded


def random(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(number), dtype=torch.float64)


@pytest.mark.parametrize(("share", "known"), [(0.0, True), (5e-3, True), (2e-2, False)])
def test_rows_that_are_multiples_of_dense_ones_have_a_scale(share: float, known: bool) -> None:
    before, kept = random(6, 8), torch.tensor([1, 4, 5])
    scales = torch.tensor([2.0, -0.5, 1.0], dtype=torch.float64)
    rows = before[kept]
    other = random(3, 8, number=1)
    other -= (other * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True) * rows  # a right angle away
    other *= rows.norm(dim=1, keepdim=True) / other.norm(dim=1, keepdim=True)
    found = _scales(before, scales[:, None] * rows + share * other, kept)
    if known:
        torch.testing.assert_close(found, scales)
    else:
        assert bool(found.isnan().all())


def test_rows_of_zeros_have_a_scale_of_one_if_they_stay_zeros() -> None:
    before, kept = torch.zeros(4, 5, dtype=torch.float64), torch.tensor([0, 2])
    assert _scales(before, torch.zeros(2, 5, dtype=torch.float64), kept).tolist() == [1.0, 1.0]
    assert bool(_scales(before, torch.ones(2, 5, dtype=torch.float64), kept).isnan().all())


def test_factors_are_those_that_pairs_are_multiplied_by_after_their_gains() -> None:
    """The norm computes gain x + cross swap(x): for the dense gains times a complex number, that number is found."""
    dense, c = random(2, 6), torch.complex(random(2, 3, number=1), random(2, 3, number=2))
    first, second = dense.chunk(2, -1)
    gain = torch.cat([c.real * first, c.real * second], -1)
    cross = torch.cat([-c.imag * second, c.imag * first], -1)
    torch.testing.assert_close(_factor(dense, gain, cross), c)
    x = random(2, 6, number=3)
    y = gain * x + cross * x.roll(3, -1)
    z = torch.complex(*(dense * x).chunk(2, -1)) * c
    torch.testing.assert_close(y, torch.cat([z.real, z.imag], -1))


def test_pairs_without_gain_have_a_factor_of_one() -> None:
    zeros = torch.zeros(1, 4, dtype=torch.float64)
    found = _factor(zeros, zeros + 3, zeros)
    torch.testing.assert_close(found, torch.ones(1, 2, dtype=torch.complex128))
