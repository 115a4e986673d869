"""Affine compensation, against least squares on the stacked data."""

import pytest
import torch
from torch import Tensor

from corp.errors import SingularSystemError
from corp.numerics import affine

kept, pruned = torch.tensor([0, 2, 5, 6]), torch.tensor([1, 3, 4])


@pytest.fixture
def tokens() -> Tensor:  # (300, 7) float64, correlated, mean != 0
    return torch.randn(300, 7, dtype=torch.float64) @ torch.randn(7, 7, dtype=torch.float64) + torch.arange(7)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    centred = x - x.mean(0)
    return x.mean(0), centred.T @ centred / len(x)


def measured(x: Tensor, W: Tensor, fit: affine.Affine) -> float:
    """Mean over tokens of ||W x + b - (W_hat x_S + b_hat)||^2, through the folded layer."""
    b = torch.randn(len(W), dtype=torch.float64)
    folded = affine.fold(W, b, kept, fit)
    return float(((x @ W.T + b) - (x[:, kept] @ folded.W.T + folded.b)).square().sum(1).mean())


def test_fit_equals_brute_force_ridge(tokens: Tensor) -> None:
    mean, cov = moments(tokens)
    relative = 0.3
    lam = relative * float(cov.diagonal().mean())
    W = torch.randn(5, 7, dtype=torch.float64)
    fit = affine.fit_affine(affine.removal(W, mean, cov, kept, pruned), ridge=relative)
    # Ridge is plain least squares with sqrt(N lambda) I stacked under the centred data.
    centred = tokens - mean
    A = torch.cat([centred[:, kept], (len(tokens) * lam) ** 0.5 * torch.eye(4, dtype=torch.float64)])
    Y = torch.cat([centred[:, pruned], torch.zeros(4, 3, dtype=torch.float64)])
    B = torch.linalg.lstsq(A, Y).solution.T
    torch.testing.assert_close(fit.V, W[:, pruned] @ B)
    torch.testing.assert_close(fit.c, W[:, pruned] @ (mean[pruned] - B @ mean[kept]))


def test_fit_without_intercept_is_uncentred_ridge(tokens: Tensor) -> None:
    raw = tokens.T @ tokens / len(tokens)
    lam = 0.1 * float(raw.diagonal().mean())
    W = torch.randn(5, 7, dtype=torch.float64)
    fit = affine.fit_affine(affine.removal(W, torch.zeros(7).double(), raw, kept, pruned), ridge=0.1)
    A = torch.cat([tokens[:, kept], (len(tokens) * lam) ** 0.5 * torch.eye(4, dtype=torch.float64)])
    Y = torch.cat([tokens[:, pruned], torch.zeros(4, 3, dtype=torch.float64)])
    torch.testing.assert_close(fit.V, W[:, pruned] @ torch.linalg.lstsq(A, Y).solution.T)
    assert not fit.c.any()


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 0.5])
def test_predicted_distortion_equals_the_measured_one(tokens: Tensor, ridge: float) -> None:
    W = torch.randn(5, 7, dtype=torch.float64)
    mean, cov = moments(tokens)
    given = affine.removal(W, mean, cov, kept, pruned)
    fit = affine.fit_affine(given, ridge=ridge)
    found = affine.distortion(given, fit)
    assert pytest.approx(measured(tokens, W, fit), rel=1e-9) == found.J
    nothing = affine.nothing(given)
    assert found.J_uncomp == pytest.approx(measured(tokens, W, nothing), rel=1e-9)


def test_mean_only_costs_the_variance_of_what_was_removed(tokens: Tensor) -> None:
    W = torch.randn(5, 7, dtype=torch.float64)
    mean, cov = moments(tokens)
    given = affine.removal(W, mean, cov, kept, pruned)
    fit = affine.mean_only(given)
    lost = (tokens[:, pruned] @ W[:, pruned].T).var(0, correction=0).sum()
    assert affine.error(given, fit) == pytest.approx(float(lost), rel=1e-9)
    assert measured(tokens, W, fit) == pytest.approx(float(lost), rel=1e-9)


def test_optimum_and_rho2_equal_least_squares_on_the_outputs(tokens: Tensor) -> None:
    W = torch.randn(5, 7, dtype=torch.float64)
    mean, cov = moments(tokens)
    given = affine.removal(W, mean, cov, kept, pruned)
    found = affine.distortion(given, affine.nothing(given))
    lost = tokens[:, pruned] @ W[:, pruned].T
    A = torch.cat([tokens[:, kept], torch.ones(len(tokens), 1, dtype=torch.float64)], dim=1)
    residual = lost - A @ torch.linalg.lstsq(A, lost).solution
    best = float(residual.square().sum(1).mean())
    assert found.J_star == pytest.approx(best, rel=1e-6)
    variance = float(lost.var(0, correction=0).sum())
    assert found.rho2 == pytest.approx(1 - best / variance, rel=1e-6)
    # Proposition C.1.2: the gain is the explained variance plus the mean that the bias takes over.
    bias = float((W[:, pruned] @ mean[pruned]).square().sum())
    assert found.J_uncomp - found.J_star == pytest.approx(variance - best + bias, rel=1e-6)


def test_output_is_exact_when_pruned_channels_are_affine_in_kept_ones(tokens: Tensor) -> None:
    x = tokens.clone()
    x[:, pruned] = x[:, kept] @ torch.randn(4, 3, dtype=torch.float64) + torch.tensor([1.0, -2.0, 3.0])
    W = torch.randn(5, 7, dtype=torch.float64)
    mean, cov = moments(x)
    given = affine.removal(W, mean, cov, kept, pruned)
    fit = affine.fit_affine(given, ridge=0.0)
    assert measured(x, W, fit) < 1e-18
    assert affine.distortion(given, fit).rho2 == pytest.approx(1.0, abs=1e-9)


def test_output_energy_is_the_mean_square_of_the_output(tokens: Tensor) -> None:
    W = torch.randn(5, 7, dtype=torch.float64)
    expected = float((tokens @ W.T).square().sum(1).mean())
    assert affine.output_energy(W, *moments(tokens)) == pytest.approx(expected)


def test_the_energy_before_a_removal_is_that_of_the_whole_output(tokens: Tensor) -> None:
    W = torch.randn(5, 7, dtype=torch.float64)
    given = affine.removal(W, *moments(tokens), kept, pruned)
    assert affine.energy_before(given, W[:, kept]) == pytest.approx(affine.output_energy(W, *moments(tokens)))


def test_singular_system_says_what_to_do() -> None:
    cov = torch.ones(7, 7, dtype=torch.float64)  # seven times the same channel
    with pytest.raises(SingularSystemError, match=r"4 kept dimensions .* raise the ridge or calibrate on more"):
        affine.fit_affine(affine.removal(torch.eye(7).double(), cov[0], cov, kept, pruned), ridge=0.0)
