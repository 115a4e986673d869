"""The ridge of a fit of values: what was asked for, or more where rounding errors of the sums exceed it."""

from __future__ import annotations

import pytest
import torch

from corp.errors import SingularSystemError
from corp.numerics import affine
from corp.numerics.values import Basis
from corp.planning.linear import Choice, fit_choice
from corp.recipe import Recipe

KEPT, PRUNED = torch.arange(3), torch.arange(3, 5)
EYE = torch.eye(5, dtype=torch.float64)


def removal(least: float) -> affine.Removal:
    """What two of five channels leave to predict, with a least eigenvalue of the kept ones' covariance."""
    cov = EYE.clone()
    cov[0, 1] = cov[1, 0] = 1 - least
    return affine.removal(EYE, torch.zeros(5, dtype=torch.float64), cov, KEPT, PRUNED)


def choice(basis: Basis | None) -> Choice:
    return Choice([KEPT], basis)


def test_the_ridge_that_was_asked_for_is_used_where_it_suffices() -> None:
    fit, used = fit_choice(removal(least=0.1), choice(Basis(EYE[None], EYE[None])), Recipe(vo=0.4))
    assert used.ridge == Recipe().ridge
    assert torch.equal(fit.V, affine.fit_affine(removal(least=0.1), ridge=Recipe().ridge).V)


@pytest.mark.parametrize(("least", "ridge"), [(-5e-3, 1e-2), (-0.5, 1.0)])
def test_rounding_errors_that_a_basis_magnifies_raise_it(least: float, ridge: float) -> None:
    _, used = fit_choice(removal(least), choice(Basis(EYE[None], EYE[None])), Recipe(vo=0.4))
    assert used.ridge == pytest.approx(ridge)


@pytest.mark.parametrize(("basis", "ridge"), [(None, 1e-3), (Basis(EYE[None], EYE[None]), 0.0)])
def test_channels_as_they_are_and_a_ridge_of_zero_are_refused_as_before(basis: Basis | None, ridge: float) -> None:
    with pytest.raises(SingularSystemError, match="not positive definite"):
        fit_choice(removal(least=-0.5), choice(basis), Recipe(vo=0.4, ridge=ridge))
