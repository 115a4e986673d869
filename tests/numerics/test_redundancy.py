"""Measures of redundancy, against their definitions on the data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from corp.numerics.redundancy import effective_rank, inactivity, k_share, redundancy
from tests.helpers.spectra import brute_k, brute_rank


@pytest.fixture
def tokens() -> Tensor:
    mixing = torch.randn(12, 12, dtype=torch.float64) * torch.logspace(0, -3, 12, dtype=torch.float64)
    return torch.randn(300, 12, dtype=torch.float64) @ mixing.T + 2.0


def test_measures_equal_brute_force_on_the_data(tokens: Tensor) -> None:
    found = redundancy(torch.from_numpy(np.cov(tokens.numpy().T, bias=True)))
    centred = tokens - tokens.mean(0)
    eigenvalues = (torch.linalg.svdvals(centred) ** 2).tolist()  # no covariance is formed
    assert found.dim == 12
    assert found.effective_rank == pytest.approx(brute_rank(eigenvalues))
    assert found.k95_eigenvalues == brute_k(eigenvalues, 0.95)
    assert found.k95_channels == brute_k(centred.square().sum(0).tolist(), 0.95)
    assert found.k95_eigenvalues < found.k95_channels


def test_known_spectra() -> None:
    assert effective_rank(torch.ones(7)) == pytest.approx(7)
    assert effective_rank(torch.tensor([3.0, 0, 0])) == pytest.approx(1)
    assert effective_rank(torch.zeros(3)) == 0
    assert k_share(torch.tensor([1.0, 94, 5])) == 2
    assert k_share(torch.tensor([95.0, 4, 1])) == 1  # met exactly
    assert k_share(torch.full((20,), 0.1)) == 19  # met exactly, up to rounding
    assert k_share(torch.zeros(3)) == 0
    assert k_share(torch.tensor([3.0])) == 1
    assert k_share(torch.tensor([4.0, 3, 2, 1]), 1.0) == 4
    assert inactivity(torch.tensor([1.0, 0.5, 0])) == pytest.approx(0.5)


def test_rounding_below_zero_does_not_become_nan() -> None:
    v = torch.randn(6, 1)
    found = redundancy(v @ v.T)  # rank one in float32: five eigenvalues of about -1e-8 and +1e-8
    assert found.effective_rank == pytest.approx(1, abs=1e-4)
    assert found.k95_eigenvalues == 1


def test_no_channels_have_no_rank() -> None:
    nothing = torch.zeros(0, dtype=torch.float64)
    assert effective_rank(nothing) == 0
    assert k_share(nothing) == 0
    assert redundancy(torch.zeros(2, 2, dtype=torch.float64)) == (2, 0, 0, 0)
